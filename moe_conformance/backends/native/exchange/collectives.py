"""Collectives that autograd goes through and that take uneven sizes. Rows lie on dim 0.

All three are one all-to-all with uneven splits, because gloo has neither an uneven all-gather nor an uneven
reduce-scatter, and padding to the largest rank would cost W times that rank under a skewed load. The sum of
the reduce-scatter is local, in rank order: deterministic, and for bf16 and fp16 in float32 inside, rounded
once. A group of one rank exchanges nothing and starts no collective.

Every rank of the group calls, with no rows too; the backward is a collective as well, so what is made of the
result must stay in the graph on every rank or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = -1  # in place of a number of rows: the rank that sends it cannot dispatch, and sends no row


class DispatchRefused(ValueError):
    """Another rank cannot dispatch what it was given, so that nothing is dispatched; its own error says why."""


def check_not_refused(numbers_W: Tensor) -> None:
    """Check the numbers of rows that every rank of a group sent, (W,) or (W, ...).

    Raises:
        DispatchRefused: one of them sent `REFUSED`.
    """
    refused_W = (numbers_W == REFUSED).reshape(len(numbers_W), -1).any(1)
    if bool(refused_W.any()):
        raise DispatchRefused(f"rank {int(refused_W.nonzero()[0])} of the group had wrong input to dispatch")


class _AllToAll(torch.autograd.Function):
    """Rows by destination in, rows by source out; the gradient is sent back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Send and remember the splits.

        Implements: COST-10, EXCH-17.
        """
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradient of each received row back to its source, by a collective that autograd records.

        Implements: COST-05, GRAD-20.
        """
        return all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[w]` rows to rank w and return the `received[w]` rows of every rank w, both in rank order.

    Implements: COST-01.
    """
    if group.size() == 1:
        return rows
    result: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class PendingAllToAll:
    """An all-to-all in flight. The output must not be read or written, and the input not be changed, before `wait`.

    Implements: OVLP-01, OVLP-02.
    """

    sent: Tensor
    _received: Tensor
    _work: dist.Work | None  # None where nothing had to be sent

    def wait(self) -> Tensor:
        """Return the rows of every rank, in rank order; to be called once, on every rank.

        Implements: OVLP-03.
        """
        if self._work is not None:
            self._work.wait()
        return self._received


def start_all_to_all(rows: Tensor, group: dist.ProcessGroup) -> PendingAllToAll:
    """Start to send as many rows to one rank as to another. No gradient goes through."""
    if group.size() == 1:
        return PendingAllToAll(rows, rows, None)
    sent = rows.contiguous()
    received = torch.empty_like(sent)
    return PendingAllToAll(sent, received, dist.all_to_all_single(received, sent, group=group, async_op=True))


class AsyncAllToAll:
    """An all-to-all in flight, with gradients: to be waited for once in the forward, and once in the backward.

    Implements: OVLP-01, OVLP-02.
    """

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> None:
        """Keep the splits."""
        self._sent, self._received, self._group = sent, received, group
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Start to send rows, or gradients of what was received back; return where they will be."""
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        given = rows.contiguous()  # kept until it is sent
        result = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(result, given, list(received), list(sent), group=self._group, async_op=True)
        self._under_way = work, given, result
        return result

    @property
    def result(self) -> Tensor:
        """Where the rows will be; not to be read or written before `wait`."""
        assert self._under_way is not None
        return self._under_way[2]

    def wait(self) -> Tensor:
        """Wait for what was started last, and return it.

        Implements: OVLP-03.
        """
        assert self._under_way is not None
        work, _, result = self._under_way
        work.wait()
        self._under_way = None
        return result


class _Depart(torch.autograd.Function):
    """Starts to send rows and returns the rows themselves; in the backward, waits for the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None  # they came to where `gradients` are


class _Arrive(torch.autograd.Function):
    """Waits for what was received in place of the rows; in the backward, starts to send the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.start(gradients[0], back=True), None


def depart(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, AsyncAllToAll | None]:
    """Start an `all_to_all`; return what `arrive` has to be given, and nothing else.

    What is computed in between overlaps with it, and its backward with the all-to-all of the gradients: autograd runs
    the backward of what was computed last first.
    """
    if group.size() == 1:
        return rows, None
    exchange = AsyncAllToAll(sent, received, group)
    return _Depart.apply(rows, exchange), exchange  # type: ignore[no-untyped-call]


def arrive(rows: Tensor, exchange: AsyncAllToAll | None) -> Tensor:
    """Return the rows of every rank, in rank order."""
    return rows if exchange is None else _Arrive.apply(rows, exchange)  # type: ignore[no-untyped-call]


def all_gather(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the `sizes[w]` rows of every rank w, in rank order. The ranks' gradients are summed."""
    W = group.size()
    if W == 1:
        return rows
    repeated = rows.repeat(W, *[1] * (rows.dim() - 1))  # one for each rank
    return all_to_all(repeated, [rows.shape[0]] * W, sizes, group)


def reduce_scatter(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's `sizes[rank]` rows, summed over the ranks. The gradient goes to every rank."""
    W = group.size()
    if W == 1:
        return rows
    count = sizes[group.rank()]
    parts = all_to_all(rows, sizes, [count] * W, group)
    return parts.reshape(W, count, *rows.shape[1:]).sum(0)


def largest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the largest of the ranks' numbers."""
    if group.size() == 1:
        return number
    found = torch.tensor([number], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)
