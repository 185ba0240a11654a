"""A correct MoE over an all-to-all of lists of tensors, one for each rank, with a backward written by hand.

The first half is the library, as somebody writes it for training; the second half is the adapter. Gloo's
`dist.all_to_all` takes tensors of one size only, so each tensor is a message of its own; routing weights travel with
the rows to the experts.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.contract import (  # isort: skip
    Config, Delivery, Limit, Named, Parametrised, Read, Routed, Router, Routing, Topology, Unsupported,
)  # fmt: skip
from moe_conformance.contract import Session

# ---- the library ---------------------------------------------------------------------------------------------


def exchange_lists(inputs: Sequence[Tensor], outputs: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send inputs[r] to rank r of the group, and receive outputs[r] from it; empty tensors are not sent."""
    me = group.rank()
    outputs[me].copy_(inputs[me])
    ops = []
    for peer in (rank for rank in range(group.size()) if rank != me):
        if outputs[peer].numel():
            ops.append(dist.P2POp(dist.irecv, outputs[peer], group=group, group_peer=peer))
        if inputs[peer].numel():
            ops.append(dist.P2POp(dist.isend, inputs[peer].contiguous(), group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


class AllToAll(torch.autograd.Function):
    """All-to-all of lists; backward sends every gradient back to where its tensor came from."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, received: list[int], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor of received[r] rows from each rank."""
        ctx.group, ctx.sent = group, [len(tensor) for tensor in inputs]
        outputs = tuple(inputs[0].new_empty(rows, *inputs[0].shape[1:]) for rows in received)
        exchange_lists(inputs, outputs, group)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs."""
        back = [grads[0].new_empty(rows, *grads[0].shape[1:]) for rows in ctx.sent]
        exchange_lists(grads, back, ctx.group)
        return None, None, *back


@dataclass(frozen=True)
class Sent:
    """What combine needs."""

    token: Tensor  # of each sent row, sorted by expert
    tokens: int
    sent: list[int]  # rows for each rank
    received: list[int]
    order: Tensor  # of the received rows, by local expert


class ListDispatcher:
    """Dispatch and combine by lists of tensors."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.group, self.num_experts = group, num_experts
        if num_experts < 1 or num_experts % group.size():
            raise ValueError(f"{num_experts} experts on {group.size()} ranks")
        self.per_rank = num_experts // group.size()
        self.expert_ids = range(group.rank() * self.per_rank, (group.rank() + 1) * self.per_rank)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, list[int], Sent]:
        """Return rows by local expert, their weights, the number of rows of each expert, and what combine needs."""
        pairs = torch.nonzero(ids.flatten() >= 0).flatten()
        pairs = pairs[ids.flatten()[pairs].argsort(stable=True)]
        token = pairs // max(ids.shape[1], 1)
        counts = torch.bincount(ids.flatten()[pairs], minlength=self.num_experts).view(-1, self.per_rank)
        incoming = torch.empty_like(counts)
        exchange_lists(list(counts), list(incoming), self.group)
        sent, received = counts.sum(1).tolist(), incoming.sum(1).tolist()
        rows = torch.cat(AllToAll.apply(self.group, received, *x[token].split(sent)))  # type: ignore[no-untyped-call]
        row_weights = torch.cat(AllToAll.apply(self.group, received, *weights.flatten()[pairs].split(sent)))  # type: ignore[no-untyped-call]
        expert = torch.arange(self.per_rank).repeat(len(received)).repeat_interleave(incoming.flatten())
        order = expert.argsort(stable=True)
        handle = Sent(token, len(x), sent, received, order)
        return rows[order], row_weights[order], incoming.sum(0).tolist(), handle

    def combine(self, rows: Tensor, handle: Sent) -> Tensor:
        """Return y (T, D), the sum of the rows of each token; the experts have weighted them."""
        if len(rows) != len(handle.order):
            raise ValueError(f"{len(rows)} rows, and {len(handle.order)} were dispatched")
        unsorted = rows[handle.order.argsort()].split(handle.received)
        back = torch.cat(AllToAll.apply(self.group, handle.sent, *unsorted))  # type: ignore[no-untyped-call]
        return rows.new_zeros(handle.tokens, rows.shape[1]).index_add(0, handle.token, back)


class WeightedExperts(nn.Module):
    """SwiGLU experts, one after the other; the routing weight multiplies what enters the last projection."""

    def __init__(self, num_experts: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(num_experts, 2 * ffn, hidden, dtype=dtype) / hidden**0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, ffn, dtype=dtype) / ffn**0.5)

    def forward(self, rows: Tensor, counts: list[int], weights: Tensor | None) -> Tensor:
        """Return (rows, D)."""
        out, pieces = [], rows.split(counts)
        by_expert = [None] * len(counts) if weights is None else weights.split(counts)
        for w13, w2, piece, weight in zip(self.w13, self.w2, pieces, by_expert, strict=True):
            gate, up = F.linear(piece, w13).chunk(2, dim=-1)
            hidden = F.silu(gate) * up
            if weight is not None:
                hidden = (hidden * weight[:, None]).to(hidden.dtype)
            out.append(F.linear(hidden, w2))
        return torch.cat(out)


class SigmoidGate(nn.Module):
    """As in DeepSeek-V3: sigmoid scores, a bias for the selection alone, weights of sum `scale`."""

    bias: Tensor

    def __init__(self, hidden: int, num_experts: int, top_k: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, hidden, dtype=dtype) / hidden**0.5)
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.top_k, self.scale = top_k, scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids (T, K), weights (T, K) and logits (T, E)."""
        logits = F.linear(x, self.weight)
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
        ids = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale, logits


# ---- the adapter ---------------------------------------------------------------------------------------------


class AdaptedExchange:
    """The two halves; the experts multiply by the weights."""

    def __init__(self, library: ListDispatcher) -> None:
        self.library = library
        self.local_experts = tuple(library.expert_ids)
        self.resolved = {"class": type(library).__name__}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, tuple[Sent, torch.Size]]:
        flat = x.reshape(-1, x.shape[-1])
        rows, weights, counts, sent = self.library.dispatch(flat, routing.ids_TK, routing.weights_TK)
        return Delivery.grouped(rows, counts, weights), (sent, x.shape)

    def combine(self, rows: Tensor, handle: tuple[Sent, torch.Size]) -> Tensor:
        sent, shape = handle
        return self.library.combine(rows, sent).reshape(shape)


class AdaptedExperts:
    """The experts."""

    def __init__(self, config: Config, expert_ids: Sequence[int]) -> None:
        self.expert_ids = expert_ids
        self.module = WeightedExperts(len(expert_ids), config.hidden, config.ffn, config.dtype)
        self.resolved = {"class": type(self.module).__name__}

    def __call__(self, delivery: Delivery) -> Tensor:
        assert delivery.counts_N is not None
        weights = None if delivery.weights_RJ is None else delivery.weights_RJ.flatten()
        out: Tensor = self.module(delivery.rows_RD, delivery.counts_N.tolist(), weights)
        return out

    def named(self, read: Read) -> Iterator[Named]:
        for n, expert_id in enumerate(self.expert_ids):
            gate, up = read(self.module.w13)[n].chunk(2)
            yield Named("gate", expert_id, gate)
            yield Named("up", expert_id, up)
            yield Named("down", expert_id, read(self.module.w2)[n])


class AdaptedRouter:
    """The gate."""

    def __init__(self, config: Config) -> None:
        self.module = SigmoidGate(config.hidden, config.experts, config.top_k, config.routing.scale, config.dtype)
        self.config, self.resolved = config, {"class": type(self.module).__name__}

    def __call__(self, x: Tensor) -> Routed:
        ids, weights, logits = self.module(x.reshape(-1, x.shape[-1]))
        return Routed(Routing(ids, weights, self.config.experts), logits)

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self.module.weight))
        if self.config.routing.balance_bias:
            yield Named("balance_bias", None, read(self.module.bias))


class ListSession(Session):
    """One topology on one rank."""

    weights_at = "expert"

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def library(self, config: Config) -> ListDispatcher:
        if self.topology.sizes["etp"] > 1:
            raise Unsupported("experts are not sharded: etp > 1")
        return ListDispatcher(config.experts, self.topology.group("ep"))

    def exchange(self, config: Config) -> AdaptedExchange:
        return AdaptedExchange(self.library(config.only("experts", "top_k", "hidden", "dtype")))

    def experts(self, config: Config) -> AdaptedExperts:
        return AdaptedExperts(
            config, self.library(config.only("experts", "top_k", "hidden", "ffn", "dtype")).expert_ids
        )

    def router(self, config: Config) -> Router:
        config.only("experts", "top_k", "hidden", "dtype", "routing")
        asked = config.routing
        if asked.score != "sigmoid" or not asked.normalise or asked.groups is not None or asked.forced:
            raise Unsupported(f"the scores are normalised sigmoids, without groups and not forced, and not {asked}")
        return AdaptedRouter(config)

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in built:
            if not isinstance(part, AdaptedExperts | AdaptedRouter):
                continue
            for parameter in (each for each in part.module.parameters() if each.grad is not None):
                for name in ("edp",) if isinstance(part, AdaptedExperts) else ("dp_cp", "tp"):
                    dist.all_reduce(parameter.grad, group=self.topology.group(name))


class Lists:
    """What `--backend self_tests.correct_backends.lists_of_tensors:Lists` names."""

    name: str = "lists-of-tensors"
    variants: tuple[str, ...] = ("default",)
    judged: Mapping[int, int] = {1: 51, 2: 62, 4: 71}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "one rank raises, the others wait", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> Session:
        return ListSession(topology)
