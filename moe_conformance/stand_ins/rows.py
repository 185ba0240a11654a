"""Rows to the ranks of a table and back: the exchange that every stand-in is built of.

T tokens of this rank, W ranks, M rows sent by this rank, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def of_all_ranks(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Return the numbers of every rank; collective."""
    sent_WN = torch.tensor([numbers] * group.size())
    found: list[list[int]] = _exchanged(sent_WN, [1] * len(sent_WN), [1] * len(sent_WN), group).tolist()
    return found


@dataclass(frozen=True)
class Sends:
    """Which token goes to which rank, once, and how many come from each."""

    group: dist.ProcessGroup
    in_rank_TW: Tensor  # bool
    token_M: Tensor  # by destination, then token
    sent_W: tuple[int, ...]
    received_W: tuple[int, ...]

    @classmethod
    def of(cls, in_rank_TW: Tensor, group: dist.ProcessGroup, agreed: int = 0) -> Sends:
        """Exchange the numbers of rows, and with them a number on which all ranks have to agree; collective.

        Where the ranks disagree all of them raise; a kernel that needs it hangs or reads foreign memory.
        """
        sent_W2 = torch.stack([in_rank_TW.sum(0), torch.full((in_rank_TW.shape[1],), agreed)], 1).int()
        received_W2 = _exchanged(sent_W2, [1] * len(sent_W2), [1] * len(sent_W2), group)
        numbers = received_W2[:, 1].tolist()
        if len(set(numbers)) > 1:
            raise RuntimeError(f"the ranks have {numbers} where the kernel needs one number")
        token_M = in_rank_TW.T.nonzero()[:, 1]
        return cls(group, in_rank_TW, token_M, tuple(sent_W2[:, 0].tolist()), tuple(received_W2[:, 0].tolist()))

    @property
    def rows(self) -> int:
        """R."""
        return sum(self.received_W)

    def sent(self, rows_M: Tensor) -> Tensor:
        """Return the rows that arrive, by source rank and then token; collective."""
        return self._exchanged(rows_M, self.sent_W, self.received_W)

    def summed(self, rows_R: Tensor) -> Tensor:
        """Return for every token the sum of its rows in the order of ranks, in float32 at least; collective."""
        back_M = self.returned(rows_R)
        wide = torch.promote_types(rows_R.dtype, torch.float32)
        sums_T = torch.zeros(len(self.in_rank_TW), *rows_R.shape[1:], dtype=wide, device=rows_R.device)
        for tokens, rows in zip(self.token_M.split(self.sent_W), back_M.split(self.sent_W), strict=True):
            sums_T[tokens] += rows.to(wide)
        return sums_T.to(rows_R.dtype)

    def returned(self, rows_R: Tensor) -> Tensor:
        """Return the rows that come back for those that were sent; collective."""
        return self._exchanged(rows_R, self.received_W, self.sent_W)

    def _exchanged(self, rows: Tensor, sent_W: tuple[int, ...], received_W: tuple[int, ...]) -> Tensor:
        return _exchanged(rows, list(sent_W), list(received_W), self.group)


def _exchanged(rows: Tensor, sent_W: list[int], received_W: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return what arrives; a rank that is alone keeps a copy of what it has."""
    if len(sent_W) == 1:
        return rows.clone(memory_format=torch.contiguous_format)
    arrived = rows.new_empty(sum(received_W), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received_W, sent_W, group=group)
    return arrived
