"""A library as small as can be, for my_adapter.py: router, all-to-all and experts in one module.

Letters as in moe_conformance/contract; P = T * K routed pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

__version__ = "1.0"


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return the rows that the ranks of the group have for this one."""
        ctx.way = (sent, received, group)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the sent rows."""
        return _AllToAll.apply(upstream[0], *ctx.way), None, None, None


class MoE(nn.Module):
    """y = sum over the K best experts of a token; experts lie on the ranks of a group in equal, contiguous ranges."""

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        normalise: bool,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        """Make this rank's experts; ValueError if they cannot be divided among the ranks."""
        super().__init__()
        if experts < 1 or experts % group.size():
            raise ValueError(f"{experts} experts cannot be divided among {group.size()} ranks")
        self.top_k, self.normalise, self.group, self.held = top_k, normalise, group, experts // group.size()
        self.expert_ids = range(group.rank() * self.held, (group.rank() + 1) * self.held)
        self.router = nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.gate_up = nn.Parameter(torch.randn(self.held, hidden, 2 * ffn, dtype=dtype) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(self.held, ffn, hidden, dtype=dtype) / ffn**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return y in the shape of x."""
        x_TD = x.reshape(-1, x.shape[-1])
        weights_TK, ids_TK = self.router(x_TD).float().softmax(1).topk(self.top_k, dim=1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        ids_P, pairs_P = ids_TK.flatten().sort(stable=True)
        tokens_P = pairs_P // self.top_k
        sent_WN = ids_P.bincount(minlength=self.held * self.group.size()).view(-1, self.held)
        received_WN = torch.empty_like(sent_WN)
        dist.all_to_all_single(received_WN, sent_WN, group=self.group)
        sent, received = sent_WN.sum(1).tolist(), received_WN.sum(1).tolist()
        rows_RD = _AllToAll.apply(x_TD[tokens_P], received, sent, self.group)
        experts_R = torch.arange(self.held).repeat(len(sent)).repeat_interleave(received_WN.flatten())
        order_R = experts_R.argsort(stable=True)
        pieces = rows_RD[order_R].split(received_WN.sum(0).tolist())
        out_RD = torch.cat([self._expert(n, piece) for n, piece in enumerate(pieces)])
        back_PD = _AllToAll.apply(out_RD[order_R.argsort()], sent, received, self.group)
        weighted_PD = back_PD * weights_TK.flatten()[pairs_P, None]
        y_TD = torch.zeros_like(x_TD).index_add(0, tokens_P, weighted_PD.to(x.dtype))
        return y_TD.view(x.shape)

    def _expert(self, n: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ self.gate_up[n]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down[n]
