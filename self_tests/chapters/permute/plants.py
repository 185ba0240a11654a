"""EXCH and ROUTE: bugs in what one rank does to rows and routings by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.row_ops.reordering import Reordering
from moe_conformance.backends.native.row_ops.routing_map import RoutingForms
from moe_conformance.backends.native.row_ops.row_index import RowIndex
from moe_conformance.backends.native.row_ops.surface import Permutation
from moe_conformance.contract import Config, Dense, Permuted, Routing
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

# ---- rows by expert ------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-18", "permute", "dispatch", "has 16 rows for", "padded to a multiple of 1"),
    real="NVIDIA/Megatron-LM commit 567d4d4681 (#4038)",
    layout=SINGLE,
)
class PadsUnasked(Permutation):
    """The helper that gives the alignment returns 16 where no quantisation asks for one."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiple = max(16, self.multiple)


@planted(
    Expectation("EXCH-18", "permute-to-16", "dispatch", "counts_E add up to 112, but permute returned 106 rows"),
    real="pytorch/torchtitan commit 60645bc78 (#1718)",
    layout=SINGLE,
)
class BufferNotRoundedUp(Permutation):
    """The buffer is as long as the pairs and a multiple for every expert but for its rounding, and the end is cut."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        made = super().permute(x_TD, routing)
        return replace(made, rows_RD=made.rows_RD[: len(made.rows_RD) - self.multiple // 2 + 2])


@planted(
    Expectation("EXCH-18", "permute", "run", "raised in unpermute:1", "out of bounds"),
    real="NVIDIA/TransformerEngine commit 92b03707a (#2876); NVIDIA/Megatron-LM commit 1a61b77de4",
    layout=SINGLE,
)
class MinusOneRows(Permutation):
    """The number of rows is -1 where all are wanted, and is taken as a number: the last row is not there."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        made, rows = super().permute(x_TD, routing), -1
        return replace(made, rows_RD=made.rows_RD[:rows])


@planted(
    Expectation(
        "EXCH-08", "permute-empty-slots", "run", "permute, call 0, changed routing.weights_TK of rank 0 in place"
    ),
    layout=SINGLE,
)
class EmptySlotsClearedInPlace(Permutation):
    """The weights of empty slots are set to zero where they lie."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        routing.weights_TK.data.masked_fill_(routing.ids_TK < 0, 0.0)
        return super().permute(x_TD, routing)


@planted(Expectation("EXCH-18", "permute-to-3", "dispatch", "is a row of no token before the padding"), layout=SINGLE)
class PaddingInFront(Permutation):
    """The rows of a segment stand at its end, behind their padding."""

    def _places(self, pairs_E: Tensor, counts_E: Tensor) -> Tensor:
        return super()._places(pairs_E, counts_E) + (counts_E - pairs_E).repeat_interleave(pairs_E)


@planted(
    Expectation("EXCH-18", "permute-to-16-full", "dispatch", "has 32 rows for 16 pairs, padded to a multiple of 16"),
    layout=SINGLE,
)
class OneMultipleTooMany(Permutation):
    """A count that is a multiple already is rounded up to the next one."""

    def _padded(self, counts_E: Tensor) -> Tensor:
        more = self.multiple if self.multiple > 1 else 0
        return super()._padded(counts_E) + more * ((counts_E % self.multiple == 0) & (counts_E > 0))


@planted(Expectation("EXCH-18", "permute", "dispatch", "which is routed to"), layout=SINGLE)
class UncountedBackwards(Permutation):
    """The rows of the last expert stand first, and nothing counts them."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        made = super().permute(x_TD, routing)
        return replace(made, rows_RD=made.rows_RD.flip(0), counts_E=None)


@planted(
    Expectation("EXCH-18", "permute-to-3", "dispatch", "counts_E is None although the segments are padded"),
    layout=SINGLE,
)
class PaddedUncounted(Permutation):
    """Segments are padded, and only the helper that padded them knows how far."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        return replace(super().permute(x_TD, routing), counts_E=None)


@planted(Expectation("EXCH-21", "permute", "dispatch", "which are not in ascending order"), layout=SINGLE)
class RowsBackwards(Permutation):
    """The sort is not stable: within an expert the last token comes first. Every pair is there, and comes back."""

    def _places(self, pairs_E: Tensor, counts_E: Tensor) -> Tensor:
        place_P = super()._places(pairs_E, counts_E)
        return torch.cat([of_expert.flip(0) for of_expert in place_P.split(pairs_E.tolist())])


@planted(
    Expectation("EXCH-05", "permute", "combine", "token", "of y is"),
    Expectation("GRAD-03", "permute", "gradient", "of the gradient of the weights is"),
    real="huggingface/transformers PR #45473",
    layout=SINGLE,
)
class WeightsInTheOrderOfTokens(Permutation):
    """Weights are taken out slot by slot, rows expert by expert, and the two are paired by where they stand."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        made = super().permute(x_TD, routing)
        return replace(made, handle=replace(made.handle, weights_P=routing.weights_TK[routing.ids_TK >= 0]))


# ---- padding rows --------------------------------------------------------------------------------------------


def _padding(rows_RD: Tensor, place_P: Tensor) -> Tensor:
    """Say which rows are no pair's."""
    return torch.ones(len(rows_RD), dtype=torch.bool).index_fill(0, place_P, False)


@planted(
    Expectation("EXCH-05", "permute-to-16", "combine", "token 0 of y with 16384 in padding rows is"),
    Expectation("EXCH-05", "permute-to-32-bf16", "combine", "token 0 of y with 16384 in padding rows is"),
    layout=SINGLE,
)
class PaddingAddedToTheFirst(Permutation):
    """Padding rows carry index 0 and a weight of one: they were written as zeros, and are taken for zeros."""

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        y_TD = super().unpermute(rows_RD, handle)
        left_D = rows_RD[_padding(rows_RD, handle.place_P)].sum(0)
        return y_TD.index_add(0, torch.zeros(1, dtype=torch.int64), left_D.unsqueeze(0)) if len(y_TD) else y_TD


@planted(
    Expectation("GRAD-09", "permute-to-16", "gradient", "token 0 of the gradient of x with 16384 in padding rows is"),
    Expectation("GRAD-09", "permute-to-3", "gradient", "token 0 of the gradient of x with 16384 in padding rows is"),
    layout=SINGLE,
)
class PaddingReadFromTheFirst(Permutation):
    """Padding rows are read from token 0 and cleared where autograd does not see it: the gradient goes back there."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        made = super().permute(x_TD, routing)
        if not len(x_TD):
            return made
        padding_R1 = _padding(made.rows_RD, made.handle.place_P).unsqueeze(1)
        return replace(made, rows_RD=made.rows_RD + torch.where(padding_R1, x_TD[0] - x_TD[0].detach(), 0))


@planted(
    Expectation("EXCH-02", "permute-to-16-idle-experts", "dispatch", "padding of expert 1, is not zero"), layout=SINGLE
)
class PaddingNotCleared(Permutation):
    """The buffer is not cleared before the pairs are written: its padding holds what was there before."""

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        made = super().permute(x_TD, routing)
        padding_R1 = _padding(made.rows_RD, made.handle.place_P).unsqueeze(1)
        return replace(made, rows_RD=made.rows_RD.masked_fill(padding_R1, 0.125))


# ---- rows by index -------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-19", "row-index", "dispatch", "row 1 of the rows gathered with sentinel -1 is"),
    real="huggingface/transformers PR #40545",
    layout=SINGLE,
)
class SentinelIsARow(RowIndex):
    """A place without a token is filled with index 0, which is a token."""

    def gather(self, x_TD: Tensor, index_R: Tensor) -> Tensor:
        real_R = self._real(index_R, len(x_TD))
        return super().gather(x_TD, torch.where(real_R, index_R, 0) if len(x_TD) else index_R)


@planted(
    Expectation("EXCH-19", "row-index", "dispatch", "of the sums scattered with sentinel -1 is nan"),
    real="huggingface/transformers PR #48205",
    layout=SINGLE,
)
class SentinelTimesZero(RowIndex):
    """Sentinels are added to the first token with a weight of zero, and zero times what was never written is NaN."""

    def scatter(self, rows_RD: Tensor, index_R: Tensor, weights_R: Tensor, tokens: int) -> Tensor:
        real_R = self._real(index_R, tokens)
        if not tokens:
            return super().scatter(rows_RD, index_R, weights_R, tokens)
        return super().scatter(rows_RD, torch.where(real_R, index_R, 0), torch.where(real_R, weights_R, 0), tokens)


@planted(
    Expectation("EXCH-19", "row-index-sentinels-first", "dispatch", "row 3 of the rows gathered with sentinel -1 is 0"),
    real="NVIDIA/TransformerEngine commit b7323b1ec (#2907)",
    layout=SINGLE,
)
class SentinelsCountedFromTheEnd(RowIndex):
    """As many rows as are real are taken for real from the front, where sentinels of -1 have been sorted to."""

    def _real(self, index_R: Tensor, tokens: int) -> Tensor:
        real_R = super()._real(index_R, tokens)
        return real_R & (torch.arange(len(index_R)) < real_R.sum())


# ---- segments ------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-20", "reorder-equal-sums", "dispatch", "of rows in expert-major order is"), layout=SINGLE)
class ShortcutForEqualSums(Reordering):
    """Where every source sends as many rows, the segments are taken for equal too, and transposed at once."""

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        W, N = counts_WN.shape
        sent_W = counts_WN.sum(1)
        if bool((sent_W == sent_W[0]).all()) and len(rows_RD) % (W * N) == 0:
            return rows_RD.reshape(W, N, -1, rows_RD.shape[1]).transpose(0, 1).reshape(rows_RD.shape)
        return super().to_expert_major(rows_RD, counts_WN)


@planted(
    Expectation("EXCH-20", "reorder", "dispatch", "of rows in expert-major order is"),
    real="pytorch/torchtitan commit f713a0254 (#3771)",
    layout=SINGLE,
)
class CountsReadAcross(Reordering):
    """The counts lie transposed in memory, and are read in the order in which they lie."""

    def _order(self, counts_WN: Tensor) -> Tensor:
        return super()._order(counts_WN.T.reshape(counts_WN.shape))


@planted(Expectation("EXCH-20", "reorder", "dispatch", "of rows in source-major order again is"), layout=SINGLE)
class BackAsThere(Reordering):
    """The way back moves the rows as the way there did, which undoes it for two equal halves only."""

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        return rows_RD[self._order(counts_WN)]


# ---- maps ----------------------------------------------------------------------------------------------------


@planted(
    Expectation("ROUTE-21", "forms-empty-slots", "route", "the dense form has token", "expert 0 weight"),
    real="huggingface/transformers PR #40545",
    layout=SINGLE,
)
class EmptySlotIsExpertZero(RoutingForms):
    """An empty slot sets the place of expert 0."""

    def to_dense(self, routing: Routing) -> Dense:
        taken_TE = super().to_dense(routing).map_TE
        free_TK = (routing.ids_TK < 0) & ~taken_TE[:, :1] & ((routing.ids_TK < 0).cumsum(1) == 1)
        return super().to_dense(replace(routing, ids_TK=torch.where(free_TK, 0, routing.ids_TK)))


@planted(Expectation("ROUTE-21", "forms", "route", "the indexed form lacks token 1 expert", "weight 0"), layout=SINGLE)
class WeightZeroIsNoChoice(RoutingForms):
    """What weighs nothing is taken for what was not chosen."""

    def to_indices(self, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        return super().to_indices(weights_TE, map_TE & (weights_TE != 0))


@planted(Expectation("ROUTE-21", "forms", "gradient", "the gradient of the weights is None on rank"), layout=SINGLE)
class MapOfConstants(RoutingForms):
    """The weights are copied into the table as numbers, and their gradients end there."""

    def to_dense(self, routing: Routing) -> Dense:
        made = super().to_dense(replace(routing, weights_TK=routing.weights_TK.detach()))
        return replace(made, weights_TE=made.weights_TE.requires_grad_())
