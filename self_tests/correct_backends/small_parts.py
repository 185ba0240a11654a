"""What small libraries of this folder share: a gate, experts, an all-to-all with its backward, and their adapter.

A file that uses it has the part in which it is unusual, mostly the exchange, and a session that builds it.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance import contract
from moe_conformance.contract import (
    Config,
    Delivery,
    Exchange,
    Limit,
    Named,
    Parametrised,
    Read,
    Routed,
    Routing,
    SplitExchange,
    Topology,
    Unsupported,
    whole,
)

# ---- the library ---------------------------------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return the rows that the ranks of the group have for this one."""
        ctx.way = (sent, received, group)
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the sent rows."""
        return all_to_all(upstream[0], *ctx.way), None, None, None


def all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that the ranks of the group have for this one, differentiable."""
    result: Tensor = AllToAll.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return result


class Gate(nn.Module):
    """Softmax over all experts in at least float32, the K largest, divided by their sum if `normalise`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.normalise = config.top_k, config.routing.normalise
        self.weight = nn.Parameter(torch.randn(config.experts, config.hidden, dtype=config.dtype) * 0.1)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and weights (T, K), and logits (T, E)."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        weights_TK, ids_TK = self.scores(logits_TE).topk(self.top_k, dim=1)
        return ids_TK, self.weighed(weights_TK), logits_TE

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores by which experts are selected and weighed."""
        return logits_TE.softmax(1)

    def weighed(self, weights_TK: Tensor) -> Tensor:
        """Return the routing weights for the K largest scores."""
        return weights_TK / weights_TK.sum(1, keepdim=True) if self.normalise else weights_TK


class SwiGLU(nn.Module):
    """The experts of this rank, stacked: `ids` are their global numbers."""

    def __init__(self, ids: Sequence[int], config: Config) -> None:
        super().__init__()
        self.ids, shape = tuple(ids), (len(ids), config.ffn, config.hidden)
        self.w1 = nn.Parameter(torch.randn(shape, dtype=config.dtype) * 0.1)
        self.w3 = nn.Parameter(torch.randn(shape, dtype=config.dtype) * 0.1)
        self.w2 = nn.Parameter(torch.randn(shape, dtype=config.dtype).transpose(1, 2).contiguous() * 0.1)

    def one(self, n: int, rows: Tensor) -> Tensor:
        """Return the output of a local expert."""
        return F.linear(F.silu(F.linear(rows, self.w1[n])) * F.linear(rows, self.w3[n]), self.w2[n])

    def forward(self, rows_RD: Tensor, ids_R: Tensor) -> Tensor:
        """Return the output of each row by its local expert; zeros for a row of none (-1)."""
        out_RD = torch.zeros_like(rows_RD)
        for n in range(len(self.ids)):
            of_R = (ids_R == n).nonzero().squeeze(1)
            out_RD = out_RD.index_copy(0, of_R, self.one(n, rows_RD[of_R]))
        return out_RD


def weighted_sum(out_SD: Tensor, slots_S: Tensor, weights_TK: Tensor) -> Tensor:
    """Return for each token the sum of the outputs of its slots times their weights, (T, D)."""
    (T, K), wide = weights_TK.shape, torch.promote_types(out_SD.dtype, weights_TK.dtype)
    weighted_SD = out_SD.to(wide) * weights_TK.flatten()[slots_S, None]
    return weighted_SD.new_zeros(T, out_SD.shape[1]).index_add(0, slots_S // K, weighted_SD).to(out_SD.dtype)


def share(experts: int, group: dist.ProcessGroup) -> range:
    """Return the experts of this rank: as many on each, in order; ValueError if they cannot be divided."""
    if experts < 1 or experts % group.size():
        raise ValueError(f"{experts} experts cannot be divided among {group.size()} ranks")
    held = experts // group.size()
    return range(group.rank() * held, (group.rank() + 1) * held)


class PairExchange:
    """Sends the row of every routed pair to the rank of its expert, and its output back."""

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        self.group, self.experts = group, config.experts
        self.local_experts = tuple(share(config.experts, group))
        self.resolved = {"exchange": f"{type(self).__name__} over {group.size()} ranks"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_P, W = routing.ids_TK.flatten(), self.group.size()
        slots_S = ids_P.argsort(stable=True)[int((ids_P < 0).sum()) :]
        sent_WN = ids_P[slots_S].bincount(minlength=self.experts).view(W, -1)
        received_WN = torch.empty_like(sent_WN)
        dist.all_to_all_single(received_WN, sent_WN, group=self.group)
        sent, received = sent_WN.sum(1).tolist(), received_WN.sum(1).tolist()
        rows_SD = x.reshape(-1, x.shape[-1])[slots_S // routing.ids_TK.shape[1]]
        rows_RD = all_to_all(rows_SD, received, sent, self.group)
        ids_R = torch.arange(received_WN.shape[1]).repeat(W).repeat_interleave(received_WN.flatten())
        handle = (x.shape, routing.weights_TK, slots_S, received, sent)
        return Delivery.listed(rows_RD, ids_R[:, None], None, received_WN.sum(0)), handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shape, weights_TK, slots_S, received, sent = handle
        return weighted_sum(all_to_all(rows, sent, received, self.group), slots_S, weights_TK).view(shape)


# ---- the adapter ---------------------------------------------------------------------------------------------


class AdaptedGate:
    """A gate."""

    def __init__(self, module: Gate) -> None:
        self.module, self.resolved = module, {"router": type(module).__name__}

    def __call__(self, x: Tensor) -> Routed:
        ids_TK, weights_TK, logits_TE = self.module(x.reshape(-1, x.shape[-1]))
        return Routed(Routing(ids_TK, weights_TK, logits_TE.shape[1]), logits_TE)

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self.module.weight))


class AdaptedExperts:
    """The experts of a rank."""

    def __init__(self, module: SwiGLU) -> None:
        self.module, self.resolved = module, {"experts": type(module).__name__}

    def __call__(self, delivery: Delivery) -> Tensor:
        out_RD: Tensor = self.module(delivery.rows_RD, delivery.ids_RJ[:, 0])
        return out_RD.view(delivery.shape)

    def named(self, read: Read) -> Iterator[Named]:
        names = {"gate": self.module.w1, "up": self.module.w3, "down": self.module.w2}
        for name, parameter in names.items():
            for n, expert in enumerate(self.module.ids):
                yield Named(name, expert, read(parameter)[n])


class AdaptedLayer:
    """Gate, exchange and experts, as a model calls them."""

    def __init__(self, gate: AdaptedGate, exchange: Exchange | SplitExchange, experts: AdaptedExperts) -> None:
        self.gate, self.experts, self.whole = gate, experts, whole(exchange)
        self.resolved = {**exchange.resolved, **gate.resolved, **experts.resolved}
        self.claims = contract.Claims()
        for part in (exchange, gate, experts):
            self.claims = self.claims.joined(getattr(part, "claims", contract.Claims()))

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x, self.gate(x).routing, self.experts)

    def named(self, read: Read) -> Iterator[Named]:
        yield from self.gate.named(read)
        yield from self.experts.named(read)


class SmallSession(contract.Session):
    """One topology on one rank. A library overrides `build` of the part that it has of its own."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.ep = topology, topology.group("ep")

    def build_exchange(self, config: Config) -> Exchange | SplitExchange:
        return PairExchange(config, self.ep)

    def build_experts(self, config: Config) -> AdaptedExperts:
        return AdaptedExperts(SwiGLU(share(config.experts, self.ep), config))

    def build_gate(self, config: Config) -> AdaptedGate:
        return AdaptedGate(Gate(config))

    def exchange(self, config: Config) -> Exchange | SplitExchange:
        return self.build_exchange(config.only("experts", "top_k", "hidden", "dtype", "padding.packed"))

    def experts(self, config: Config) -> AdaptedExperts:
        return self.build_experts(config.only("experts", "top_k", "hidden", "ffn", "dtype"))

    def router(self, config: Config) -> AdaptedGate:
        return self.build_gate(config.only("experts", "top_k", "hidden", "dtype", "routing.normalise"))

    def layer(self, config: Config) -> AdaptedLayer:
        config.only("experts", "top_k", "hidden", "ffn", "dtype", "routing.normalise", "padding.packed")
        return AdaptedLayer(self.build_gate(config), self.build_exchange(config), self.build_experts(config))

    def finish_gradients(self, *built: Parametrised) -> None:
        for surface in built:
            if isinstance(surface, (AdaptedLayer, AdaptedGate)):
                self.finish_gate((surface.gate if isinstance(surface, AdaptedLayer) else surface).module)
            if isinstance(surface, (AdaptedLayer, AdaptedExperts)):
                self.finish_experts((surface.experts if isinstance(surface, AdaptedLayer) else surface).module)

    def finish_gate(self, gate: nn.Module) -> None:
        """Add up the gradients of all tokens."""
        for gradient in gradients(gate):
            for group in ("tp", "dp_cp"):
                dist.all_reduce(gradient, group=self.topology.group(group))

    def finish_experts(self, experts: Any) -> None:
        """Add up the gradients of the ranks that hold the same experts."""
        for gradient in gradients(experts):
            dist.all_reduce(gradient, group=self.topology.group("edp"))


def gradients(module: nn.Module) -> Iterator[Tensor]:
    """Yield the gradient of every parameter that is trained, zeros where there was no backward."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


class SmallBackend:
    """A backend with sessions of a class."""

    name: str
    variants: tuple[str, ...] = ("default",)
    session: type[SmallSession] = SmallSession

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "ids and shapes are not looked at", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> contract.Session:
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: experts lie whole on one rank each")
        return self.session(topology)
