"""A correct MoE layer of one class: router, exchange and experts in one module, which is called with x alone.

The first half is the library, as somebody writes it for training; the second half is the adapter.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.contract import Claims, Config, Limit, Named, Parametrised, Read, Session, Topology, Unsupported

# ---- the library ---------------------------------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """Rows to their ranks; backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return the rows that came."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of what was sent."""
        return AllToAll.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None  # type: ignore[no-untyped-call]


class MoE(nn.Module):
    """Mixture of experts over a group of ranks: y = sum of the K best experts, and one shared expert for all tokens."""

    def __init__(
        self, hidden: int, ffn: int, num_experts: int, top_k: int, *, norm_topk: bool, shared_ffn: int,
        shared_gate: bool, group: dist.ProcessGroup, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_experts < 1 or num_experts % group.size():
            raise ValueError(f"{num_experts} experts are not divisible by {group.size()} ranks")
        self.group, self.top_k, self.norm_topk = group, top_k, norm_topk
        self.local = num_experts // group.size()
        self.router = nn.Linear(hidden, num_experts, bias=False, dtype=dtype)
        self.gate_up = nn.Parameter(torch.randn(self.local, hidden, 2 * ffn, dtype=dtype) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(self.local, ffn, hidden, dtype=dtype) / ffn**0.5)
        self.shared_gate_up = nn.Linear(hidden, 2 * shared_ffn, bias=False, dtype=dtype) if shared_ffn else None
        self.shared_down = nn.Linear(shared_ffn, hidden, bias=False, dtype=dtype) if shared_ffn else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False, dtype=dtype) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return y in the shape of x."""
        tokens = x.reshape(-1, x.shape[-1])
        scores = F.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)

        # Sort the routed pairs by expert: then they are sorted by rank as well.
        expert, order = chosen.reshape(-1).sort(stable=True)
        token = order // self.top_k
        to_expert = torch.bincount(expert, minlength=self.local * self.group.size())
        from_rank = torch.empty_like(to_expert)  # (W, local) rows for each of this rank's experts
        dist.all_to_all_single(from_rank, to_expert, group=self.group)
        to_rank = to_expert.view(-1, self.local).sum(1).tolist()
        from_rank = from_rank.view(-1, self.local)

        received = AllToAll.apply(tokens[token], to_rank, from_rank.sum(1).tolist(), self.group)  # type: ignore[no-untyped-call]
        own = torch.arange(self.local).repeat(self.group.size()).repeat_interleave(from_rank.reshape(-1))
        by_expert = own.argsort(stable=True)
        pieces = received[by_expert].split(from_rank.sum(0).tolist())
        out = torch.cat([self.expert(n, piece) for n, piece in enumerate(pieces)])
        back = AllToAll.apply(out[by_expert.argsort()], from_rank.sum(1).tolist(), to_rank, self.group)  # type: ignore[no-untyped-call]

        weighted = back * weights.reshape(-1)[order].unsqueeze(1)
        y = torch.zeros_like(tokens).index_add(0, token, weighted.to(tokens.dtype))
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(tokens).chunk(2, dim=-1)
            shared = self.shared_down(F.silu(gate) * up)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(tokens).sigmoid())
        return y.reshape(x.shape)

    def expert(self, n: int, rows: Tensor) -> Tensor:
        """Return the output of a local expert."""
        gate, up = (rows @ self.gate_up[n]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down[n]


# ---- the adapter ---------------------------------------------------------------------------------------------


class AdaptedLayer:
    """The module."""

    def __init__(self, moe: MoE) -> None:
        self.moe = moe
        self.resolved = {"class": type(moe).__name__}
        self.claims = Claims(dtype=torch.float32)  # scores, whatever the tokens are

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(x)
        return y

    def named(self, read: Read) -> Iterator[Named]:
        moe = self.moe
        yield Named("router", None, read(moe.router.weight))
        for n in range(moe.local):
            expert_id = moe.group.rank() * moe.local + n
            gate, up = read(moe.gate_up)[n].t().chunk(2)
            yield Named("gate", expert_id, gate)
            yield Named("up", expert_id, up)
            yield Named("down", expert_id, read(moe.down)[n].t())
        if moe.shared_gate_up is not None and moe.shared_down is not None:
            gate, up = read(moe.shared_gate_up.weight).chunk(2)
            yield Named("shared_gate", 0, gate)
            yield Named("shared_up", 0, up)
            yield Named("shared_down", 0, read(moe.shared_down.weight))
        if moe.shared_gate is not None:
            yield Named("shared_score", None, read(moe.shared_gate.weight))


class PlainSession(Session):
    """One topology on one rank; the layer is all there is."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def layer(self, config: Config) -> AdaptedLayer:
        config.only("experts", "top_k", "hidden", "ffn", "dtype", "routing.normalise", "shared.ffn", "shared.gate")
        if self.topology.sizes["etp"] > 1:
            raise Unsupported("experts are not sharded: etp > 1")
        if len(config.shared.ffn) > 1:
            raise Unsupported(f"one shared expert at most, not {len(config.shared.ffn)}")
        return AdaptedLayer(
            MoE(
                config.hidden,
                config.ffn,
                config.experts,
                config.top_k,
                norm_topk=config.routing.normalise,
                shared_ffn=sum(config.shared.ffn),
                shared_gate=config.shared.gate,
                group=self.topology.group("ep"),
                dtype=config.dtype,
            )
        )

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in built:
            if not isinstance(part, AdaptedLayer):
                continue
            for name, parameter in part.moe.named_parameters():
                if parameter.grad is None:  # it is frozen
                    continue
                for group in ("edp",) if name in ("gate_up", "down") else ("dp_cp", "tp"):
                    dist.all_reduce(parameter.grad, group=self.topology.group(group))


class PlainLayer:
    """What `--backend self_tests.correct_backends.plain_layer:PlainLayer` names."""

    name: str = "plain-layer"
    variants: tuple[str, ...] = ("default",)
    judged: Mapping[int, int] = {1: 7, 2: 9, 4: 10}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return ()

    def open(self, topology: Topology, device: torch.device) -> Session:
        return PlainSession(topology)
