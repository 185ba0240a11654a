"""Gradients of experts are averaged where they arise: by 1/ep behind dispatch, which is undone before combine.

Backward meets the two in the other order: the gradient that reaches the experts is divided by ep, that of their rows
multiplied by it. The trainer then averages the experts' gradients over their replicas alone.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.contract import Claims, Config, Delivery, Routing
from self_tests.correct_backends.small_parts import PairExchange, SmallBackend, SmallSession, gradients


class ScaleGradient(torch.autograd.Function):
    """The identity, whose backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] * ctx.factor, None


class ScaledExchange(PairExchange):
    """Scales what the backward passes on both sides of the experts."""

    claims = Claims(expert_gradients="mean_over_ep")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        rows_RD = ScaleGradient.apply(delivery.rows_RD, self.group.size())  # type: ignore[no-untyped-call]
        return Delivery.listed(rows_RD, delivery.ids_RJ, None, delivery.counts_N), handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(ScaleGradient.apply(rows, 1 / self.group.size()), handle)  # type: ignore[no-untyped-call]


class ScaledSession(SmallSession):
    """One topology on one rank; gradients are means over dp * cp."""

    loss_convention: Literal["sum", "mean_over_dp"] = "mean_over_dp"

    def build_exchange(self, config: Config) -> ScaledExchange:
        return ScaledExchange(config, self.ep)

    def finish_gate(self, gate: nn.Module) -> None:
        super().finish_gate(gate)
        for gradient in gradients(gate):
            gradient /= self.topology.group("dp_cp").size()

    def finish_experts(self, experts: nn.Module) -> None:
        for gradient in gradients(experts):
            dist.all_reduce(gradient, group=self.topology.group("edp"))
            gradient *= self.ep.size() / self.topology.group("dp_cp").size()


class Scaled(SmallBackend):
    """What `--backend self_tests.correct_backends.scaled_gradients:Scaled` names."""

    name, session = "scaled-gradients", ScaledSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
