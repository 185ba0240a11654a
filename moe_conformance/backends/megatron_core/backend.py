"""The backend. Importing it does not import Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch

from moe_conformance.backends.library import Library
from moe_conformance.contract import Limit, Session, Topology

_TRUST = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
_MAP = "the dispatcher takes a boolean map (T, E), in which a token has an expert once or not at all"
_EVEN = "all_gather_into_tensor and reduce_scatter_tensor take equal sizes: other sizes abort or hang on gloo"
# 0.19 asks for Python 3.12, runs on 3.11, and imports triton.
_INSTALL = "pip install --no-deps --ignore-requires-python megatron-core triton"
_SEQUENCE = "sequence parallelism gathers equal numbers of tokens from the ranks of tp for a shared expert"


def _declared(folder: Path) -> str:
    """Return the version that a checkout declares, in four constants."""
    text = (folder / "megatron" / "core" / "package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = '?(\w*)'?$", text, re.MULTILINE))
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts['PRE_RELEASE']}"


class MegatronCore:
    """The published megatron-core with its own experts; Transformer Engine is not used."""

    name: ClassVar[str] = "megatron-core"
    variants: ClassVar[tuple[str, ...]] = ("alltoall", "allgather")
    orders: ClassVar[tuple[str, ...]] = ("tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "tp-pp-cp-ep-dp", "dp-ep-cp-tp-pp")
    process_per_rank: ClassVar[bool] = True  # parallel_state
    library: ClassVar[Library] = Library("megatron-core", "megatron.core", ">=0.16,<0.21", _INSTALL, _declared)
    preload: ClassVar[tuple[str, ...]] = ("moe_conformance.backends.megatron_core.library",)
    environment: ClassVar[Mapping[str, str]] = {
        "TORCH_COMPILE_DISABLE": "1",  # else its decorators compile while it is imported, and then once per shape
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the preload asks for a GPU, and must not start CUDA before the fork
    }

    def versions(self) -> Mapping[str, str]:
        """Versions of Megatron-Core and torch."""
        return {"megatron-core": self.library.version(), "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """What the dispatchers' interfaces exclude."""
        limits = (
            Limit("duplicate_experts", (False,), _MAP, proof="undefined"),
            Limit("wrong_use", (False,), _TRUST, proof="undefined"),
            Limit("uneven_tp_tokens", (False,), _SEQUENCE, proof="undefined"),
        )
        if variant == "allgather":
            return (*limits, Limit("uneven_tokens", (False,), _EVEN, proof="undefined"))
        return limits

    def groups(self, sizes: Mapping[str, int], order: str = "") -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """The rank lists of the library's two rank generators, if its own checks let the sizes and the order pass."""
        from moe_conformance.backends.megatron_core.rank_lists import USUAL, rank_lists

        return rank_lists(sizes, order or USUAL)

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library if the ranks did not preload it, and open a session."""
        self.versions()
        from moe_conformance.backends.megatron_core.session import MegatronSession

        return MegatronSession(topology, device)
