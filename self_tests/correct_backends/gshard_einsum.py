"""GShard: one-hot dispatch and combine tensors (T, E, C), einsum, all-to-all of (E, C, D); first choices come first."""

# ruff: noqa: D102, I001 - what a method does is in `contract` or in its class; imports in two lines
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance import contract
from moe_conformance.contract import Claims, Config, Delivery, Limit, Named, Parametrised, Read
from moe_conformance.contract import Routed, Routing, Topology, Unsupported

# ---- the library -----------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Softmax over all experts in at least float32, top-k, weights that may be divided by their sum."""

    def __init__(self, dim: int, experts: int, top_k: int, normalise: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, dim, dtype=dtype) * dim**-0.5)
        self.top_k, self.normalise = top_k, normalise

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and weights (T, K), in the order of the choices, and logits (T, E)."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = torch.einsum("td,ed->te", x_TD.to(wide), self.weight.to(wide))
        weights_TK, ids_TK = logits_TE.softmax(dim=1).topk(self.top_k, dim=1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
        return ids_TK, weights_TK, logits_TE


def capacity(tokens: int, top_k: int, experts: int, factor: float, least: int) -> int:
    """Return the number of tokens that a rank may send to one expert."""
    return max(math.ceil(factor * top_k * tokens / experts), least)


def place(ids_TK: Tensor, experts: int, places: int) -> tuple[Tensor, Tensor]:
    """Return one-hot (K, T, E, C) places, and which slots (T, K) have one; first choices come first."""
    choice_KTE = F.one_hot(ids_TK.t().clamp_min(0), experts) * (ids_TK.t() >= 0)[..., None]
    K, T, E = choice_KTE.shape
    before_KTE = (choice_KTE.reshape(K * T, E).cumsum(dim=0) - choice_KTE.reshape(K * T, E)).view(K, T, E)
    fits_KTE = choice_KTE.bool() & (before_KTE < places)
    return (torch.arange(places) == before_KTE[..., None]) & fits_KTE[..., None], fits_KTE.any(dim=2).t()


class AllToAll(torch.autograd.Function):
    """all_to_all of equal parts along the first dimension, which is its own backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, parts.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class Dispatcher:
    """Dispatch and combine with C places per rank and expert; without a capacity C is the largest load."""

    def __init__(self, experts: int, factor: float | None, least: int, group: dist.ProcessGroup) -> None:
        if experts < 1 or experts % group.size():
            raise ValueError(f"{experts} experts cannot be divided among {group.size()} ranks")
        self.experts, self.factor, self.least = experts, factor, least
        self.group, self.ranks, self.held = group, group.size(), experts // group.size()

    def places(self, ids_TK: Tensor) -> tuple[int, int]:
        """Return how many tokens this rank may send to an expert, and the places for them, equal on all ranks."""
        if self.factor is None:
            own = max(self.least, int(torch.bincount(ids_TK[ids_TK >= 0], minlength=self.experts).max()))
        else:
            own = capacity(*ids_TK.shape, self.experts, self.factor, self.least)  # type: ignore[call-arg]
        most = torch.tensor(own)
        if self.ranks > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return own, int(most)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows (N, W * C, D) of this rank's experts, unused places zero, and the one-hot places."""
        own, most = self.places(ids_TK)
        at_KTEC, _ = place(ids_TK, self.experts, own)
        at_KTEC = F.pad(at_KTEC, (0, most - own))
        rows_ECD = torch.einsum("tec,td->ecd", at_KTEC.sum(dim=0).to(x_TD.dtype), x_TD)
        if self.ranks > 1:
            rows_ECD = AllToAll.apply(rows_ECD, self.group)  # type: ignore[no-untyped-call]
        return rows_ECD.unflatten(0, (self.ranks, self.held)).transpose(0, 1).flatten(1, 2), at_KTEC

    def combine(self, rows_NPD: Tensor, weights_TK: Tensor, at_KTEC: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs, computed at least in the dtype of the weights."""
        rows_ECD = rows_NPD.unflatten(1, (self.ranks, at_KTEC.shape[3])).transpose(0, 1).flatten(0, 1)
        if self.ranks > 1:
            rows_ECD = AllToAll.apply(rows_ECD, self.group)  # type: ignore[no-untyped-call]
        wide = torch.promote_types(rows_ECD.dtype, weights_TK.dtype)
        combine_TEC = torch.where(at_KTEC, weights_TK.t()[..., None, None].to(wide), 0).sum(dim=0)
        return torch.einsum("tec,ecd->td", combine_TEC, rows_ECD.to(wide)).to(rows_NPD.dtype)


class Experts(nn.Module):
    """SwiGLU experts as three batched matrices."""

    def __init__(self, count: int, dim: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_NDF = nn.Parameter(torch.randn(count, dim, ffn, dtype=dtype) * dim**-0.5)
        self.up_NDF = nn.Parameter(torch.randn(count, dim, ffn, dtype=dtype) * dim**-0.5)
        self.down_NFD = nn.Parameter(torch.randn(count, ffn, dim, dtype=dtype) * ffn**-0.5)

    def forward(self, rows_NPD: Tensor) -> Tensor:
        hidden_NPF = F.silu(torch.einsum("npd,ndf->npf", rows_NPD, self.gate_NDF))
        hidden_NPF = hidden_NPF * torch.einsum("npd,ndf->npf", rows_NPD, self.up_NDF)
        return torch.einsum("npf,nfd->npd", hidden_NPF, self.down_NFD)


class MoE(nn.Module):
    """The layer."""

    def __init__(self, gate: Gate, dispatcher: Dispatcher, experts: Experts) -> None:
        super().__init__()
        self.gate, self.dispatcher, self.experts = gate, dispatcher, experts

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        ids_TK, weights_TK, _ = self.gate(x_TD)
        rows_NPD, at_KTEC = self.dispatcher.dispatch(x_TD, ids_TK)
        return self.dispatcher.combine(self.experts(rows_NPD), weights_TK, at_KTEC).view_as(x)


def sum_gradients(module: nn.Module, *groups: dist.ProcessGroup) -> None:
    """Add up the gradients over the ranks with the same parameters; one that no token has used is zero."""
    for parameter in (p for p in module.parameters() if p.requires_grad):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for group in (group for group in groups if group.size() > 1):
            dist.all_reduce(parameter.grad, group=group)


# ---- the adapter -----------------------------------------------------------------------------------------------------


class AdaptedExchange:
    """The dispatcher, which fills C places of every expert."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.inner, first = dispatcher, dispatcher.group.rank() * dispatcher.held
        self.local_experts = tuple(range(first, first + dispatcher.held))
        self.resolved = {"exchange": f"{type(dispatcher).__name__} on {dispatcher.ranks} ranks"}
        self.claims = Claims(wire="capacity", handed="static", drop_order="choices", non_finite="all")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, tuple[Tensor, Tensor, torch.Size]]:
        rows_NPD, at_KTEC = self.inner.dispatch(x.reshape(-1, x.shape[-1]), routing.ids_TK)
        return Delivery.batched(rows_NPD), (routing.weights_TK, at_KTEC, x.shape)

    def combine(self, rows: Tensor, handle: tuple[Tensor, Tensor, torch.Size]) -> Tensor:
        weights_TK, at_KTEC, shape = handle
        return self.inner.combine(rows, weights_TK, at_KTEC).view(shape)


class Adapted:
    """A module of the library, as it is called in a layer, and views of its parameters."""

    def __init__(self, module: nn.Module, config: Config, first: int = 0) -> None:
        self.module, self.config, self.first = module, config, first
        self.resolved, self.claims = {"module": type(module).__name__}, Claims(drop_order="choices")

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def named(self, read: Read) -> Iterator[Named]:
        for path, parameter in self.module.named_parameters():
            name = path.rpartition(".")[2]
            if name == "weight":
                yield Named("router", None, read(parameter))
            else:
                for n, part in enumerate(read(parameter)):
                    yield Named(name.split("_")[0], self.first + n, part.t())


class AdaptedRouter(Adapted):
    def __call__(self, x: Tensor) -> Routed:
        ids_TK, weights_TK, logits_TE = self.module(x.reshape(-1, x.shape[-1]))
        config, E = self.config, self.config.experts
        if config.capacity.factor is not None:
            places = capacity(*ids_TK.shape, E, config.capacity.factor, config.capacity.minimum)  # type: ignore[call-arg]
            ids_TK = torch.where(place(ids_TK, E, places)[1], ids_TK, -1)
        return Routed(Routing(ids_TK, weights_TK, E), logits_TE)


class AdaptedExperts(Adapted):
    def __call__(self, delivery: Delivery) -> Tensor:  # type: ignore[override]
        return self.module(delivery.rows_RD.view(delivery.shape))  # type: ignore[no-any-return]


class Session(contract.Session):
    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def _only(self, config: Config) -> Config:
        config.only("experts", "top_k", "hidden", "ffn", "dtype", "routing.normalise", "padding.packed",
                    "capacity.factor", "capacity.minimum", "capacity.drop_policy", "capacity.padded")  # fmt: skip
        if config.capacity.factor is not None and config.capacity.drop_policy != "position":
            raise Unsupported("slots are dropped by position only")
        return config

    def exchange(self, config: Config) -> AdaptedExchange:
        factor, least = self._only(config).capacity.factor, config.capacity.minimum
        return AdaptedExchange(Dispatcher(config.experts, factor, least, self.topology.group("ep")))

    def experts(self, config: Config) -> AdaptedExperts:
        mine = self.exchange(config).local_experts
        return AdaptedExperts(Experts(len(mine), config.hidden, config.ffn, config.dtype), config, mine[0])

    def router(self, config: Config) -> AdaptedRouter:
        sizes = self._only(config).hidden, config.experts, config.top_k
        return AdaptedRouter(Gate(*sizes, config.routing.normalise, config.dtype), config)

    def layer(self, config: Config) -> Adapted:
        gate, dispatcher, experts = self.router(config), self.exchange(config), self.experts(config)
        return Adapted(MoE(gate.module, dispatcher.inner, experts.module), config, experts.first)  # type: ignore[arg-type]

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in (part for surface in built for part in surface.module.modules()):  # type: ignore[attr-defined]
            if isinstance(part, Experts):
                sum_gradients(part, self.topology.group("edp"))
            elif isinstance(part, Gate):
                sum_gradients(part, self.topology.group("tp"), self.topology.group("dp_cp"))


class Backend:
    """GShard with einsum."""

    name, variants = "gshard-einsum", ("default",)
    judged: Mapping[int, int] = {1: 55, 2: 70, 4: 80}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "ids and shapes are not looked at", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> Session:
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: experts are whole here")
        return Session(topology)
