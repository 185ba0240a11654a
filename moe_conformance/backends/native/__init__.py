"""The native backend: plain torch and torch.distributed, on gloo and NCCL. It is under test like any other.

    groups.py       which ranks belong together, which experts a rank holds
    permutation.py  tokens to rows sorted by expert, and back
    collectives.py  uneven all-to-all, all-gather and reduce-scatter with gradients
    exchange.py     variants "local", "allgather" and "alltoall"
    low_latency.py  variant "lowlatency": a fixed number of places for each expert
    token_exchange.py, mirrored.py, managers.py, flex.py
                    variants "deepep", "hybridep" and "ncclep": a fused exchange, its gradients, three layouts
                    for the experts, and the dispatcher over them
    packing.py      packed sequences: sums of lengths, gaps, shares of context ranks
    capacity.py     which slots an expert takes, and rows that fill up to it
    wrong_use.py    what is wrong with input or answers
    float8.py       rows on the wire in eight bits
    padding.py      token counts of all ranks padded to one size, around any of the exchanges
    token_copies.py tokens that tensor ranks hold as copies, each dispatched once, around any of these
    experts.py      SwiGLU experts
    shared_experts.py, layer.py
                    experts that every token goes to, and a whole layer
    routing.py      the router
    forcing.py      the router that a strategy forces
    dispatch_layout.py, routing_forms.py, row_index.py, rows.py, reordering.py, reusable.py, transport.py
                    surfaces of their own: counts, maps, rows by index, sorting, handles, what is local
    gradients.py    what happens to gradients before the step
    offered.py      finds surfaces that need no process group, one file each
    session.py      puts them together

To run a changed version (a planted bug, an experiment), override one method of one class and hand it over:

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
from moe_conformance.topology import RankLists

__all__ = ["Native", "NativeSession"]


class Native:
    """The backend."""

    name: str = "native"
    variants: tuple[str, ...] = ("alltoall", "allgather", "local", "deepep", "hybridep", "ncclep", "lowlatency")
    # One token exchange carries three of them, and the all-to-all the last.
    sampled: tuple[str, ...] = ("deepep", "hybridep", "ncclep", "lowlatency")
    preload: ClassVar[tuple[str, ...]] = ("moe_conformance.backends.native",)  # new ranks come often
    session_class: type[NativeSession] = NativeSession

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch, the only library in use."""
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return those of the local exchange, which moves nothing; what else native cannot build it refuses."""
        if variant != "local":
            return ()
        reason = "the local exchange moves nothing between ranks"
        return tuple(Limit(on, (False,), reason) for on in ("spread_experts", "sharded_experts"))

    def open(self, topology: Topology, device: torch.device) -> NativeSession:
        """Open a session."""
        return self.session_class(topology, device)

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        """Return the rank lists that native expects of a topology of these sizes."""
        return groups(sizes)
