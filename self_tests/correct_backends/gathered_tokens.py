"""A correct MoE over all-gather: each rank sees all tokens, runs its own experts, and reduce-scatters the sum.

The first half is the library, as somebody writes it for training; the second half is the adapter.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.contract import Config, Session, Topology
from moe_conformance.contract.claims import Claims

from moe_conformance.contract import (  # isort: skip
    Delivery, ExpertFn, Limit, Named, Parametrised, Read, Routed, Routing, Unsupported,
)  # fmt: skip

# ---- the library ---------------------------------------------------------------------------------------------


class AllGather(torch.autograd.Function):
    """Equal blocks of all ranks, one after the other; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return (W * rows, ...) for blocks of (rows, ...)."""
        ctx.group = group
        blocks = [torch.empty_like(block) for _ in range(group.size())]
        dist.all_gather(blocks, block.contiguous(), group=group)
        return torch.cat(blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return this rank's block of the sum."""
        return ReduceScatter.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class ReduceScatter(torch.autograd.Function):
    """This rank's block of the sum over ranks; backward all-gathers."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return (rows, ...) for (W * rows, ...)."""
        ctx.group = group
        parts = [part.contiguous() for part in blocks.chunk(group.size())]
        block = torch.empty_like(parts[0])
        dist.reduce_scatter(block, parts, group=group)
        return block

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all blocks."""
        return AllGather.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class GatheredMoE:
    """Runs the experts of this rank on all tokens of the group that chose them."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        if num_experts < 1:
            raise ValueError(f"there must be an expert, not {num_experts}")
        first, end = (rank * num_experts // group.size() for rank in (group.rank(), group.rank() + 1))
        self.group = group
        self.expert_ids = range(first, end)  # one more on some ranks, where the number does not divide

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
    ) -> Tensor:
        """Return y (T, D) for x (T, D), ids (T, K), -1 for none, and weights (T, K)."""
        tokens = x.shape[0]
        longest = self.longest(tokens, x.device)
        pad = (0, 0, 0, longest - tokens)
        all_x = AllGather.apply(F.pad(x, pad), self.group)  # type: ignore[no-untyped-call]
        all_weights = AllGather.apply(F.pad(weights, pad), self.group)  # type: ignore[no-untyped-call]
        all_ids = AllGather.apply(F.pad(ids, pad, value=-1), self.group)  # type: ignore[no-untyped-call]
        total = torch.zeros_like(all_x)
        for expert_id, expert in zip(self.expert_ids, experts, strict=True):
            token, slot = torch.where(all_ids == expert_id)
            out = expert(all_x[token]) * all_weights[token, slot, None]
            total = total.index_add(0, token, out.to(total.dtype))
        return ReduceScatter.apply(total, self.group)[:tokens]  # type: ignore[no-any-return, no-untyped-call]

    def longest(self, tokens: int, device: torch.device) -> int:
        """Return the largest number of tokens of a rank."""
        count = torch.tensor(tokens, device=device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.group)
        return int(count)


class SwiGLU(nn.Module):
    """One expert, of three linear layers."""

    def __init__(self, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False, dtype=dtype)
        self.up = nn.Linear(hidden, ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, D)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class TopKGate(nn.Module):
    """Softmax over all experts in float32, then the K best of them."""

    def __init__(self, hidden: int, num_experts: int, top_k: int, renormalise: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, num_experts, bias=False, dtype=dtype)
        self.top_k, self.renormalise = top_k, renormalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids (T, K), weights (T, K) and logits (T, E)."""
        logits = self.linear(x)
        weights, ids = F.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights, logits


# ---- the adapter ---------------------------------------------------------------------------------------------


class AdaptedExchange:
    """One call; the experts of the suite are called one by one, as the library calls its own."""

    def __init__(self, moe: GatheredMoE) -> None:
        self.moe = moe
        self.local_experts = tuple(moe.expert_ids)
        self.resolved = {"class": type(moe).__name__}
        self.claims = Claims(wire="all", padding="group_max", alignment=1)  # all_gather takes equal blocks

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        def of(n: int) -> Callable[[Tensor], Tensor]:
            def call(rows: Tensor) -> Tensor:
                return expert(Delivery.grouped(rows, [len(rows) if m == n else 0 for m in range(N)]))

            return call

        N = len(self.local_experts)
        rows = x.reshape(-1, x.shape[-1])
        y = self.moe(rows, routing.ids_TK, routing.weights_TK, [of(n) for n in range(N)])
        return y.reshape(x.shape)


class AdaptedExperts:
    """A list of experts, each given its rows."""

    def __init__(self, config: Config, expert_ids: Sequence[int]) -> None:
        self.expert_ids = expert_ids
        self.experts = nn.ModuleList(SwiGLU(config.hidden, config.ffn, config.dtype) for _ in expert_ids)
        self.resolved = {"class": "ModuleList of SwiGLU"}

    def __call__(self, delivery: Delivery) -> Tensor:
        assert delivery.counts_N is not None
        pieces = delivery.rows_RD.split(delivery.counts_N.tolist())
        return torch.cat([expert(rows) for expert, rows in zip(self.experts, pieces, strict=True)])

    def named(self, read: Read) -> Iterator[Named]:
        for expert_id, expert in zip(self.expert_ids, self.experts, strict=True):
            for name in ("gate", "up", "down"):
                yield Named(name, expert_id, read(getattr(expert, name).weight))


class AdaptedRouter:
    """The gate."""

    def __init__(self, config: Config) -> None:
        self.experts = config.experts
        self.gate = TopKGate(config.hidden, config.experts, config.top_k, config.routing.normalise, config.dtype)
        self.resolved = {"class": "TopKGate"}
        self.claims = Claims(dtype=torch.float32)

    def __call__(self, x: Tensor) -> Routed:
        ids, weights, logits = self.gate(x.reshape(-1, x.shape[-1]))
        return Routed(Routing(ids, weights, self.experts), logits)

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self.gate.linear.weight))


class GatheredSession(Session):
    """One topology on one rank."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def moe(self, config: Config) -> GatheredMoE:
        if self.topology.sizes["etp"] > 1:
            raise Unsupported("experts are not sharded: etp > 1")
        return GatheredMoE(config.experts, self.topology.group("ep"))

    def exchange(self, config: Config) -> AdaptedExchange:
        return AdaptedExchange(self.moe(config.only("experts", "top_k", "hidden", "dtype")))

    def experts(self, config: Config) -> AdaptedExperts:
        ids = self.moe(config.only("experts", "top_k", "hidden", "ffn", "dtype")).expert_ids
        return AdaptedExperts(config, ids)

    def router(self, config: Config) -> AdaptedRouter:
        config.only("experts", "top_k", "hidden", "dtype", "routing.normalise")
        if config.dtype == torch.float64:
            raise Unsupported("scores are computed in float32 whatever the tokens are: dtype = torch.float64")
        return AdaptedRouter(config)

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in built:
            if isinstance(part, AdaptedExperts):
                parameters, groups = list(part.experts.parameters()), ("edp",)
            elif isinstance(part, AdaptedRouter):
                parameters, groups = list(part.gate.parameters()), ("dp_cp", "tp")  # type: ignore[assignment]
            for parameter in parameters:
                for name in groups if parameter.grad is not None else ():  # None: it is frozen
                    dist.all_reduce(parameter.grad, group=self.topology.group(name))


class Gathered:
    """What `--backend self_tests.correct_backends.gathered_tokens:Gathered` names."""

    name: str = "gathered-tokens"
    variants: tuple[str, ...] = ("default",)
    judged: Mapping[int, int] = {1: 50, 2: 62, 4: 70}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "one rank raises, the others wait", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> Session:
        return GatheredSession(topology)


class _Fewer(GatheredSession):
    def experts(self, config: Config) -> AdaptedExperts:
        divided = config.experts // self.topology.sizes["ep"]
        return AdaptedExperts(config, self.moe(config).expert_ids[: max(divided, 1)])


class FewerParameters(Gathered):
    """It is wrong: its exchange places every expert, and those left over by the division have no parameters."""

    def open(self, topology: Topology, device: object) -> Session:
        return _Fewer(topology)
