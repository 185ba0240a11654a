"""A complete adapter from outside: a small exchange of its own, over all-gather, and what the suite asks of a backend.

It runs where this file can be imported: `moe-conformance run --backend third_party_adapter:Backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moe_conformance.contract import Claims, Config, Delivery, ExpertFn, Limit, Routing, Session, Topology, Unsupported


def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks of the group, one rank after the other."""
    if group.size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group)
    return torch.cat(parts)


def add_up(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum over the group."""
    if group.size() == 1:
        return rows
    parts = [part.contiguous() for part in rows.chunk(group.size())]
    total = torch.empty_like(parts[group.rank()])
    dist.reduce_scatter(total, parts, group=group)
    return total


class Linked(Function):
    """A step on rows whose gradient goes back by another one: `gather` and `add_up` are each other's."""

    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any, there: Any, back: Any) -> Any:
        """Go there."""
        ctx.group, ctx.back = group, back
        return there(rows, group)

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        """And back."""
        return ctx.back(upstream, ctx.group), None, None, None


class GatherExchange:
    """Gathers all tokens on every rank, lets each rank's experts answer, and adds their answers up on the way back."""

    def __init__(self, experts: int, topology: Topology) -> None:
        self.group = topology.group("ep")
        held = experts // self.group.size()
        self.local_experts = tuple(range(self.group.rank() * held, (self.group.rank() + 1) * held))
        self.resolved = {"path": f"all_gather over {self.group.size()} ranks"}
        self.claims = Claims(wire="all", routing="maps")

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Pick each local expert's rows out of all tokens, have them answered, weigh and add up."""
        weights_TE, map_TE = routing.dense()
        here, N = list(self.local_experts), len(self.local_experts)
        all_x = Linked.apply(x.reshape(-1, x.shape[-1]), self.group, gather, add_up)  # type: ignore[no-untyped-call]
        all_weights = Linked.apply(weights_TE, self.group, gather, add_up)[:, here]  # type: ignore[no-untyped-call]
        local_R, token_R = gather(map_TE, self.group)[:, here].t().nonzero(as_tuple=True)
        answers_RD = expert(Delivery.grouped(all_x[token_R], torch.bincount(local_R, minlength=N)))
        weighted_RD = (answers_RD * all_weights[token_R, local_R, None]).to(x.dtype)
        summed = torch.zeros_like(all_x).index_add(0, token_R, weighted_RD)
        return Linked.apply(summed, self.group, add_up, gather).reshape(x.shape)  # type: ignore[no-any-return, no-untyped-call]


class GatherSession(Session):
    """One topology on one rank; only the exchange is offered."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def exchange(self, config: Config) -> GatherExchange:
        """Build the exchange, in which experts divide evenly and are whole."""
        config.only("experts", "top_k", "hidden", "dtype")
        if self.topology.sizes["etp"] > 1 or config.experts < 1 or config.experts % self.topology.sizes["ep"]:
            raise Unsupported(f"{config.experts} experts on {self.topology.sizes} are not adapted")
        return GatherExchange(config.experts, self.topology)


class Backend:
    """What `--backend third_party_adapter:Backend` names."""

    name: str = "gather"
    variants: tuple[str, ...] = ("default",)

    def versions(self) -> Mapping[str, str]:
        """Return what verdicts depend on."""
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return what must not be tried: a breach of any would hang or corrupt."""
        uneven = "all_gather wants tensors of one shape from all ranks"
        twice = "a dense map has one place per token and expert"
        trust = "nobody tells the other ranks that one was given what cannot be exchanged"
        return (
            Limit("uneven_tokens", (False,), uneven, proof="undefined"),
            Limit("duplicate_experts", (False,), twice, proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session."""
        return GatherSession(topology)
