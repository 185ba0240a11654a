"""The backend's name, variants and limits. Importing this module does not import DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import ClassVar

import torch

from moe_conformance.backends.library import Library
from moe_conformance.contract import Limit, Session, Topology

_INSTALL = "pip install --no-deps deepspeed, and einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm"
_TRUST = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"

_COUNTED = "count_tokens_per_expert adds up by scatter_add over the ids, in which -1 is out of bounds"
_FLOAT32 = "AutoEP multiplies rows by `top_scores.float()`, whatever their dtype"


class DeepSpeed:
    """deepspeed, published or a checkout; on CPU ranks over gloo or on GPUs."""

    name: ClassVar[str] = "deepspeed"
    variants: ClassVar[tuple[str, ...]] = ("moe", "autoep")
    process_per_rank: ClassVar[bool] = True  # deepspeed.utils.groups
    library: ClassVar[Library] = Library(
        "deepspeed",
        "deepspeed",
        ">=0.19.6,<0.20",
        _INSTALL,
        lambda folder: (folder / "version.txt").read_text().strip(),
    )
    preload: ClassVar[tuple[str, ...]] = ("moe_conformance.backends.deepspeed.library",)
    environment: ClassVar[Mapping[str, str]] = {
        "TORCH_COMPILE_DISABLE": "1",  # else 0.19.6 compiles parts of its gates, once for each shape
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the preload asks for a GPU, and must not start CUDA before the fork
    }

    def versions(self) -> Mapping[str, str]:
        """Versions of DeepSpeed and of torch."""
        return {"deepspeed": self.library.version(), "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Nothing checks input; AutoEP has no value for an empty slot, and computes in float32."""
        unchecked = Limit("wrong_use", (False,), _TRUST, proof="undefined")
        if variant == "moe":
            return (unchecked,)
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return (
            Limit("dropped_slots", (False,), _COUNTED, proof="undefined"),
            Limit("dtype", floats, _FLOAT32, proof="undefined"),
            unchecked,
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library if the ranks did not preload it, and open a session."""
        self.versions()
        from moe_conformance.backends.deepspeed.session import DeepSpeedSession

        return DeepSpeedSession(topology, device)
