"""NCCL's expert parallelism as Transformer Engine's `transformer_engine.pytorch.ep` documents it.

From transformer_engine/pytorch/ep.py of NVIDIA/TransformerEngine: the arguments of 008c3d2, with those that later
commits add (`num_topk`, `drop_on_overflow`, `total_recv_tokens`, a capacity of None). Zero copy and quantised payloads
do not stand in.

Rows come expert by expert, in an expert by source rank, then token; a buffer of fixed capacity is garbage beyond them.
More rows than the capacity trap, or are dropped where that was asked for; more tokens than the bound trap.

T tokens of this rank, K slots, N experts held, D hidden, W ranks, R tokens received, P rows of pairs, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.stand_ins.events import poison
from moe_conformance.stand_ins.rows import Sends, of_all_ranks


@dataclass(frozen=True)
class _Bootstrap:
    """What `ep_bootstrap` was called with; all ranks must agree."""

    group: dist.ProcessGroup
    num_experts: int
    max_tokens_per_rank: int
    recv_capacity_per_rank: int | None
    hidden_dim: int
    drop_on_overflow: bool


@dataclass
class _Routing:
    """What `handle_mem` holds between dispatch and combine."""

    sends: Sends
    token_P: Tensor  # of the received tokens
    slot_P: Tensor
    row_P: Tensor  # of the buffer
    rows: int
    tokens: int
    top_k: int


class EpBuffer:
    """State of one dispatch and its combine."""

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int | None = None,
        hidden_dim: int = 0,
        num_local_experts: int = 0,
        alignment: int = 0,
    ) -> None:
        """Keep the sizes."""
        if alignment > 1 and alignment & (alignment - 1):
            raise ValueError(f"alignment must be 0, 1, or a power of two (got {alignment}).")
        self.top_k, self.alignment = top_k, alignment
        self.max_tokens_per_rank, self.recv_capacity_per_rank = max_tokens_per_rank, recv_capacity_per_rank
        self.hidden_dim, self.num_local_experts = hidden_dim, num_local_experts
        self.total_recv_tokens = torch.zeros(1, dtype=torch.int64)
        self.handle_mem: _Routing | None = None


class NcclEp:
    """The module: one context for the process."""

    def __init__(self) -> None:
        """Begin without a context."""
        self.EpBuffer = EpBuffer  # under the name that callers look up
        self._bootstrap: _Bootstrap | None = None

    @property
    def _BOOTSTRAPPED(self) -> bool:  # the name that callers read
        return self._bootstrap is not None

    def is_ep_bootstrapped(self) -> bool:
        """Whether there is a context."""
        return self._bootstrap is not None

    def ep_bootstrap(
        self,
        ep_group: dist.ProcessGroup,
        num_experts: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int | None = None,
        hidden_dim: int = 0,
        max_num_sms: int = 0,
        zero_copy: bool = False,
        num_topk: int = 1,
        drop_on_overflow: bool = False,
    ) -> None:
        """Make the context; collective. Arguments that differ between ranks raise on all."""
        if self._bootstrap is not None:
            raise RuntimeError("ep_bootstrap was already called in this process")
        if ep_group.size() < 2:
            raise ValueError(f"ep_bootstrap requires ep_group.size() >= 2 (got {ep_group.size()}).")
        assert not zero_copy
        if max_tokens_per_rank % 64:
            raise RuntimeError("max_dispatch_tokens_per_rank is no multiple of 64: invalid usage")
        mine = [num_experts, max_tokens_per_rank, -1 if recv_capacity_per_rank is None else recv_capacity_per_rank]
        mine += [hidden_dim, num_topk]
        every = of_all_ranks(mine, ep_group)
        if any(theirs != mine for theirs in every):
            raise RuntimeError(f"ep_bootstrap: the arguments of ranks differ: {every}")
        self._bootstrap = _Bootstrap(
            ep_group, num_experts, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim, drop_on_overflow
        )

    def ep_finalize(self) -> None:
        """End the context, if there is one."""
        self._bootstrap = None

    def ep_dispatch(
        self,
        buffer: EpBuffer,
        tokens: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        recv_tokens: Tensor | None = None,
        recv_topk_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows_CD, their weights and counts_N; differentiable in tokens and weights."""
        assert recv_tokens is None
        assert recv_topk_weights is None
        self._require_payload(tokens)
        if topk_weights.dtype is not torch.float32:
            raise TypeError(f"topk_weights must be float32; got dtype={topk_weights.dtype}.")
        assert topk_idx.dtype == torch.int64
        known = self._known()
        if len(tokens) > known.max_tokens_per_rank:
            raise RuntimeError(f"{len(tokens)} tokens, bootstrapped for {known.max_tokens_per_rank}: the kernel traps")
        if tokens.shape[-1] != known.hidden_dim:
            raise RuntimeError(f"rows of {tokens.shape[-1]} columns, bootstrapped for {known.hidden_dim}")
        counts_N = self._prepare(buffer, topk_idx, known)
        rows_CD, weights_C = _Dispatch.apply(tokens, topk_weights, topk_idx, buffer.handle_mem)  # type: ignore[no-untyped-call]
        return rows_CD, weights_C, counts_N

    def ep_combine(
        self,
        buffer: EpBuffer,
        expert_out: Tensor,
        *,
        num_local_tokens: int | None = None,
        grad_out: Tensor | None = None,
    ) -> Tensor:
        """Return the unweighted sums of the tokens' rows."""
        assert grad_out is None
        self._require_payload(expert_out)
        routing = buffer.handle_mem
        assert routing is not None, "dispatch writes the handle that combine reads"
        assert len(expert_out) == routing.rows
        assert num_local_tokens == routing.tokens
        y_TD: Tensor = _Combine.apply(expert_out, routing)  # type: ignore[no-untyped-call]
        return y_TD

    def _prepare(self, buffer: EpBuffer, ids_TK: Tensor, known: _Bootstrap) -> Tensor:
        """Fill the handle; return counts_N, padded to the alignment; collective."""
        held, W = buffer.num_local_experts, known.group.size()
        in_rank_TW = torch.zeros(len(ids_TK), W, dtype=torch.bool)
        token_P, slot_P = (ids_TK >= 0).nonzero(as_tuple=True)
        in_rank_TW[token_P, ids_TK[token_P, slot_P] // held] = True
        sends = Sends.of(in_rank_TW, known.group)
        ids_RK = sends.sent(ids_TK[sends.token_M])
        local_RK = torch.where(ids_RK // held == known.group.rank(), ids_RK % held, held)  # held: of no expert here
        order = local_RK.flatten().argsort(stable=True)
        counts_N = torch.bincount(local_RK.flatten(), minlength=held + 1)[:held]
        order = order[: int(counts_N.sum())]
        multiple = max(1, buffer.alignment)
        padded_N = -(-counts_N // multiple) * multiple
        expert_P = local_RK.flatten()[order]
        shift_N = (padded_N.cumsum(0) - padded_N) - (counts_N.cumsum(0) - counts_N)
        row_P, total = torch.arange(len(order)) + shift_N[expert_P], int(padded_N.sum())
        buffer.total_recv_tokens.fill_(total)
        rows = total if buffer.recv_capacity_per_rank is None else buffer.recv_capacity_per_rank
        if total > rows and not known.drop_on_overflow:
            raise RuntimeError(f"{total} rows for a receive buffer of {rows}: the kernel traps")
        kept = row_P < rows
        K = ids_TK.shape[1]
        token_R, slot_R = order.div(K, rounding_mode="floor")[kept], (order % K)[kept]
        buffer.handle_mem = _Routing(sends, token_R, slot_R, row_P[kept], rows, len(ids_TK), K)
        kept_N = torch.minimum(padded_N, (rows - (padded_N.cumsum(0) - padded_N)).clamp(min=0))
        return kept_N.int()

    def _known(self) -> _Bootstrap:
        if self._bootstrap is None:
            raise RuntimeError("EpBuffer requires ep_bootstrap() to be called first.")
        return self._bootstrap

    def _require_payload(self, rows: Tensor) -> None:
        if rows.dtype is not torch.bfloat16:
            raise NotImplementedError(f"NCCL EP currently supports only bfloat16 payloads; got {rows.dtype}.")


class WideNcclEp(NcclEp):
    """For rows of any floating type, which no kernel takes."""

    def _require_payload(self, rows: Tensor) -> None:
        assert rows.is_floating_point()


def _scattered(rows_RD: Tensor, routing: _Routing) -> Tensor:
    made_CD = rows_RD.new_empty(routing.rows, *rows_RD.shape[1:])
    poison(made_CD)
    made_CD[routing.row_P] = rows_RD[routing.token_P]
    return made_CD


def _gathered(rows_CD: Tensor, routing: _Routing) -> Tensor:
    """Return the sum of every received token's rows, summed over ranks."""
    wide = torch.promote_types(rows_CD.dtype, torch.float32)
    sums_RD = torch.zeros(routing.sends.rows, rows_CD.shape[1], dtype=wide)
    sums_RD.index_add_(0, routing.token_P, rows_CD[routing.row_P].to(wide))
    return routing.sends.summed(sums_RD.to(rows_CD.dtype))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, routing: _Routing
    ) -> tuple[Tensor, Tensor]:
        sends, ctx.routing = routing.sends, routing
        rows_CD = _scattered(sends.sent(tokens_TD[sends.token_M]), routing)
        weights_RK = sends.sent(weights_TK[sends.token_M])
        weights_C = weights_RK.new_empty(routing.rows)
        poison(weights_C)
        weights_C[routing.row_P] = weights_RK[routing.token_P, routing.slot_P]
        return rows_CD, weights_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        routing, (rows_CD, weights_C) = ctx.routing, gradients
        weights_RK = torch.zeros(routing.sends.rows, routing.top_k)
        weights_RK[routing.token_P, routing.slot_P] = weights_C[routing.row_P]
        return _gathered(rows_CD, routing), routing.sends.summed(weights_RK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_CD: Tensor, routing: _Routing) -> Tensor:
        ctx.routing = routing
        return _gathered(rows_CD, routing)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sends = ctx.routing.sends
        return _scattered(sends.sent(gradients[0].contiguous()[sends.token_M]), ctx.routing), None
