"""The backend's name, variants and limits. Importing this module does not import torchtitan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import ClassVar

import torch

from moe_conformance.backends.library import Library
from moe_conformance.backends.torchtitan.exchange import DISPATCHERS, INSTALL
from moe_conformance.contract import Limit, Session, Topology, Unsupported


class TorchTitan:
    """torchtitan, published or a checkout; on CPU ranks over gloo or on GPUs."""

    name: ClassVar[str] = "torchtitan"
    variants: ClassVar[tuple[str, ...]] = tuple(DISPATCHERS)
    preload: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torchtitan.models.common.moe",
        "torchtitan.models.common.token_dispatcher",
    )
    # torchao finds its permutation by a Triton kernel, which has no CPU target: Triton's interpreter runs it.
    library: ClassVar[Library] = Library(
        "torchtitan", "torchtitan", ">=0.2.2,<0.4", INSTALL,
        lambda folder: (folder / "assets" / "version.txt").read_text().strip(),
    )  # fmt: skip
    environment: ClassVar[Mapping[str, str]] = {"TRITON_INTERPRET": "1"}

    def versions(self) -> Mapping[str, str]:
        """Versions of torchtitan and of what it computes with; torchao's only where it is installed."""
        if find_spec("spmd_types") is None:
            raise Unsupported(f"spmd_types is not installed: {INSTALL}")
        found, folder = self.library.version(), self.library.folder()
        if folder is not None and not (folder / "torchtitan" / "models" / "common").is_dir():
            # A checkout of main calls itself 0.2.2, too, and has it.
            raise Unsupported(f"torchtitan {found} is not supported: it has no torchtitan.models.common; {INSTALL}")
        packages = ("spmd_types", "torch", *(("torchao",) if find_spec("torchao") else ()))
        return {"torchtitan": found} | {package: version(package) for package in packages}

    def limits(self, variant: str) -> Sequence[Limit]:
        """No variant has a value for an empty slot, or checks its input; the local one is on one rank."""
        reason = "the dispatchers sort all T * K slots by expert id, and an id names an expert; none means `nowhere`"
        equal = "for a shared expert sequence parallelism gathers tokens of the ranks of tp, of each as many"
        trust = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
        local = "the local dispatcher has no expert parallelism"
        alone = (Limit("spread_experts", (False,), local, proof="design"),) if variant == "local" else ()
        return (
            *alone,
            Limit("dropped_slots", (False,), reason, proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
            Limit("uneven_tp_tokens", (False,), equal, proof="undefined"),
        )

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """The rank lists of the library's meshes, if its own checks let the sizes pass."""
        from moe_conformance.backends.torchtitan.rank_lists import rank_lists

        return rank_lists(sizes)

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session on the suite's groups; the library itself keeps one global, its SPMD setting."""
        self.versions()
        from moe_conformance.backends.torchtitan.session import TitanSession

        return TitanSession(topology, device)
