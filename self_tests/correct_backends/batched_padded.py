"""All-to-all with counts; received rows are padded to (N, C, D), C the largest load here, for one bmm per matrix."""

# ruff: noqa: D102, I001 - what a method does is in `contract` or in its class; imports in two lines
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn import functional as F

from moe_conformance import contract
from moe_conformance.contract import Claims, Config, Delivery, Limit, Named, Parametrised, Read
from moe_conformance.contract import Routed, Routing, Topology, Unsupported

# ---- the library -----------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Where the rows of one dispatch are."""

    token_S: Tensor  # of each sent row
    slot_S: Tensor
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    place_R: Tensor  # of each received row, in (N * C, D)


class Router(nn.Module):
    """Logits in at least float32; softmax or sigmoid scores; top-k."""

    def __init__(self, dim: int, experts: int, top_k: int, score: str, normalise: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.score, self.top_k, self.normalise = score, top_k, normalise
        self.router = nn.Parameter(torch.randn(experts, dim, dtype=dtype) * dim**-0.5)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and ids (T, K), and logits (T, E)."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = x_TD.to(wide) @ self.router.to(wide).t()
        scores_TE = logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(-1)
        ids_TK = scores_TE.topk(self.top_k, sorted=False).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK, ids_TK, logits_TE


class PaddedExchange(nn.Module):
    """Sends routed rows to the ranks of their experts and batches them there."""

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.held, rest = divmod(experts, self.ranks)
        if rest or not self.held:
            raise ValueError(f"{experts} experts cannot be divided among {self.ranks} ranks")
        self.experts, self.first = experts, group.rank() * self.held

    def counts(self, ids_S: Tensor) -> Tensor:
        """Return how many rows (W, N) this rank receives from each rank for each of its experts."""
        sent_E = torch.bincount(ids_S, minlength=self.experts)
        if self.ranks == 1:
            return sent_E[None]
        received_WN = torch.empty_like(sent_E)
        dist.all_to_all_single(received_WN, sent_E, group=self.group)
        return received_WN.view(self.ranks, self.held)

    def exchange(self, rows: Tensor, to_here: list[int], from_here: list[int]) -> Tensor:
        """Send rows, differentiably."""
        if self.ranks == 1:
            return rows
        return wait_tensor(all_to_all_single_autograd(rows.contiguous(), to_here, from_here, self.group))  # type: ignore[no-any-return]

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Plan]:
        """Return the batch (N, C, D), the rows of each expert in it, and the plan for the way back."""
        token_S, slot_S = (ids_TK >= 0).nonzero(as_tuple=True)  # -1: this slot is empty
        order_S = ids_TK[token_S, slot_S].argsort(stable=True)
        token_S, slot_S = token_S[order_S], slot_S[order_S]
        ids_S = ids_TK[token_S, slot_S]
        counts_WN = self.counts(ids_S)
        sent = torch.bincount(ids_S // self.held, minlength=self.ranks).tolist()
        received = counts_WN.sum(1).tolist()
        rows_RD = self.exchange(x_TD[token_S], received, sent)
        expert_R = torch.arange(self.held).repeat(self.ranks).repeat_interleave(counts_WN.flatten())
        counts_N = counts_WN.sum(0)
        C = int(counts_N.max())
        sorted_R = expert_R.argsort(stable=True)
        within_R = torch.arange(len(expert_R)) - (counts_N.cumsum(0) - counts_N)[expert_R[sorted_R]]
        place_R = torch.empty_like(expert_R).index_copy(0, sorted_R, expert_R[sorted_R] * C + within_R)
        batch_NCD = rows_RD.new_zeros(self.held * C, x_TD.shape[1]).index_copy(0, place_R, rows_RD)
        plan = Plan(token_S, slot_S, sent, received, place_R)
        return batch_NCD.view(self.held, C, x_TD.shape[1]), counts_N, plan

    def combine(self, batch_NCD: Tensor, weights_TK: Tensor, plan: Plan) -> Tensor:
        """Return the weighted sums, accumulated at least in the dtype of the weights."""
        rows_RD = batch_NCD.flatten(0, 1)[plan.place_R]
        rows_SD = self.exchange(rows_RD, plan.sent, plan.received)
        weighted_SD = rows_SD * weights_TK[plan.token_S, plan.slot_S, None]
        y_TD = weighted_SD.new_zeros(len(weights_TK), batch_NCD.shape[2])
        return y_TD.index_add(0, plan.token_S, weighted_SD).to(batch_NCD.dtype)


class BatchedExperts(nn.Module):
    """SwiGLU of all experts of this rank at once; gate and up are one matrix."""

    def __init__(self, count: int, dim: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, dim, 2 * ffn, dtype=dtype) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(count, ffn, dim, dtype=dtype) * ffn**-0.5)

    def forward(self, batch_NCD: Tensor) -> Tensor:
        gate_NCF, up_NCF = torch.bmm(batch_NCD, self.gate_up).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate_NCF) * up_NCF, self.down)


class MoE(nn.Module):
    """The layer."""

    def __init__(self, router: Router, exchange: PaddedExchange, experts: BatchedExperts) -> None:
        super().__init__()
        self.gate, self.exchange, self.experts = router, exchange, experts

    def forward(self, x: Tensor) -> Tensor:
        weights_TK, ids_TK, _ = self.gate(x.flatten(0, -2))
        batch_NCD, _, plan = self.exchange.dispatch(x.flatten(0, -2), ids_TK)
        return self.exchange.combine(self.experts(batch_NCD), weights_TK, plan).view_as(x)


def reduce_gradients(module: nn.Module, *groups: dist.ProcessGroup) -> None:
    """Sum gradients over groups; a parameter without a gradient takes part with zeros."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for group in groups:
                if group.size() > 1:
                    dist.all_reduce(parameter.grad, group=group)


# ---- the adapter -----------------------------------------------------------------------------------------------------


class AdaptedExchange:
    def __init__(self, exchange: PaddedExchange) -> None:
        self.inner = exchange
        self.local_experts = tuple(range(exchange.first, exchange.first + exchange.held))
        self.resolved = {"exchange": type(exchange).__name__, "ranks": str(exchange.ranks)}
        self.claims = Claims(handed="batched")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, tuple[Tensor, Plan, torch.Size]]:
        batch_NCD, counts_N, plan = self.inner.dispatch(x.flatten(0, -2), routing.ids_TK)
        return Delivery.batched(batch_NCD, counts_N), (routing.weights_TK, plan, x.shape)

    def combine(self, rows: Tensor, handle: tuple[Tensor, Plan, torch.Size]) -> Tensor:
        weights_TK, plan, shape = handle
        return self.inner.combine(rows, weights_TK, plan).view(shape)


class Adapted:
    """A module with parameters of router and experts."""

    def __init__(self, module: nn.Module, first: int = 0) -> None:
        self.module, self.first, self.resolved = module, first, {"module": type(module).__name__}

    def named(self, read: Read) -> Iterator[Named]:
        for part in self.module.modules():
            if isinstance(part, Router):
                yield Named("router", None, read(part.router))
            elif isinstance(part, BatchedExperts):
                for n, (gate_up_DF, down_FD) in enumerate(zip(read(part.gate_up), read(part.down), strict=True)):
                    gate_DF, up_DF = gate_up_DF.chunk(2, dim=1)
                    yield Named("gate", self.first + n, gate_DF.t())
                    yield Named("up", self.first + n, up_DF.t())
                    yield Named("down", self.first + n, down_FD.t())


class AdaptedRouter(Adapted):
    def __call__(self, x: Tensor) -> Routed:
        weights_TK, ids_TK, logits_TE = self.module(x.flatten(0, -2))
        return Routed(Routing(ids_TK, weights_TK, logits_TE.shape[1]), logits_TE)


class AdaptedExperts(Adapted):
    def __call__(self, delivery: Delivery) -> Tensor:
        return self.module(delivery.rows_RD.view(delivery.shape))  # type: ignore[no-any-return]


class AdaptedLayer(Adapted):
    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


class Session(contract.Session):
    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def exchange(self, config: Config) -> AdaptedExchange:
        config.only("experts", "top_k", "hidden", "dtype", "padding.packed")
        return AdaptedExchange(PaddedExchange(config.experts, self.topology.group("ep")))

    def experts(self, config: Config) -> AdaptedExperts:
        config.only("experts", "top_k", "hidden", "ffn", "dtype", "padding.packed")
        exchange = PaddedExchange(config.experts, self.topology.group("ep"))
        experts = BatchedExperts(exchange.held, config.hidden, config.ffn, config.dtype)
        return AdaptedExperts(experts, exchange.first)

    def router(self, config: Config) -> AdaptedRouter:
        config.only("experts", "top_k", "hidden", "dtype", "routing.score", "routing.normalise", "padding.packed")
        if config.routing.score not in ("softmax", "sigmoid"):
            raise Unsupported(f"score {config.routing.score} does not exist here")
        sizes = config.hidden, config.experts, config.top_k
        return AdaptedRouter(Router(*sizes, config.routing.score, config.routing.normalise, config.dtype))

    def layer(self, config: Config) -> AdaptedLayer:
        router, experts, exchange = self.router(config), self.experts(config), self.exchange(config)
        return AdaptedLayer(MoE(router.module, exchange.inner, experts.module), exchange.inner.first)  # type: ignore[arg-type]

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in (part for surface in built for part in surface.module.modules()):  # type: ignore[attr-defined]
            if isinstance(part, BatchedExperts):
                reduce_gradients(part, self.topology.group("edp"))
            elif isinstance(part, Router):
                reduce_gradients(part, self.topology.group("tp"), self.topology.group("dp_cp"))


class Backend:
    """Padded batches of received rows."""

    name: str = "batched-padded"
    variants: tuple[str, ...] = ("default",)
    judged: Mapping[int, int] = {1: 53, 2: 66, 4: 74}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "ids and shapes are not looked at", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> Session:
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: experts are whole here")
        return Session(topology)
