"""A library as small as can be, for my_adapter.py: it sends the row of each routed (token, slot) to its expert's rank.

Letters as in moe_conformance/contract; S rows sent. An id of -1 is an empty slot. Combine applies the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__version__ = "1.0"


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return the rows that the ranks of the group have for this one."""
        ctx.way = (sent, received, group)
        if group.size() == 1:
            return rows.clone()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the sent rows."""
        return _AllToAll.apply(upstream[0], *ctx.way), None, None, None


@dataclass(frozen=True)
class Handle:
    """What combine needs of a dispatch."""

    shape: torch.Size  # of x
    weights_TK: Tensor
    slots_S: Tensor  # of the sent rows, in the order in which they were sent: indices into T * K
    order_R: Tensor  # from the order of the sending ranks to that of the experts
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


class Dispatcher:
    """Experts lie on the ranks of a group in equal, contiguous ranges."""

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        """Place the experts; ValueError if they cannot be divided among the ranks."""
        if experts < 1 or experts % group.size():
            raise ValueError(f"{experts} experts cannot be divided among {group.size()} ranks")
        self.experts, self.group, self.held = experts, group, experts // group.size()
        self.expert_ids = range(group.rank() * self.held, (group.rank() + 1) * self.held)

    def dispatch(self, x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Handle]:
        """Return the rows of this rank's experts, sorted by expert, how many each has, and a handle for combine."""
        ids_P, W = ids_TK.flatten(), self.group.size()
        slots_S = ids_P.argsort(stable=True)[int((ids_P < 0).sum()) :]
        sent_WN = ids_P[slots_S].bincount(minlength=self.experts).view(W, self.held)
        received_WN = torch.empty_like(sent_WN)
        if W == 1:
            received_WN = sent_WN
        else:
            dist.all_to_all_single(received_WN, sent_WN, group=self.group)
        experts_R = torch.arange(self.held, device=x.device).repeat(W).repeat_interleave(received_WN.flatten())
        order_R, sent, received = experts_R.argsort(stable=True), sent_WN.sum(1).tolist(), received_WN.sum(1).tolist()
        rows_SD = x.reshape(-1, x.shape[-1])[slots_S // ids_TK.shape[1]]
        rows_RD = _AllToAll.apply(rows_SD, received, sent, self.group)[order_R]
        return rows_RD, received_WN.sum(0), Handle(x.shape, weights_TK, slots_S, order_R, sent, received)

    def combine(self, rows_RD: Tensor, handle: Handle) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, in the shape of x."""
        (T, K), D = handle.weights_TK.shape, rows_RD.shape[1]
        back_RD = torch.empty_like(rows_RD).index_copy(0, handle.order_R, rows_RD)
        out_SD = _AllToAll.apply(back_RD, handle.sent, handle.received, self.group)
        weighted_SD = out_SD * handle.weights_TK.flatten()[handle.slots_S, None]
        summed_TD = weighted_SD.new_zeros(T, D).index_add(0, handle.slots_S // K, weighted_SD)
        return summed_TD.to(rows_RD.dtype).view(handle.shape)
