"""The tokens of a rank in three chunks: while the experts work on one, the next is sent, and the last comes back."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, Delivery, ExpertFn, Routing
from self_tests.correct_backends.small_parts import SmallBackend, SmallSession, share, weighted_sum

CHUNKS = 3


class Transfer:
    """Rows under way to other ranks, or their gradients under way back."""

    def __init__(self, received: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
        self.received, self.sent, self.group = received, sent, group
        self.work: Any = None
        self.back: Tensor | None = None  # the gradients of what was sent
        self.kept: Tensor | None = None  # what is being sent must not be freed

    def start(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return the buffer that is filled when `wait` returns."""
        self.kept = rows.contiguous()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        self.work = dist.all_to_all_single(out, self.kept, received, sent, group=self.group, async_op=True)
        return out

    def wait(self) -> None:
        """Wait until everything has come."""
        self.work.wait()
        self.work = self.kept = None


class Start(torch.autograd.Function):
    """Begins to send rows; its backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(rows, transfer.received, transfer.sent)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None]:
        back = ctx.transfer.back  # under way; what autograd passes has the shape of the other end
        ctx.transfer.wait()
        return back, None


class Finish(torch.autograd.Function):
    """Waits for the rows; its backward begins to send the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None]:
        transfer = ctx.transfer
        transfer.back = transfer.start(upstream[0], transfer.sent, transfer.received)
        return upstream[0], None


class ChunkedExchange:
    """Every rank has as many chunks, some of which may have no tokens."""

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        self.group, self.experts = group, config.experts
        self.local_experts = tuple(share(config.experts, group))
        self.resolved = {"exchange": f"{CHUNKS} chunks over {group.size()} ranks"}

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        x_TD, K = x.reshape(-1, x.shape[-1]), routing.ids_TK.shape[1]
        of_chunk = routing.ids_TK.tensor_split(CHUNKS)
        slots = [self._sorted(ids_TK.flatten()) for ids_TK in of_chunk]
        sent_CWN = torch.stack(
            [
                ids_TK.flatten()[slots_S].bincount(minlength=self.experts).view(self.group.size(), -1)
                for ids_TK, slots_S in zip(of_chunk, slots, strict=True)
            ]
        )
        sent_WCN = sent_CWN.transpose(0, 1).contiguous()
        received_WCN = torch.empty_like(sent_WCN)
        dist.all_to_all_single(received_WCN, sent_WCN, group=self.group)
        transfers, under_way = [], []
        for c, (part_TD, slots_S) in enumerate(zip(x_TD.tensor_split(CHUNKS), slots, strict=True)):
            transfers.append(self._transfer(received_WCN[:, c], sent_WCN[:, c]))
            under_way.append(Start.apply(part_TD[slots_S // K], transfers[-1]))  # type: ignore[no-untyped-call]
        back = []
        for c, transfer in enumerate(transfers):
            rows_RD = Finish.apply(under_way[c], transfer)  # type: ignore[no-untyped-call]
            ids_R = self._ids(received_WCN[:, c])
            out_RD = expert(Delivery.listed(rows_RD, ids_R[:, None]))
            transfers[c] = self._transfer(sent_WCN[:, c], received_WCN[:, c])
            back.append(Start.apply(out_RD, transfers[c]))  # type: ignore[no-untyped-call]
        done = [Finish.apply(rows, transfer) for rows, transfer in zip(back, transfers, strict=True)]  # type: ignore[no-untyped-call]
        weights = routing.weights_TK.tensor_split(CHUNKS)
        return torch.cat([weighted_sum(*each) for each in zip(done, slots, weights, strict=True)]).view(x.shape)

    @staticmethod
    def _sorted(ids_P: Tensor) -> Tensor:
        return ids_P.argsort(stable=True)[int((ids_P < 0).sum()) :]

    def _transfer(self, received_WN: Tensor, sent_WN: Tensor) -> Transfer:
        return Transfer(received_WN.sum(1).tolist(), sent_WN.sum(1).tolist(), self.group)

    @staticmethod
    def _ids(received_WN: Tensor) -> Tensor:
        W, N = received_WN.shape
        return torch.arange(N).repeat(W).repeat_interleave(received_WN.flatten())


class ChunkedSession(SmallSession):
    """One topology on one rank."""

    def build_exchange(self, config: Config) -> ChunkedExchange:
        return ChunkedExchange(config, self.ep)


class Chunked(SmallBackend):
    """What `--backend self_tests.correct_backends.chunks_in_flight:Chunked` names."""

    name, session = "chunks-in-flight", ChunkedSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
