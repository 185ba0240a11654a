"""The checked cases that every contender runs: one step through a small layer of experts, and its judge.

The step is forward and backward: dispatch, experts, combine. Routing is uneven, differs from rank to rank, and in every
fifth case leaves an expert without a row.

Letters: W ranks, T tokens on a rank, K slots per token, E experts, N experts on a rank, D hidden, F expert hidden, S
slots of a rank (T K), R rows received, A tokens of all ranks (W T).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

T, K, E, D, F = 64, 2, 8, 32, 32
DTYPE = torch.float64
# Of the largest expected value. Sums of at most 128 products in float64, ordered in any way, differ by less than 1e-13.
_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """What goes into a step, for all ranks. `broken` plants a bug in it, to see that the judge is awake."""

    number: int
    x_WTD: Tensor
    ids_WTK: Tensor
    weights_WTK: Tensor
    upstream_WTD: Tensor
    up_EDF: Tensor
    down_EFD: Tensor
    broken: bool

    @property
    def world(self) -> int:
        """W."""
        return self.x_WTD.shape[0]


@dataclass(frozen=True)
class Outcome:
    """What comes out of a step on one rank: the layer's output and all gradients."""

    y_TD: Tensor
    dx_TD: Tensor
    dweights_TK: Tensor
    dup_NDF: Tensor
    ddown_NFD: Tensor


def make(number: int, world: int, *, broken: bool = False) -> Case:
    """Returns a case, the same in every process that asks for it."""
    generator = torch.Generator().manual_seed(1000 * world + number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE)

    popularity_WE = normal(world, E).mul(1.5).softmax(1)
    if number % 5 == 0:
        popularity_WE[:, number % E] = 0
    ids_AK = torch.multinomial(popularity_WE.repeat_interleave(T, 0), K, generator=generator)
    return Case(
        number=number,
        x_WTD=normal(world, T, D),
        ids_WTK=ids_AK.reshape(world, T, K),
        weights_WTK=normal(world, T, K).softmax(2),
        upstream_WTD=normal(world, T, D),
        up_EDF=normal(E, D, F) / D**0.5,
        down_EFD=normal(E, F, D) / F**0.5,
        broken=broken,
    )


# ---- the step, on one rank ----------------------------------------------------------------------------------------


def step(case: Case, rank: int) -> Outcome:
    """Runs the case's step on this rank of the default group."""
    world, held = case.world, E // case.world  # W, N
    x_TD = case.x_WTD[rank].clone().requires_grad_()
    weights_TK = case.weights_WTK[rank].clone().requires_grad_()
    up_NDF = case.up_EDF[rank * held : (rank + 1) * held].clone().requires_grad_()
    down_NFD = case.down_EFD[rank * held : (rank + 1) * held].clone().requires_grad_()

    ids_S = case.ids_WTK[rank].flatten()
    order_S = ids_S.argsort(stable=True)
    sent_E = ids_S.bincount(minlength=E)
    taken_E = torch.empty_like(sent_E)
    dist.all_to_all_single(taken_E, sent_E)
    sent_W = sent_E.reshape(world, held).sum(1).tolist()
    taken_W = taken_E.reshape(world, held).sum(1).tolist()

    rows_RD = _exchange(x_TD[order_S // K], sent_W, taken_W)
    out_RD = _experts(rows_RD, taken_E.reshape(world, held), up_NDF, down_NFD)
    back_SD = _exchange(out_RD, taken_W, sent_W)
    if case.broken and rank == world - 1:
        back_SD = back_SD.roll(1, 0)
    weighted_SD = back_SD * weights_TK.flatten()[order_S, None]
    y_TD = torch.zeros_like(x_TD).index_add(0, order_S // K, weighted_SD)

    gradients = torch.autograd.grad(y_TD, (x_TD, weights_TK, up_NDF, down_NFD), case.upstream_WTD[rank])
    return Outcome(y_TD.detach(), *gradients)


def _experts(rows_RD: Tensor, taken_WN: Tensor, up_NDF: Tensor, down_NFD: Tensor) -> Tensor:
    """Applies each expert to its rows, which arrive by source rank and, within it, by expert."""
    world, held = taken_WN.shape
    expert_R = torch.arange(held).repeat(world).repeat_interleave(taken_WN.flatten())
    order_R = expert_R.argsort(stable=True)
    groups = rows_RD[order_R].split(taken_WN.sum(0).tolist())
    outs = [silu(rows @ up_DF) @ down_FD for rows, up_DF, down_FD in zip(groups, up_NDF, down_NFD, strict=True)]
    return torch.cat(outs)[order_R.argsort()]


def _exchange(rows: Tensor, sent_W: list[int], taken_W: list[int]) -> Tensor:
    exchanged: Tensor = _Exchange.apply(rows, sent_W, taken_W)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Sends rows to ranks; backward, their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent_W: list[int], taken_W: list[int]) -> Tensor:
        ctx.sent_W, ctx.taken_W = sent_W, taken_W
        return _all_to_all(rows, sent_W, taken_W)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(gradients[0], ctx.taken_W, ctx.sent_W), None, None


def _all_to_all(rows: Tensor, sent_W: list[int], taken_W: list[int]) -> Tensor:
    taken = rows.new_empty(sum(taken_W), D)
    dist.all_to_all_single(taken, rows.contiguous(), taken_W, sent_W)
    return taken


# ---- the judge, which sees all ranks ------------------------------------------------------------------------------


def judge(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Compares what came out of all ranks with a single device that knows no ranks.

    Raises:
        AssertionError: says which case and quantity is off, and by how much.
    """
    expected = oracle(case)
    for field in fields(Outcome):
        actual = torch.cat([getattr(outcome, field.name) for outcome in outcomes])
        wanted = getattr(expected, field.name)
        assert (wanted.shape, wanted.dtype) == (actual.shape, actual.dtype), f"case {case.number}: {field.name}"
        error = float((actual - wanted).abs().max())
        allowed = _TOLERANCE * float(wanted.abs().max())
        assert error <= allowed, f"case {case.number}: {field.name} is off by {error:.3g}, allowed {allowed:.3g}"


def oracle(case: Case) -> Outcome:
    """Returns the step of all ranks' tokens and all experts: y_a = sum_e gate_ae expert_e(x_a)."""
    x_AD = case.x_WTD.reshape(-1, D).clone().requires_grad_()
    weights_AK = case.weights_WTK.reshape(-1, K).clone().requires_grad_()
    up_EDF = case.up_EDF.clone().requires_grad_()
    down_EFD = case.down_EFD.clone().requires_grad_()

    gates_AE = torch.zeros(len(x_AD), E, dtype=DTYPE).scatter(1, case.ids_WTK.reshape(-1, K), weights_AK)
    out_EAD = silu(x_AD @ up_EDF) @ down_EFD
    y_AD = torch.einsum("ae,ead->ad", gates_AE, out_EAD)

    upstream_AD = case.upstream_WTD.reshape(-1, D)
    gradients = torch.autograd.grad(y_AD, (x_AD, weights_AK, up_EDF, down_EFD), upstream_AD)
    return Outcome(y_AD.detach(), *gradients)
