"""Sort by expert, all_to_all_single with uneven splits, and experts that are plain nn.Linear modules in a loop."""

# ruff: noqa: D102, I001 - what a method does is in `contract` or in its class; imports in two lines
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance import contract
from moe_conformance.contract import Config, Delivery, Limit, Named, Parametrised, Read
from moe_conformance.contract import Routed, Routing, Topology, Unsupported

# ---- the library -----------------------------------------------------------------------------------------------------


# What combine needs of a dispatch: the slots of the sent rows (of T * K), the rows to each rank, those from each rank.
Sent = tuple[Tensor, list[int], list[int]]


class TopKGate(nn.Module):
    """Softmax over all experts in at least float32, top-k, optionally normalised weights."""

    def __init__(self, dim: int, experts: int, top_k: int, normalise: bool, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, dim, dtype=dtype) / dim**0.5)
        self.top_k, self.normalise, self.scale = top_k, normalise, scale

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return expert ids and weights (T, K) and logits (T, E)."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        weights_TK, ids_TK = logits_TE.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return ids_TK, weights_TK * self.scale, logits_TE


class SwiGLU(nn.Module):
    """One expert."""

    def __init__(self, dim: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False, dtype=dtype)
        self.up = nn.Linear(dim, ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(ffn, dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class ExpertLoop(nn.Module):
    """The experts of this rank, one after the other, on the rows that are marked with their number."""

    def __init__(self, count: int, dim: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.each = nn.ModuleList(SwiGLU(dim, ffn, dtype) for _ in range(count))

    def forward(self, rows_RD: Tensor, expert_R: Tensor) -> Tensor:
        """Return the expert output of each row; a row of no expert has zeros."""
        out_RD = torch.zeros_like(rows_RD)
        for number, expert in enumerate(self.each):
            of_R = (expert_R == number).nonzero().squeeze(1)
            out_RD = out_RD.index_copy(0, of_R, expert(rows_RD[of_R]))
        return out_RD


class AllToAll(torch.autograd.Function):
    """all_to_all_single over rows; backward sends them back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (received, sent), group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return AllToAll.apply(grad, *reversed(ctx.splits), ctx.group), None, None, None  # type: ignore[no-untyped-call]


class SortedExchange:
    """Sends every routed pair to the rank of its expert and back; ranks hold consecutive experts."""

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        if experts < 1 or experts % group.size():
            raise ValueError(f"{experts} experts cannot be divided among {group.size()} ranks")
        self.group, self.ranks, self.held = group, group.size(), experts // group.size()

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Sent]:
        """Return the received rows, by source rank, and the local expert of each."""
        ids_S, order_S = ids_TK.flatten().sort(stable=True)
        order_S, ids_S = order_S[ids_S >= 0], ids_S[ids_S >= 0]  # empty slots are not sent
        rows_SD = x_TD[order_S // ids_TK.shape[1]]
        if self.ranks == 1:
            return rows_SD, ids_S, (order_S, [], [])
        sent_W = torch.bincount(ids_S // self.held, minlength=self.ranks)
        received_W = torch.empty_like(sent_W)
        dist.all_to_all_single(received_W, sent_W, group=self.group)
        sent, received = sent_W.tolist(), received_W.tolist()
        expert_R = ids_S.new_empty(sum(received))
        dist.all_to_all_single(expert_R, ids_S % self.held, received, sent, self.group)
        return AllToAll.apply(rows_SD, received, sent, self.group), expert_R, (order_S, sent, received)  # type: ignore[no-untyped-call]

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, handle: Sent) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, at least in the dtype of the weights."""
        (order_S, sent, received), (T, K) = handle, weights_TK.shape
        back_SD = rows_RD if self.ranks == 1 else AllToAll.apply(rows_RD, sent, received, self.group)  # type: ignore[no-untyped-call]
        back_SD = back_SD.to(torch.promote_types(back_SD.dtype, weights_TK.dtype))
        slots_PD = back_SD.new_zeros(T * K, back_SD.shape[1]).index_copy(0, order_S, back_SD)
        filled_P = torch.zeros(T * K, dtype=torch.bool).index_fill(0, order_S, True)
        weights_P = torch.where(filled_P, weights_TK.flatten(), 0)
        return (slots_PD * weights_P[:, None]).view(T, K, rows_RD.shape[1]).sum(dim=1).to(rows_RD.dtype)


class MoE(nn.Module):
    """The layer."""

    def __init__(self, gate: TopKGate, exchange: SortedExchange, experts: ExpertLoop) -> None:
        super().__init__()
        self.gate, self.exchange, self.experts = gate, exchange, experts

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        ids_TK, weights_TK, _ = self.gate(x_TD)
        rows_RD, expert_R, handle = self.exchange.dispatch(x_TD, ids_TK)
        return self.exchange.combine(self.experts(rows_RD, expert_R), weights_TK, handle).view_as(x)


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Add up the gradients of the ranks that hold the same parameters; a parameter that was not used counts as zero."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.requires_grad and group.size() > 1:
            dist.all_reduce(parameter.grad, group=group)


# ---- the adapter -----------------------------------------------------------------------------------------------------


class Exchange:
    """Dispatch and combine of the library."""

    def __init__(self, exchange: SortedExchange) -> None:
        self.inner, first = exchange, exchange.group.rank() * exchange.held
        self.local_experts = tuple(range(first, first + exchange.held))
        self.resolved = {"exchange": f"{type(exchange).__name__} over {exchange.ranks} ranks"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, tuple[Tensor, Sent, torch.Size]]:
        rows_RD, expert_R, sent = self.inner.dispatch(x.reshape(-1, x.shape[-1]), routing.ids_TK)
        return Delivery.listed(rows_RD, expert_R[:, None]), (routing.weights_TK, sent, x.shape)

    def combine(self, rows: Tensor, handle: tuple[Tensor, Sent, torch.Size]) -> Tensor:
        weights_TK, sent, shape = handle
        return self.inner.combine(rows, weights_TK, sent).view(shape)


class Adapted:
    """A module of the library, as it is called in a layer, and views of its parameters."""

    def __init__(self, module: nn.Module, first: int) -> None:
        self.module, self.first = module, first
        self.resolved = {"module": type(module).__name__}

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def named(self, read: Read) -> Iterator[Named]:
        for name, parameter in self.module.named_parameters():
            parts = name.split(".")  # "weight", "gate.weight", "each.0.up.weight" or "experts.each.0.up.weight"
            if "each" in parts:
                yield Named(parts[-2], self.first + int(parts[-3]), read(parameter))
            else:
                yield Named("router", None, read(parameter))


class Router(Adapted):
    def __call__(self, x: Tensor) -> Routed:
        ids_TK, weights_TK, logits_TE = self.module(x.reshape(-1, x.shape[-1]))
        return Routed(Routing(ids_TK, weights_TK, logits_TE.shape[1]), logits_TE)


class Experts(Adapted):
    def __call__(self, delivery: Delivery) -> Tensor:  # type: ignore[override]
        return self.module(delivery.rows_RD, delivery.ids_RJ[:, 0])  # type: ignore[no-any-return]


class Session(contract.Session):
    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def _exchange(self, config: Config) -> SortedExchange:
        return SortedExchange(config.experts, self.topology.group("ep"))

    def _gate(self, config: Config) -> TopKGate:
        options = config.routing.normalise, config.routing.scale, config.dtype
        return TopKGate(config.hidden, config.experts, config.top_k, *options)

    def _experts(self, config: Config) -> tuple[ExpertLoop, int]:
        exchange = self._exchange(config)
        first = exchange.group.rank() * exchange.held
        return ExpertLoop(exchange.held, config.hidden, config.ffn, config.dtype), first

    def exchange(self, config: Config) -> Exchange:
        return Exchange(self._exchange(config.only("experts", "top_k", "hidden", "dtype", "padding.packed")))

    def experts(self, config: Config) -> Experts:
        return Experts(*self._experts(config.only("experts", "top_k", "hidden", "ffn", "dtype")))

    def router(self, config: Config) -> Router:
        config.only("experts", "top_k", "hidden", "dtype", "routing.normalise", "routing.scale")
        return Router(self._gate(config), 0)

    def layer(self, config: Config) -> Adapted:
        config.only(
            "experts", "top_k", "hidden", "ffn", "dtype", "routing.normalise", "routing.scale", "padding.packed"
        )
        experts, first = self._experts(config)
        return Adapted(MoE(self._gate(config), self._exchange(config), experts), first)

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in (part for surface in built for part in surface.module.modules()):  # type: ignore[attr-defined]
            if isinstance(part, ExpertLoop):
                sum_gradients(part, self.topology.group("edp"))
            elif isinstance(part, TopKGate):
                sum_gradients(part, self.topology.group("tp"))
                sum_gradients(part, self.topology.group("dp_cp"))


class Backend:
    """Sort and all_to_all_single with plain nn.Linear experts."""

    name, variants = "sorted-uneven", ("default",)
    judged: Mapping[int, int] = {1: 52, 2: 65, 4: 73}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "ids and shapes are not looked at", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> Session:
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: experts are whole here")
        return Session(topology)
