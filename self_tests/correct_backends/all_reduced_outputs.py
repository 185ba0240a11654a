"""All tokens on all ranks: each rank computes what its experts add to every token, and one all-reduce sums it up."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Claims, Config, Delivery, Routing
from self_tests.correct_backends.small_parts import AdaptedExperts, SmallBackend, SmallSession, SwiGLU, share


class Gather(torch.autograd.Function):
    """The rows of all ranks, (W * T, D); the backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, rows_TD.shape[0]
        out = rows_TD.new_empty(group.size() * rows_TD.shape[0], *rows_TD.shape[1:])
        dist.all_gather_into_tensor(out, rows_TD.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        summed = upstream[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank() * ctx.rows :][: ctx.rows], None


class Sum(torch.autograd.Function):
    """The sum of the rows of all ranks; the backward sums the gradients of all ranks, of which each has its tokens'."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, summed = group, rows.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        summed = upstream[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class ReducedExchange:
    """Ranks pad their tokens to the largest number of any of them."""

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        self.group, self.local_experts = group, tuple(share(config.experts, group))
        self.claims = Claims(wire="all", handed="tokens", padding="group_max", alignment=1, combined="all_reduced")
        self.resolved = {"exchange": f"all tokens on {group.size()} ranks, all-reduce"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        x_TD, first = x.reshape(-1, x.shape[-1]), self.local_experts[0]
        most = torch.tensor([x_TD.shape[0]])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        short = int(most) - x_TD.shape[0]
        ids_TK = torch.cat([routing.ids_TK, routing.ids_TK.new_full((short, routing.ids_TK.shape[1]), -1)])
        rows_GD, ids_GK, weights_GK = (
            Gather.apply(each, self.group)  # type: ignore[no-untyped-call]
            for each in (_padded(x_TD, short), ids_TK, _padded(routing.weights_TK, short))
        )
        here_GK = (ids_GK >= first) & (ids_GK < first + len(self.local_experts))
        ids_GK, weights_GK = torch.where(here_GK, ids_GK - first, -1), torch.where(here_GK, weights_GK, 0.0)
        return Delivery.listed(rows_GD, ids_GK, weights_GK, unrouted="zero"), (x.shape, int(most))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shape, most = handle
        summed_GD: Tensor = Sum.apply(rows, self.group)  # type: ignore[no-untyped-call]
        return summed_GD[self.group.rank() * most :][: shape[:-1].numel()].reshape(shape)


def _padded(rows: Tensor, short: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])


class SummingExperts(AdaptedExperts):
    """The weighted sum of the experts of this rank for every token."""

    def __call__(self, delivery: Delivery) -> Tensor:
        rows_RD, weights_RJ = delivery.rows_RD, delivery.weights_RJ
        if weights_RJ is None:
            weights_RJ = rows_RD.new_ones(delivery.ids_RJ.shape)
        out_RD = torch.zeros_like(rows_RD, dtype=torch.promote_types(rows_RD.dtype, weights_RJ.dtype))
        for n in range(len(self.module.ids)):
            rows_S, slots_S = (delivery.ids_RJ == n).nonzero().unbind(1)
            out_SD = self.module.one(n, rows_RD[rows_S]) * weights_RJ[rows_S, slots_S, None]
            out_RD = out_RD.index_add(0, rows_S, out_SD.to(out_RD.dtype))
        return out_RD.to(rows_RD.dtype).view(delivery.shape)


class ReducedSession(SmallSession):
    """One topology on one rank."""

    weights_at: Literal["input", "expert", "combine"] = "expert"

    def build_exchange(self, config: Config) -> ReducedExchange:
        return ReducedExchange(config, self.ep)

    def build_experts(self, config: Config) -> AdaptedExperts:
        return SummingExperts(SwiGLU(share(config.experts, self.ep), config))


class Reduced(SmallBackend):
    """What `--backend self_tests.correct_backends.all_reduced_outputs:Reduced` names."""

    name, session = "all-reduced-outputs", ReducedSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
