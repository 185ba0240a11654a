"""Overwrite rows that are no token's: padding rows and their gradients, and unfilled places of low-latency buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Delivery, ExpertFn
from moe_conformance.scenarios.probe import padding_of
from moe_conformance.workloads.records import tags


class PaddingGradients:
    """Experts with every gradient at a padding row replaced by a large number; `rows` counts these rows."""

    def __init__(self, experts: ExpertFn) -> None:
        """Wrap the experts, before any backward."""
        self.experts = experts
        self.rows = 0  # padding rows whose gradients were replaced

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the expert output; only the gradients of padding rows are replaced."""
        padding_R = padding_of(delivery)
        rows_RD = _replaced(delivery.rows_RD, padding_R)
        weights_RJ = delivery.weights_RJ if delivery.weights_RJ is None else _replaced(delivery.weights_RJ, padding_R)
        answer_RD = self.experts(replace(delivery, rows_RD=rows_RD, weights_RJ=weights_RJ))
        flat_RD = _replaced(answer_RD.reshape(len(padding_R), answer_RD.shape[-1]), padding_R)  # R may be 0
        if flat_RD.requires_grad:
            flat_RD.register_hook(lambda _: self._count(padding_R))
        return flat_RD.reshape(answer_RD.shape)

    def _count(self, padding_R: Tensor) -> None:
        self.rows += int(padding_R.sum())


def large_beside_pairs(rows_RD: Tensor, counts_E: Tensor | None, pairs_E: Sequence[int]) -> Tensor:
    """Return rows by expert with a large number in every row of no routed pair, in the backward too.

    The pairs of an expert are the first rows of its segment; rows after the last segment belong to none. The rows are
    returned unchanged if it is not known which rows these are: without counts, or with a count below the pairs.
    """
    if counts_E is None or len(counts_E) != len(pairs_E):
        return rows_RD
    starts_E = (counts_E.cumsum(0) - counts_E).tolist()
    padding_R = torch.ones(len(rows_RD), dtype=torch.bool, device=rows_RD.device)
    for start, count, pairs in zip(starts_E, counts_E.tolist(), pairs_E, strict=True):
        if count < pairs:
            return rows_RD
        padding_R[start : start + pairs] = False
    return torch.where(padding_R[:, None], tags.PADDING_ANSWER, _replaced(rows_RD, padding_R))


def _replaced(values: Tensor, padding_R: Tensor) -> Tensor:
    """Return the values unchanged; in the backward their gradient has large numbers in padding rows."""
    if not values.requires_grad:
        return values
    same: Tensor = _Replaced.apply(values, padding_R)  # type: ignore[no-untyped-call]
    return same


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, padding_R: Tensor) -> Tensor:
        ctx.padding_R = padding_R
        return values.clone()  # combine may write into it, which autograd forbids for a view returned by a Function

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.padding_R[:, None], tags.PADDING_ANSWER, gradients[0]), None


class _Spoil(torch.autograd.Function):
    """Writes NaN into rows and, in the backward, into their gradient, where a mask is set."""

    @staticmethod
    def forward(ctx: Any, rows_NCD: Tensor, unfilled_NC1: Tensor) -> Tensor:
        ctx.unfilled_NC1 = unfilled_NC1
        return rows_NCD.masked_fill(unfilled_NC1, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].masked_fill(ctx.unfilled_NC1, torch.nan), None


def spoil_unfilled(rows_NCD: Tensor, counts_N: Tensor) -> Tensor:
    """Return rows by place, with NaN in the places of every expert n from counts_n on."""
    places_C = torch.arange(rows_NCD.shape[1], device=rows_NCD.device)
    spoilt: Tensor = _Spoil.apply(  # type: ignore[no-untyped-call]
        rows_NCD, (places_C >= counts_N.unsqueeze(1)).unsqueeze(2)
    )
    return spoilt
