"""The probe expert, the only code of the suite that runs inside the backend's exchange.

Expert e multiplies the columns of its block by `gain(e)` and returns zero elsewhere, so the result of combine is
exact in every dtype and order. It records what it received and which gradients passed it; it judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, Delivery, Session
from moe_conformance.contract.topology import Topology
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.workloads.records import tags


class _Watch(torch.autograd.Function):
    """Identity that records the gradient in its backward, which is the sum over all consumers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(grads[0].detach().cpu().clone())
        return grads[0], None


def _watch(value: Tensor, seen: list[Tensor]) -> Tensor:
    watched: Tensor = _Watch.apply(value, seen)  # type: ignore[no-untyped-call]
    return watched


@dataclass(frozen=True)
class _Call:
    handed: Handed
    rows_RD: Tensor  # as the backend holds them, of which `handed` has a copy
    out_grads: list[Tensor]  # empty until backward passes; several where backward ran more than once
    rows_grads: list[Tensor]


class Probe:
    """The probe expert of one run on one rank, an `ExpertFn`; `microbatch` is set before every forward."""

    def __init__(self, config: Config, local_experts: tuple[int, ...], part: float) -> None:
        """Act as `local_experts` (N global ids); `part` is this etp shard's share of the expert output."""
        block = config.hidden // config.experts
        if not block:
            raise ValueError(f"the probe needs a column per expert: {config.experts} experts, hidden {config.hidden}")
        self.microbatch = 0
        self._calls: list[_Call] = []
        self._hidden = config.hidden
        self._factor_ND = torch.zeros(len(local_experts), config.hidden, dtype=torch.float64)
        for n, expert in enumerate(local_experts):
            self._factor_ND[n, expert * block : (expert + 1) * block] = tags.gain(expert) * part

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the expert output in `delivery.shape`; padding rows get a large finite value."""
        rows_RD, ids_RJ = delivery.rows_RD, delivery.ids_RJ
        if rows_RD.dim() != 2 or rows_RD.shape[1] != self._hidden:
            raise ValueError(f"handed rows of shape {tuple(rows_RD.shape)}, expected (R, {self._hidden})")
        call = _Call(recorded(delivery, self.microbatch), rows_RD.detach(), [], [])
        self._calls.append(call)
        watched_RD = _watch(rows_RD, call.rows_grads)
        factor_ND = self._factor_ND.to(rows_RD.device, rows_RD.dtype)
        out_RD = torch.zeros_like(watched_RD)
        for j in range(ids_RJ.shape[1]):
            held_R1 = (ids_RJ[:, j] >= 0)[:, None]
            # A product with 0 would be NaN where the row, or its upstream gradient, is not finite.
            answer_RD = torch.where(held_R1, watched_RD, 0) * factor_ND[ids_RJ[:, j].clamp_min(0)]
            if delivery.weights_RJ is not None:
                answer_RD = (answer_RD * delivery.weights_RJ[:, j : j + 1]).to(rows_RD.dtype)
            out_RD = out_RD + torch.where(held_R1, answer_RD, 0)
        padding = tags.padding_answer(rows_RD.dtype, self._hidden)
        out_RD = torch.where(padding_of(delivery)[:, None], padding, out_RD)
        if out_RD.requires_grad:
            # A hook and no autograd Function: combine may write into the expert output, but not into a Function's.
            out_RD.register_hook(lambda grad_RD: call.out_grads.append(grad_RD.detach().cpu().clone()))
        return out_RD.reshape(delivery.shape)

    def handed(self, microbatch: int) -> tuple[Handed, ...]:
        """Return copies of all deliveries of a microbatch, with the gradients recorded so far."""
        return tuple(
            replace(call.handed, out_grad_RD=_total(call.out_grads), rows_grad_RD=_total(call.rows_grads))
            for call in self._calls
            if call.handed.microbatch == microbatch
        )

    def overwritten(self, microbatch: int) -> bool:
        """Return whether routed rows that were delivered in a microbatch have been overwritten since."""
        return any(
            not _same_rows(call.handed.rows_RD, call.rows_RD.cpu(), call.handed.ids_RJ)
            for call in self._calls
            if call.handed.microbatch == microbatch
        )


def recorded(delivery: Delivery, microbatch: int) -> Handed:
    """Return a copy of a delivery, without gradients yet."""
    weights_RJ = delivery.weights_RJ
    return Handed(
        microbatch=microbatch,
        rows_RD=delivery.rows_RD.detach().cpu().clone(),
        ids_RJ=delivery.ids_RJ.detach().cpu().clone(),
        weights_RJ=None if weights_RJ is None else weights_RJ.detach().cpu().clone(),
        counts_N=delivery.counts_N,
        shape=delivery.shape,
        out_grad_RD=None,
        rows_grad_RD=None,
        overflowed=delivery.overflowed,
    )


def padding_of(delivery: Delivery) -> Tensor:
    """Return which rows are padding, bool (R,)."""
    padding_R = (delivery.rows_RD.detach() == 0).all(1)
    if delivery.unrouted == "padding":
        padding_R |= (delivery.ids_RJ < 0).all(1)
    return padding_R


def part_of(session: Session, topology: Topology) -> float:
    """Return this rank's share of the expert outputs: 1, or less if they are partial sums over etp shards."""
    if not session.expert_output_is_partial:
        return 1.0
    shards = topology.ranks("etp")
    return tags.part(shards.index(topology.rank), len(shards))


def _same_rows(before_RD: Tensor, now_RD: Tensor, ids_RJ: Tensor) -> bool:
    routed_R = (ids_RJ >= 0).any(1)
    return torch.equal(before_RD[routed_R].view(torch.uint8), now_RD[routed_R].contiguous().view(torch.uint8))


def _total(grads: list[Tensor]) -> Tensor | None:
    return torch.stack(grads).sum(0) if grads else None
