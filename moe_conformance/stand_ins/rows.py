"""Rows to the ranks of a table and back: the exchange that every stand-in is built of.

T tokens of this rank, W ranks, M rows sent by this rank, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Sends:
    """Which token goes to which rank, once, and how many come from each."""

    group: dist.ProcessGroup
    in_rank_TW: Tensor  # bool
    token_M: Tensor  # by destination, then token
    sent_W: tuple[int, ...]
    received_W: tuple[int, ...]

    @classmethod
    def of(cls, in_rank_TW: Tensor, group: dist.ProcessGroup) -> Sends:
        """Exchange the numbers of rows; collective."""
        sent = in_rank_TW.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        token_M = in_rank_TW.T.nonzero()[:, 1]
        return cls(group, in_rank_TW, token_M, tuple(sent.tolist()), tuple(received.tolist()))

    @property
    def rows(self) -> int:
        """R."""
        return sum(self.received_W)

    def sent(self, rows_M: Tensor) -> Tensor:
        """Return the rows that arrive, by source rank and then token; collective."""
        return self._exchanged(rows_M, self.sent_W, self.received_W)

    def summed(self, rows_R: Tensor) -> Tensor:
        """Return for every token the sum of its rows in the order of ranks, in float32 at least; collective."""
        back_M = self._exchanged(rows_R, self.received_W, self.sent_W)
        wide = torch.promote_types(rows_R.dtype, torch.float32)
        sums_T = torch.zeros(len(self.in_rank_TW), *rows_R.shape[1:], dtype=wide, device=rows_R.device)
        for tokens, rows in zip(self.token_M.split(self.sent_W), back_M.split(self.sent_W), strict=True):
            sums_T[tokens] += rows.to(wide)
        return sums_T.to(rows_R.dtype)

    def _exchanged(self, rows: Tensor, sent_W: tuple[int, ...], received_W: tuple[int, ...]) -> Tensor:
        arrived = rows.new_empty(sum(received_W), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), list(received_W), list(sent_W), group=self.group)
        return arrived


def same_everywhere(number: int, group: dist.ProcessGroup, what: str) -> None:
    """Raise on every rank if the ranks have different numbers; collective.

    A kernel that needs equal numbers hangs or reads foreign memory.
    """
    numbers = torch.zeros(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(numbers, torch.tensor([number]), group=group)
    if len(set(numbers.tolist())) > 1:
        raise RuntimeError(f"the ranks have {numbers.tolist()} {what}; the kernel needs equal numbers")
