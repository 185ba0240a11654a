"""PACK: bugs in how sequences are packed, cut and shared, and in how a router is told of padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.backends.native.row_ops.packed_sequences import Packing
from moe_conformance.contract import Delivery, PackedSequences, Routed, Routing, Unsupported
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

# ---- packed sequences ----------------------------------------------------------------------------------------------


@planted(
    Expectation("PACK-07", "packed-lengths", "dispatch", "sequence 0 6 rows, which is not a multiple of 4", "cp = 2"),
    layout=SINGLE,
)
class OneChunkForEachRank(Packing):
    """Lengths are padded to a multiple of cp, and every rank takes two chunks."""

    def _multiple(self, cp: int, tp: int, sequence_parallel: bool) -> int:
        return cp * (tp if sequence_parallel else 1)


@planted(
    Expectation("PACK-07", "packed-lengths", "dispatch", "which is not a multiple of 2", "sequence parallelism"),
    layout=SINGLE,
)
class SequenceParallelismForgotten(Packing):
    """Lengths are padded for context parallelism alone, and tensor ranks divide them again."""

    def _multiple(self, cp: int, tp: int, sequence_parallel: bool) -> int:
        return super()._multiple(cp, tp, False)


@planted(
    Expectation("PACK-07", "packed-lengths", "dispatch", "cu_seqlens of lengths [40000, 0, 30001]", "is [0, -25536, "),
    layout=SINGLE,
)
class SumsInSixteenBits(Packing):
    """Sums are kept in 16 bits, and go round where a pack is long."""

    def _sums(self, lengths_S: Tensor) -> Tensor:
        return super()._sums(lengths_S).to(torch.int16)


@planted(
    Expectation("PACK-07", "packed-lengths", "dispatch", "of lengths [5, 0, 4, 1, 13]", "is [0, 6, 6, 10, 12, 26]"),
    layout=SINGLE,
)
class PaddedSumsForReal(Packing):
    """Both lists hold the padded sums, so that gaps are taken for tokens."""

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        packed = super().lay_out(lengths, cp, tp, sequence_parallel)
        return PackedSequences(packed.cu_seqlens_padded, packed.cu_seqlens_padded)


@planted(
    Expectation("PACK-07", "packed-lengths", "dispatch", "of lengths [5, 0, 4, 1, 13]", "is [0, 6, 6, 10, 12, 26]"),
    layout=SINGLE,
)
class RefusesTheHardAndFailsTheRest(Packing):
    """Context parallelism is not offered, and what is offered is wrong."""

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        if cp > 1:
            raise Unsupported("no context parallelism here")
        packed = super().lay_out(lengths, cp, tp, sequence_parallel)
        return PackedSequences(packed.cu_seqlens_padded, packed.cu_seqlens_padded)


@planted(
    Expectation("PACK-07", "packed-flat", "dispatch", "of lengths [5, 0, 4, 1, 13]"),
    Expectation("PACK-07", "packed-alike", "dispatch", "of lengths [7]"),
    layout=SINGLE,
)
class AlwaysPadded(Packing):
    """Every length is padded by one row more than it has to be, in the list of real lengths as well."""

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        packed = super().lay_out([length + 1 for length in lengths], cp, tp, sequence_parallel)
        return PackedSequences(packed.cu_seqlens, packed.cu_seqlens_padded)


@planted(
    Expectation("PACK-10", "packed-empty", "dispatch", "cu_seqlens of 3 sequences is", "expected 4 integers"),
    real="NVIDIA/Megatron-LM, core/datasets/data_schedule.py of 0.16.1 leaves them out",
    layout=SINGLE,
)
class EmptySequencesLeftOut(Packing):
    """Sequences of length zero have no entry, and what is kept beside the lists belongs to others from there on."""

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        return super().lay_out([length for length in lengths if length], cp, tp, sequence_parallel)


@planted(
    Expectation("PACK-10", "packed-empty", "dispatch", "cu_seqlens_padded of lengths [0, 5, 13] is"), layout=SINGLE
)
class EmptySequencesGetRows(Packing):
    """A sequence of length zero gets a row, and all others stand behind where they stood."""

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        real = super().lay_out(lengths, cp, tp, sequence_parallel)
        padded = super().lay_out([max(length, 1) for length in lengths], cp, tp, sequence_parallel)
        return PackedSequences(real.cu_seqlens, padded.cu_seqlens_padded)


@planted(
    Expectation("PACK-08", "packed-tokens", "dispatch", "is padding, and is reported as a token"),
    layout=SINGLE,
    real="NVIDIA/Megatron-LM#5535",
)
class GapsByRealSums(Packing):
    """Tokens are looked for where sequences would stand without gaps."""

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        return torch.arange(int(cu_seqlens_padded[-1])) < cu_seqlens[-1]


@planted(
    Expectation("PACK-08", "gaps-uneven", "dispatch", "which is not routed to this expert"),
    real="NVIDIA/Megatron-LM#5535",
)
class GapsRoutedByTheirIds(AllToAllExchange):
    """Empty slots go to expert 0 with weight 0: outputs are right, and gaps are delivered and counted."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        empty_TK = routing.ids_TK < 0
        routed = Routing(
            routing.ids_TK.masked_fill(empty_TK, 0), routing.weights_TK.masked_fill(empty_TK, 0.0), routing.experts
        )
        return super().dispatch(x, routed)


@planted(
    Expectation("PACK-15", "packed-shares", "dispatch", "cp rank 0 holds rows [0, 1, 2, 3", "instead of [0, 1, 6, 7"),
    layout=SINGLE,
)
class SharesInARow(Packing):
    """Each context rank holds two chunks that follow each other."""

    def _owner(self, chunk_R: Tensor, cp: int) -> Tensor:
        return chunk_R // 2


@planted(Expectation("PACK-15", "packed-shares", "dispatch", "are on no cp rank"), layout=SINGLE)
class SharesOfTheWholePack(Packing):
    """The second chunk of a rank begins one row too late, and the last row of the pack is lost."""

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        rows = super().share(cu_seqlens_padded, cp, cp_rank)
        half = len(rows) // 2
        return torch.cat([rows[:half], (rows[half:] + 1).clamp_max(int(cu_seqlens_padded[-1]) - 1)])


@planted(
    Expectation("PACK-15", "gaps-uneven", "combine", "token 4 of microbatch 0 is that of rank 0 token 16"),
    layout=Layout(4, cp=2, ep=2),
)
class ChunksComeBackSwapped(AllToAllExchange):
    """Under context parallelism the two chunks of a rank come back in each other's places."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y.roll(len(y) // 2, 0) if self.topology.sizes["cp"] > 1 else y


# ---- padding in the router -----------------------------------------------------------------------------------------


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "padding is counted"),
    Expectation("PACK-08", "masked-router", "route", "padding is counted"),
    real="NVIDIA/Megatron-LM#4776, #4777",
    layout=SINGLE,
)
class MaskNotPassedOn(Router):
    """The mask does not reach the router, and padding enters the load."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        return super().forward(x)


@planted(
    Expectation("ROUTE-22", "masked-router-square", "route", "as its tokens selected"),
    real="NVIDIA/Megatron-LM#6111",
    layout=SINGLE,
)
class MaskLaidOnExperts(Router):
    """The mask of tokens is laid on the last dimension of the map, which is no error where T = E."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        routed = super().forward(x)
        assert padding_mask_T is not None
        assert routed.counts_E is not None
        if padding_mask_T.shape != routed.counts_E.shape:
            return super().forward(x, padding_mask_T)
        return replace(routed, counts_E=routed.counts_E.masked_fill(padding_mask_T, 0))


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "is not padding, and has empty slots (id -1)"), layout=SINGLE
)
class MaskReadAsTokens(Router):
    """The mask is taken to be True at tokens."""

    def _leave_out(self, ids_TK: Tensor, weights_TK: Tensor, padding_T1: Tensor) -> tuple[Tensor, Tensor]:
        return super()._leave_out(ids_TK, weights_TK, ~padding_T1)


@planted(
    Expectation(
        "ROUTE-22", "masked-router", "route", "the selection is wrong; likely cause: the expert bias was left out"
    ),
    Expectation(
        "PACK-08", "masked-router", "route", "the selection is wrong; likely cause: the expert bias was left out"
    ),
    layout=SINGLE,
)
class MaskedWithoutTheBias(Router):
    """Where there is a mask the balancing bias takes no part in the choice."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        kept, self.balance_bias = self.balance_bias, None
        try:
            return super().forward(x, padding_mask_T)
        finally:
            self.balance_bias = kept


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "every element of the weights is 2.667 x the expected value"),
    Expectation("ROUTE-22", "masked-unbalanced", "route", "every element of the weights is"),
    layout=SINGLE,
)
class MaskedNotScaled(Router):
    """Where there is a mask the weights are those of a batch, divided by the share of tokens in it."""

    def _leave_out(self, ids_TK: Tensor, weights_TK: Tensor, padding_T1: Tensor) -> tuple[Tensor, Tensor]:
        return super()._leave_out(ids_TK, weights_TK / (~padding_T1).float().mean(), padding_T1)


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "of rank 0 is not padding, and has empty slots (id -1)"),
    Expectation("PACK-08", "masked-router", "route", "of rank 0 is not padding, and has empty slots (id -1)"),
    layout=SINGLE,
)
class MaskOfTheFirstBatch(Router):
    """The mask of the first batch is kept for all others of its length."""

    first: Tensor | None = None

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        assert padding_mask_T is not None
        if self.first is None or self.first.shape != padding_mask_T.shape:
            self.first = padding_mask_T
        return super().forward(x, self.first)


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "as its tokens selected", "padding is counted"), layout=SINGLE
)
class OnlyPaddingTakenForTokens(Router):
    """A mask that leaves nothing is taken for none."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        assert padding_mask_T is not None
        return super().forward(x, None if bool(padding_mask_T.all()) else padding_mask_T)


@planted(Expectation("ROUTE-22", "masked-router", "route", "is not padding, and has empty slots (id -1)"))
class MaskOfTheFirstRank(Router):
    """The mask of the first rank is sent to all others."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        assert padding_mask_T is not None
        first_T = padding_mask_T.int()
        dist.broadcast(first_T, 0)
        return super().forward(x, first_T.bool())


class _PaddingAt(Router):
    """Padding rows get one id in all slots."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        assert padding_mask_T is not None
        routed = super().forward(x, padding_mask_T)
        ids_TK = routed.routing.ids_TK.masked_fill(padding_mask_T.reshape(-1, 1), self._id())
        return replace(routed, routing=replace(routed.routing, ids_TK=ids_TK))

    def _id(self) -> int:
        raise NotImplementedError


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "padding token", "has the ids [8, 8]", "nor -1 in all slots"),
    Expectation("PACK-08", "masked-router", "route", "padding token", "has the ids [8, 8]", "nor -1 in all slots"),
    layout=SINGLE,
)
class PaddingToTheExpertBehindTheLast(_PaddingAt):
    """Padding is marked by the id E, which an exchange that knows -1 only takes for an expert."""

    def _id(self) -> int:
        return self.config.experts


@planted(
    Expectation("ROUTE-22", "masked-router", "route", "padding token", "has the ids [5, 5]", "neither 2 different"),
    layout=SINGLE,
)
class PaddingToOneExpert(_PaddingAt):
    """Padding is sent to one expert with all of its slots."""

    def _id(self) -> int:
        return 5


@planted(Expectation("ROUTE-22", "masked-router", "route", "reports the load [", ".75"), layout=SINGLE)
class LoadsAreNotWhole(Router):
    """The load is an average that has not been rounded."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        routed = super().forward(x, padding_mask_T)
        assert routed.counts_E is not None
        return replace(routed, counts_E=routed.counts_E + 0.75)
