"""Gradients at padding rows: large finite numbers in place of those that there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Delivery, ExpertFn
from moe_conformance.scenarios.probe import padding_of
from moe_conformance.workloads import tags


class PaddingGradients:
    """Experts around which every gradient at a padding row is a large number; `rows` counts them."""

    def __init__(self, experts: ExpertFn) -> None:
        """Nothing has gone backward yet."""
        self.experts = experts
        self.rows = 0  # padding rows whose gradients were replaced

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the experts' answer; what goes backward beside padding rows is as it was."""
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


def _replaced(values: Tensor, padding_R: Tensor) -> Tensor:
    """Return the values themselves; the gradient that comes back for them has other rows where padding is."""
    if not values.requires_grad:
        return values
    same: Tensor = _Replaced.apply(values, padding_R)  # type: ignore[no-untyped-call]
    return same


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, padding_R: Tensor) -> Tensor:
        ctx.padding_R = padding_R
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.padding_R[:, None], tags.PADDING_ANSWER, gradients[0]), None
