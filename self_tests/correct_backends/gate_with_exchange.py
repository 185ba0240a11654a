"""Gate and exchange in one module: it is called with tokens only, and every expert takes its C heaviest of each rank.

The adapter offers the router, with its drops, and the layer; the exchange cannot be given a routing.
"""

# ruff: noqa: D102, I001 - what a method does is in `contract` or in its class; imports in two lines
from __future__ import annotations

from typing import Any

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance import contract
from moe_conformance.contract import Config, Limit, Named, Parametrised, Read
from moe_conformance.contract import Routed, Routing, Topology, Unsupported, refusals

# ---- the library -----------------------------------------------------------------------------------------------------


class Swap(torch.autograd.Function):
    """Part i of this rank becomes part `rank` of rank i; the backward is the same."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        swapped = torch.empty(parts.shape, dtype=parts.dtype)
        dist.all_to_all_single(swapped, parts.contiguous(), group=group)
        return swapped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Swap.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False, dtype=dtype)
        self.up = nn.Linear(dim, ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(ffn, dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class CapacityMoE(nn.Module):
    """Router, exchange, experts and shared experts of one layer.

    capacity_factor: every expert takes C = ceil(factor K T / E) tokens of a rank, those of highest weight. None: C is
    the largest load of any rank and nothing is dropped. All ranks send the C of the rank with the most.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        experts: int,
        top_k: int,
        group: dist.ProcessGroup,
        *,
        normalise: bool = False,
        capacity_factor: float | None = None,
        shared: Sequence[int] = (),
        shared_gate: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if experts < 1 or experts % group.size():
            raise ValueError(f"{experts} experts cannot be divided among {group.size()} ranks")
        self.E, self.K, self.group, self.N = experts, top_k, group, experts // group.size()
        self.normalise, self.factor = normalise, capacity_factor
        self.router = nn.Linear(dim, experts, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(MLP(dim, ffn, dtype) for _ in range(self.N))
        self.shared = nn.ModuleList(MLP(dim, size, dtype) for size in shared)
        self.shared_score = nn.Linear(dim, 1, bias=False, dtype=dtype) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        y_TD = self.routed(x_TD)
        if self.shared:
            shared_TD = sum(mlp(x_TD) for mlp in self.shared)
            if self.shared_score is not None:
                shared_TD = self.shared_score(x_TD).sigmoid() * shared_TD
            y_TD = y_TD + shared_TD
        return y_TD.view_as(x)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the C tokens that each expert takes and their weights (E, C), and logits (T, E).

        Where an expert was selected by fewer, others fill its places: with weight -1 here, 0 for the output.
        """
        wide, T = torch.promote_types(x_TD.dtype, torch.float32), len(x_TD)
        logits_TE = F.linear(x_TD.to(wide), self.router.weight.to(wide))
        weights_TK, ids_TK = logits_TE.softmax(dim=-1).topk(self.K, dim=-1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        weights_TE = torch.full_like(logits_TE, -1).scatter(1, ids_TK, weights_TK)
        if self.factor is None:
            C = int(torch.bincount(ids_TK.flatten(), minlength=self.E).max())
        else:
            C = min(T, math.ceil(self.factor * self.K * T / self.E))  # topk takes no more than there are
        heaviest_EC, token_EC = weights_TE.t().topk(C, dim=1)
        return token_EC, heaviest_EC, logits_TE

    def places(self, own: int) -> int:
        """Return the places of an expert for one rank, equal on all ranks."""
        places = torch.tensor(own)
        if self.group.size() > 1:
            dist.all_reduce(places, dist.ReduceOp.MAX, self.group)
        return int(places)

    def routed(self, x_TD: Tensor) -> Tensor:
        """Return the weighted outputs of the experts."""
        token_EC, heaviest_EC, _ = self.route(x_TD)
        own, places = token_EC.shape[1], self.places(token_EC.shape[1])
        rows_ECD = F.pad(x_TD[token_EC], (0, 0, 0, places - own))
        W, D = self.group.size(), x_TD.shape[1]
        if W > 1:
            rows_ECD = Swap.apply(rows_ECD, self.group)  # type: ignore[no-untyped-call]
        rows_WNCD = rows_ECD.view(W, self.N, places, D)
        out_WNCD = torch.stack([expert(rows_WNCD[:, n]) for n, expert in enumerate(self.experts)], dim=1)
        out_ECD = out_WNCD.flatten(0, 1)
        if W > 1:
            out_ECD = Swap.apply(out_ECD, self.group)  # type: ignore[no-untyped-call]
        weighted_ECD = out_ECD[:, :own] * heaviest_EC.clamp_min(0)[..., None]
        y_TD = weighted_ECD.new_zeros(x_TD.shape).index_add(0, token_EC.flatten(), weighted_ECD.flatten(0, 1))
        return y_TD.to(x_TD.dtype)

    def reduce_gradients(self, replicas: dist.ProcessGroup, *all_ranks: dist.ProcessGroup) -> None:
        """Sum the gradients of experts over their replicas, all others over all ranks that share a layer."""
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for group in (replicas,) if name.startswith("experts.") else all_ranks:
                if group.size() > 1:
                    dist.all_reduce(parameter.grad, group=group)


# ---- the adapter -----------------------------------------------------------------------------------------------------


class Layer:
    """The module as a layer."""

    def __init__(self, module: CapacityMoE) -> None:
        self.module, self.first = module, module.group.rank() * module.N
        self.resolved = {"layer": type(module).__name__, "ranks": str(module.group.size())}

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]

    def named(self, read: Read) -> Iterator[Named]:
        for path, parameter in self.module.named_parameters():
            match path.split("."):  # router.weight, shared_score.weight, experts.0.gate.weight, shared.0.up.weight
                case ["experts", number, name, _]:
                    yield Named(name, self.first + int(number), read(parameter))
                case ["shared", number, name, _]:
                    yield Named(f"shared_{name}", int(number), read(parameter))
                case [name, _]:
                    yield Named(name, None, read(parameter))


class Router(Layer):
    """The module's choice alone, as ids with -1 for slots that no expert took."""

    def __call__(self, x: Tensor) -> Routed:  # type: ignore[override]
        token_EC, heaviest_EC, logits_TE = self.module.route(x.reshape(-1, x.shape[-1]))
        weights_TE = torch.full_like(logits_TE, -1).scatter(0, token_EC.t(), heaviest_EC.t())
        weights_TK, ids_TK = weights_TE.topk(self.module.K, dim=1)
        ids_TK = torch.where(weights_TK < 0, -1, ids_TK)
        return Routed(Routing(ids_TK, weights_TK, self.module.E), logits_TE)

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self.module.router.weight))


class Session(contract.Session):
    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def module(self, config: Config) -> CapacityMoE:
        config.only("experts", "top_k", "hidden", "ffn", "dtype", "routing.normalise", "capacity.factor",
                    "capacity.padded", "shared.ffn", "shared.gate", "padding.packed")  # fmt: skip
        sizes = config.hidden, config.ffn, config.experts, config.top_k
        options: dict[str, Any] = {
            "normalise": config.routing.normalise,
            "capacity_factor": config.capacity.factor,
            "dtype": config.dtype,
        }
        shared: dict[str, Any] = {"shared": config.shared.ffn, "shared_gate": config.shared.gate}
        with refusals(ValueError, match="cannot be divided among"):
            return CapacityMoE(*sizes, self.topology.group("ep"), **options, **shared)  # type: ignore[misc]

    def layer(self, config: Config) -> Layer:
        return Layer(self.module(config))

    def router(self, config: Config) -> Router:
        return Router(self.module(config))

    def finish_gradients(self, *built: Parametrised) -> None:
        for surface in built:
            surface.module.reduce_gradients(*map(self.topology.group, ("edp", "tp", "dp_cp")))  # type: ignore[attr-defined]


class Backend:
    """Gate and exchange in one module."""

    name: str = "gate-with-exchange"
    variants: tuple[str, ...] = ("default",)
    judged: Mapping[int, int] = {1: 22, 2: 25, 4: 27}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return ()

    def open(self, topology: Topology, device: torch.device) -> Session:
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: experts are whole here")
        return Session(topology)
