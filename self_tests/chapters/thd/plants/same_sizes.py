"""PACK, ROUTE: packs that are taken for others of their size, and routers that do not learn beside padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.router.routing import Router
from moe_conformance.backends.native.row_ops.packed_sequences import Packing
from moe_conformance.contract import Config, PackedSequences, Routed
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

# ---- packs ---------------------------------------------------------------------------------------------------------


@planted(Expectation("PACK-07", "packed-lengths", "dispatch", "of lengths [13, 5]"), layout=SINGLE)
class LaidOutByTheirSum(Packing):
    """As many sequences of as many tokens are laid out as those of an earlier batch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.known: dict[Any, PackedSequences] = {}

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        key = len(lengths), sum(lengths), cp, tp, sequence_parallel
        return self.known.setdefault(key, super().lay_out(lengths, cp, tp, sequence_parallel))


@planted(Expectation("PACK-08", "packed-tokens", "dispatch", "and is reported as"), layout=SINGLE)
class TokensByTheirNumber(Packing):
    """Which rows are tokens is kept for all packs of as many rows."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.known: dict[int, Tensor] = {}

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        return self.known.setdefault(int(cu_seqlens_padded[-1]), super().tokens(cu_seqlens, cu_seqlens_padded))


@planted(Expectation("PACK-15", "packed-shares", "dispatch", "row"), layout=SINGLE)
class SharesByTheirNumber(Packing):
    """Which rows a context rank holds is kept for all packs of as many rows."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.known: dict[Any, Tensor] = {}

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        key = int(cu_seqlens_padded[-1]), cp, cp_rank
        return self.known.setdefault(key, super().share(cu_seqlens_padded, cp, cp_rank))


# ---- routers beside padding ----------------------------------------------------------------------------------------


@planted(Expectation("ROUTE-22", "masked-learns", "run", "does not require grad"), layout=SINGLE)
class LearnsNothingBesidePadding(Router):
    """Beside a mask the weights are made anew, without their gradient."""

    def _leave_out(self, ids_TK: Tensor, weights_TK: Tensor, padding_T1: Tensor) -> tuple[Tensor, Tensor]:
        return super()._leave_out(ids_TK, weights_TK.detach(), padding_T1)


@planted(
    Expectation("ROUTE-22", "masked-learns", "gradient", "dx of rank 0 at tokens that are not padding is"),
    Expectation("PACK-08", "masked-softmax-learns", "gradient", "dx of rank 0 at tokens that are not padding is"),
    layout=SINGLE,
)
class LearnsTwiceBesidePadding(Router):
    """Beside a mask the gradient of the weights is added up twice."""

    def _leave_out(self, ids_TK: Tensor, weights_TK: Tensor, padding_T1: Tensor) -> tuple[Tensor, Tensor]:
        return super()._leave_out(ids_TK, 2 * weights_TK - weights_TK.detach(), padding_T1)


@planted(
    Expectation("PACK-08", "masked-softmax-learns", "gradient", "dx of rank 0 is not zero at a padding token"),
    layout=SINGLE,
)
class MaskIsAdded(Router):
    """The logits of padding are -inf, as in attention: their softmax, and with it their gradient, is NaN."""

    mask_T: Tensor | None = None

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        self.mask_T = padding_mask_T
        return super().forward(x, padding_mask_T)

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        if self.mask_T is None:
            return logits_TE
        return logits_TE + torch.where(self.mask_T.reshape(-1, 1), -torch.inf, 0.0)


@planted(
    Expectation("ROUTE-22", "masked-two-dims", "route", "is not padding, and has empty slots (id -1)"), layout=SINGLE
)
class MaskReadAcross(Router):
    """Beside tokens (S, B, D) the mask is read as if it were (B, S)."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        if padding_mask_T is not None and x.dim() == 3:
            padding_mask_T = padding_mask_T.reshape(x.shape[1], x.shape[0]).t().flatten()
        return super().forward(x, padding_mask_T)
