"""SwiGLU experts in a loop over the experts of this rank: f(x) = down (silu(gate x) * up x).

Where no gradient is recorded and all experts have as many rows, two batched products take the place of the loop.

N experts held, D hidden, F expert hidden, R rows, J ids per row, P filled ids. With etp > 1 a rank holds F /
etp of the hidden units of each of its experts, and its output is that part of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.backends.native.groups import CannotBuild, Placement
from moe_conformance.backends.native.layer.batched_experts import Derived, DerivedWeights, batched
from moe_conformance.backends.native.layer.counters import ShortcutCounters
from moe_conformance.backends.native.layer.deferred import Linear, Put, WeightGradients
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.row_ops.permutation import permute, sort_pairs, unpermute, weigh
from moe_conformance.contract import Config, Delivery, Named, Read, Topology

BLOCK = 16  # rows of one product
BATCHED = "batched products"  # the name of the shortcut


class Experts(Replicated):
    """The experts of one rank, stacked: gate and up (N, F / etp, D), down (N, D, F / etp).

    Implements: EXPT-05.
    """

    replicas: ClassVar[tuple[str, ...]] = ("edp",)

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Make the parameters; they are NaN until someone writes them.

        Raises:
            CannotBuild: the experts do not divide over ep, or F does not divide over etp.

        Implements: GROUP-03.
        """
        super().__init__()
        self.placement = Placement.of(config.experts, topology)
        if config.ffn % self.placement.shards:
            raise CannotBuild(f"ffn = {config.ffn} does not divide over etp = {self.placement.shards} ranks")
        N, units, D = self.placement.held, config.ffn // self.placement.shards, config.hidden
        nan = torch.full((N, units, D), torch.nan, dtype=config.dtype, device=device)
        self.gate_NFD = nn.Parameter(nan.clone())
        self.up_NFD = nn.Parameter(nan.clone())
        self.down_NDF = nn.Parameter(nan.transpose(1, 2).clone(memory_format=torch.contiguous_format))
        self.derived = DerivedWeights()
        self.counters = ShortcutCounters(topology.rank)
        self.deferred: WeightGradients | None = None  # set while a step runs that puts weight gradients off

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, and whether equal counts are a shortcut of it."""
        return {"experts": type(self).__name__, "optional": BATCHED}

    def named(self, read: Read) -> Iterator[Named]:
        """Yield gate, up and down of every expert by global id.

        Implements: EXPT-02.
        """
        gate_NFD, up_NFD, down_NDF = read(self.gate_NFD), read(self.up_NFD), read(self.down_NDF)
        part = self._part()
        for n, expert in enumerate(self.placement.ids):
            yield Named("gate", expert, gate_NFD[n], (0, *part))
            yield Named("up", expert, up_NFD[n], (0, *part))
            yield Named("down", expert, down_NDF[n], (1, *part))

    def _part(self) -> tuple[int, int]:
        """Return which part of the hidden units of its experts this rank holds, and of how many."""
        return self.placement.shard, self.placement.shards

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate, up and down for a pass."""
        return self.gate_NFD, self.up_NFD, self.down_NDF

    def forward(self, delivery: Delivery) -> Tensor:
        """Return out_r = sum_j w_rj f(row_r), zero for a row without ids, in `delivery.shape`.

        Implements: EXPT-01, GRAD-04.
        """
        pairs = sort_pairs(delivery.ids_RJ, self.placement.held)
        rows_PD = permute(delivery.rows_RD, pairs)
        out_PD = self._run(rows_PD, pairs.counts_E.tolist())
        if delivery.weights_RJ is not None:
            out_PD = weigh(out_PD, delivery.weights_RJ[pairs.token_P, pairs.slot_P])
        return unpermute(out_PD, pairs).reshape(delivery.shape)

    def weights_changed(self) -> None:
        """Take note of a change of weights that leaves no trace at them, as by a write to `weight.data`.

        Implements: FAST-07.
        """
        self.derived.forget()

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        """Run the experts in whichever way suits; in training no derived weights are kept, which would double them.

        Implements: FAST-10, FAST-12.
        """
        equal = len(set(counts_N)) == 1
        if not torch.is_grad_enabled():
            self.counters.decided("equal_counts", taken=equal)
            if equal:
                return batched(rows_PD, self._looked_up())
        self.derived.forget()
        return self._loop(rows_PD, counts_N)

    def _looked_up(self) -> Derived:
        """Return the derived weights, kept or made."""
        kept = self.derived.made
        derived = self.derived.of(self.gate_NFD, self.up_NFD, self.down_NDF)
        self.counters.looked_up("derived_weights", hit=derived is kept)
        return derived

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        """Run every expert on its rows, on none too: an idle expert gets zero gradients."""
        stacked = map(self._of_each, self._weights())
        parts = zip(rows_PD.split(counts_N), *stacked, strict=True)
        linear = F.linear if self.deferred is None else self.deferred.linear
        return torch.cat([in_blocks(rows, gate, up, down, linear) for rows, gate, up, down in parts])

    def _of_each(self, stacked: Tensor) -> Sequence[Any]:
        """Return the weight of every expert, as `linear` takes it."""
        if self.deferred is None:
            return stacked.unbind()
        assert isinstance(stacked, nn.Parameter)  # what is gathered for a pass defers nothing
        return [Put(stacked, n) for n in range(len(stacked))]


def in_blocks(rows_RD: Tensor, gate_FD: Any, up_FD: Any, down_DF: Any, linear: Linear = F.linear) -> Tensor:
    """Return `swiglu` of the rows, `BLOCK` at a time, zeros after the last.

    Kernels of matrix products choose the order of a sum by the sizes of the matrices. Where these never change, the
    output for a row has the same bits whatever other rows there are.

    Implements: EXPT-08.
    """
    R = len(rows_RD)
    blocks = F.pad(rows_RD, (0, 0, 0, -R % BLOCK)).split(BLOCK)
    return torch.cat([swiglu(block_BD, gate_FD, up_FD, down_DF, linear) for block_BD in blocks])[:R]


def swiglu(rows_RD: Tensor, gate_FD: Any, up_FD: Any, down_DF: Any, linear: Linear = F.linear) -> Tensor:
    """Return down (silu(gate x) * up x) of every row x; `linear` takes rows and a weight."""
    return linear(F.silu(linear(rows_RD, gate_FD)) * linear(rows_RD, up_FD), down_DF)


class LoopedExperts(Experts):
    """Experts without the shortcut for equal counts, where batched products are not available.

    Implements: FAST-15.
    """

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, which takes no shortcut."""
        return {**super().resolved, "optional": "none"}

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        return self._loop(rows_PD, counts_N)
