"""Makes one batch of the tokens of all tensor ranks, for libraries whose tensor ranks share a batch.

`of_all` is called before a layer that needs whole activations, where these are split over tensor ranks: a gather, whose
gradient is the rank's own part (such a library gives the whole gradient to every rank). `local_rows` follows the layer.
The batch begins with the tokens of the second rank: where all have as many, no rank computes its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SharedBatch:
    """The tokens of a group's ranks in one order, the same on all of them. Collective."""

    def __init__(self, T: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Gather the number of tokens of every rank of the group; this rank has T."""
        self._group, self._rank, size = group, dist.get_rank(group), dist.get_world_size(group)
        tokens_W = torch.empty(size, dtype=torch.int64, device=device)
        dist.all_gather(list(tokens_W.split(1)), torch.tensor([T], device=device), group=group)
        self._tokens: list[int] = tokens_W.tolist()

    def of_all(self, local_rows: Tensor) -> Tensor:
        """Return every rank's rows; the gradient of `local_rows` is its part of theirs."""
        gathered: Tensor = _Gather.apply(local_rows, self)  # type: ignore[no-untyped-call]
        return gathered

    def local_rows(self, of_all: Tensor) -> Tensor:
        """Return this rank's rows; the gradient of `of_all` is gathered from every rank's."""
        taken: Tensor = _Take.apply(of_all, self)  # type: ignore[no-untyped-call]
        return taken

    def gather(self, local_rows: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the batch."""
        most = max(self._tokens)
        padded = local_rows.new_zeros(most, *local_rows.shape[1:])
        padded[: local_rows.shape[0]] = local_rows
        parts = [torch.empty_like(padded) for _ in self._tokens]
        dist.all_gather(parts, padded, group=self._group)
        kept = [part[:T] for part, T in zip(parts, self._tokens, strict=True)]
        return torch.cat([*kept[1:], kept[0]])

    def take(self, of_all: Tensor) -> Tensor:
        """Return this rank's rows of a batch."""
        start = sum(self._tokens[1 : self._rank]) if self._rank else sum(self._tokens[1:])
        return of_all[start : start + self._tokens[self._rank]].clone()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_rows: Tensor, batch: SharedBatch) -> Tensor:
        ctx.batch = batch
        return batch.gather(local_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.take(grads[0]), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of_all: Tensor, batch: SharedBatch) -> Tensor:
        ctx.batch = batch
        return batch.take(of_all)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.gather(grads[0]), None
