"""The native backend: plain torch and torch.distributed, on gloo and NCCL. It is under test like any other.

    groups.py   process groups, and which experts a rank holds
    session.py  builds the parts; offered.py finds the surfaces that need no process group, one file each
    exchange/   variants "local", "allgather" and "alltoall" (dispatchers.py) over collectives with gradients; padding
                of token counts, tokens held by all tp ranks, and what is wrong with an input
    fused/      variants "deepep", "hybridep" and "ncclep": a fused token exchange, its gradients, float8 rows, three
                layouts for the experts, and the dispatcher over them; variant "lowlatency": fixed places per expert
    row_ops/    permute and unpermute, reordering, routing maps, row indices, packed sequences
    router/     the router, forced routing, capacity and token drop
    layer/      SwiGLU experts, shared experts, a whole layer, and what happens to gradients before the step

To run a changed version (a planted bug, an experiment), override one method of one class and pass that class:

    class Doubled(AllToAllExchange):
        def _weigh(self, rows_PD, weights_P):
            return super()._weigh(rows_PD, 2 * weights_P)

    class DoubledNative(Native):
        name = "native-doubled"
        session_class = NativeSession.building(Doubled)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from moe_conformance.backends.native.groups import groups
from moe_conformance.backends.native.session import NativeSession
from moe_conformance.contract import Limit, Topology
from moe_conformance.contract.topology import RankLists

__all__ = ["Native", "NativeSession"]


class Native:
    """The backend."""

    name: str = "native"
    variants: tuple[str, ...] = ("alltoall", "allgather", "local", "deepep", "hybridep", "ncclep", "lowlatency")
    # The token exchange is below three of them, and the all-to-all below the last.
    sampled: tuple[str, ...] = ("deepep", "hybridep", "ncclep", "lowlatency")
    preload: ClassVar[tuple[str, ...]] = ("moe_conformance.backends.native",)  # new ranks come often
    session_class: type[NativeSession] = NativeSession
    library_modules: ClassVar[tuple[str, ...]] = ("moe_conformance.backends.native",)  # adapter and library are one

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch, the only library in use."""
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return those of the local exchange, which moves nothing; what else native cannot build it refuses."""
        if variant != "local":
            return ()
        reason = "the local exchange sends nothing between ranks"
        return tuple(Limit(on, (False,), reason) for on in ("spread_experts", "sharded_experts"))

    def open(self, topology: Topology, device: torch.device) -> NativeSession:
        """Open a session."""
        return self.session_class(topology, device)

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        """Return the rank lists that native expects of a topology of these sizes."""
        return groups(sizes)
