"""Gate and exchange in one module: it is called with tokens only, and every expert takes its C heaviest of each rank.

The adapter offers a layer and nothing else, since the exchange cannot be given a routing.
"""

# ruff: noqa: D102 - what a method does is in contract.py or in its class
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance import surfaces
from moe_conformance.contract import Config, Limit, Named, Parametrised, Read, Topology, Unsupported

# ---- the library -----------------------------------------------------------------------------------------------------


class Swap(torch.autograd.Function):
    """Part i of this rank becomes part `rank` of rank i; the backward is the same."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        swapped = torch.empty(parts.shape, dtype=parts.dtype)
        dist.all_to_all_single(swapped, parts.contiguous(), group=group)
        return swapped

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return Swap.apply(grad, ctx.group), None


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False, dtype=dtype)
        self.up = nn.Linear(dim, ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(ffn, dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


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

    def weigh(self, x_TD: Tensor) -> Tensor:
        """Return the weight of each expert for each token (T, E), 0 where it was not selected."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        scores_TE = F.linear(x_TD.to(wide), self.router.weight.to(wide)).softmax(dim=-1)
        weights_TK, ids_TK = scores_TE.topk(self.K, dim=-1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return torch.zeros_like(scores_TE).scatter(1, ids_TK, weights_TK)

    def capacity(self, weights_TE: Tensor) -> tuple[int, int]:
        """Return the tokens that this rank may send to an expert, and the places that all ranks send."""
        T = len(weights_TE)
        if self.factor is None:
            own = int((weights_TE > 0).sum(dim=0).max())
        else:
            own = min(T, math.ceil(self.factor * self.K * T / self.E))  # topk takes no more than there are
        places = torch.tensor(own)
        if self.group.size() > 1:
            dist.all_reduce(places, dist.ReduceOp.MAX, self.group)
        return own, int(places)

    def routed(self, x_TD: Tensor) -> Tensor:
        """Return the weighted outputs of the experts."""
        weights_TE = self.weigh(x_TD)
        own, places = self.capacity(weights_TE)
        heaviest_EC, token_EC = weights_TE.t().topk(own, dim=1)  # light ones may have weight 0: then they fill places
        rows_ECD = F.pad(x_TD[token_EC], (0, 0, 0, places - own))
        W, D = self.group.size(), x_TD.shape[1]
        if W > 1:
            rows_ECD = Swap.apply(rows_ECD, self.group)
        rows_WNCD = rows_ECD.view(W, self.N, places, D)
        out_WNCD = torch.stack([expert(rows_WNCD[:, n]) for n, expert in enumerate(self.experts)], dim=1)
        out_ECD = out_WNCD.flatten(0, 1)
        if W > 1:
            out_ECD = Swap.apply(out_ECD, self.group)
        weighted_ECD = out_ECD[:, :own] * heaviest_EC[..., None]
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
        return self.module(x)

    def named(self, read: Read) -> Iterator[Named]:
        for path, parameter in self.module.named_parameters():
            match path.split("."):  # router.weight, shared_score.weight, experts.0.gate.weight, shared.0.up.weight
                case ["experts", number, name, _]:
                    yield Named(name, self.first + int(number), read(parameter))
                case ["shared", number, name, _]:
                    yield Named(f"shared_{name}", int(number), read(parameter))
                case [name, _]:
                    yield Named(name, None, read(parameter))


class Session(surfaces.Session):
    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def layer(self, config: Config) -> Layer:
        config.only("experts", "top_k", "hidden", "ffn", "dtype", "normalise", "capacity_factor", "pad_to_capacity",
                    "shared_ffn", "shared_gate", "packed")  # fmt: skip
        return Layer(
            CapacityMoE(
                config.hidden,
                config.ffn,
                config.experts,
                config.top_k,
                self.topology.group("ep"),
                normalise=config.normalise,
                capacity_factor=config.capacity_factor,
                shared=config.shared_ffn,
                shared_gate=config.shared_gate,
                dtype=config.dtype,
            )
        )

    def finish_gradients(self, *built: Parametrised) -> None:
        for surface in built:
            surface.module.reduce_gradients(*map(self.topology.group, ("edp", "tp", "dp_cp")))


class Backend:
    """Gate and exchange in one module."""

    name: str = "gate-with-exchange"
    variants: tuple[str, ...] = ("default",)

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return ()

    def open(self, topology: Topology, device: torch.device) -> Session:
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: experts are whole here")
        return Session(topology)
