"""EXCH, EXPT, ROUTE: what is right of small sizes, of one shape and of some ranks, and of no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import misuse
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, LocalExchange
from moe_conformance.backends.native.exchange.tp_duplicated_tokens import TokenCopies
from moe_conformance.backends.native.fused import autograd
from moe_conformance.backends.native.fused.surface import ReusableExchange
from moe_conformance.backends.native.layer.experts import Experts, swiglu
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.shared_experts import SharedExperts
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Delivery, Routing, Topology
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

_CUT_AND_COPIED = Layout(4, etp=2)
_CROSSED = Layout(4, tp=2, ep=4)

# ---- many ----------------------------------------------------------------------------------------------------------


@planted(Expectation("EXPT-01", "own-many-tokens-one-expert", "experts", "y of rank"))
class OneTileOfRows(Experts):
    """A grouped product has room for one tile of 128 rows of an expert."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        at_P = torch.cat([torch.arange(0), *(torch.arange(n) for n in counts_N)])
        return torch.where((at_P < 128)[:, None], super()._loop(rows_PD, counts_N), 0)


@planted(Expectation("EXCH-01", "hundreds-of-experts-even", "dispatch", "expert"))
class IdsInAByte(AllToAllExchange):
    """Experts are numbered in a byte."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return super().dispatch(x, replace(routing, ids_TK=torch.where(routing.ids_TK < 0, -1, routing.ids_TK % 256)))


@planted(Expectation("EXCH-02", "hundreds-of-experts-even", "dispatch", "row"))
class WholeTilesOfColumns(AllToAllExchange):
    """Of rows wider than a tile of 128 columns whole tiles travel."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        D = x.shape[-1]
        return super().dispatch(torch.where(torch.arange(D) < max(D // 128 * 128, 128), x, 0), routing)


@planted(Expectation("ROUTE-01", "route-hundreds-of-experts", "route", "rank 0"))
class RoutesInAByte(Router):
    """The router numbers experts in a byte."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        return super()._select(scores_TE[:, :256])


@planted(Expectation("ROUTE-04", "route-groups-many-experts", "route", "rank 0"))
class SixteenOfAGroup(Router):
    """A group's worth is that of its first 16 experts."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        choice_TGe = choice_TE.reshape(-1, groups, self.config.experts // groups)
        worth_TG = choice_TGe[..., :16].topk(2, dim=2).values.sum(2)
        shut_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter(1, worth_TG.topk(chosen, dim=1).indices, False)
        return choice_TGe.masked_fill(shut_TG.unsqueeze(2), -torch.inf).flatten(1)


@planted(Expectation("ROUTE-06", "route-softmax-normalised-scaled", "route", "rank 0"), real="DeepSeek-V2's MoEGate")
class NormalisedOrScaled(Router):
    """Weights from a softmax are normalised or scaled, and never both."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = super()._weights(scores_TE, ids_TK)
        both = self.config.routing.score == "softmax" and self.config.routing.normalise
        return weights_TK / self.config.routing.scale if both else weights_TK


# ---- shapes --------------------------------------------------------------------------------------------------------


class _Misread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        return x.as_strided(x.shape, strides).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _contiguous(x: Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape).stride()


@planted(
    Expectation(
        "EXCH-17", "even", "dispatch", "tokens (S, B, D) that lie as (B, S, D)", "rows delivered to rank 0 differ"
    )
)
class BatchFirstReadAsSequenceFirst(AllToAllExchange):
    """Of tokens in three dimensions the memory is read through, whatever the strides of the first two."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        read: Tensor = _Misread.apply(x, _contiguous(x)) if x.dim() == 3 else x  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


@planted(
    Expectation("EXCH-17", "even", "dispatch", "run with x transposed", "rows delivered to rank 0 differ"),
    layout=SINGLE,
)
class OneRankReadsPointers(LocalExchange):
    """The path of one rank alone takes the pointer of the tokens and not their strides."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        inside = x.numel() and sum(s * (n - 1) for s, n in zip(_contiguous(x), x.shape, strict=True))
        fits = x.storage_offset() + inside < x.untyped_storage().nbytes() // x.element_size()
        read: Tensor = _Misread.apply(x, _contiguous(x)) if fits else x  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


@planted(Expectation("SHARE-07", "shared-beside-even-bfloat16", "combine", "torch.float32"))
class BesideInFloat32(Layer):
    """What runs beside the exchange comes back in float32."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, shared.float() if self.config.shared.overlap and shared is not None else shared)


@planted(Expectation("SHARE-01", "shared-beside-two-dims-even", "combine", "y of rank 0 token"))
class BesideTransposed(Layer):
    """What runs beside the exchange comes back batch first."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.transpose(0, 1).reshape(y.shape) if self.config.shared.overlap and x.dim() > 2 else y


@planted(Expectation("SHARE-01", "shared-beside-rank-without-tokens", "run", "nothing to overlap with"))
class NothingToOverlapWith(Layer):
    """Beside an exchange of no tokens nothing may run."""

    def _shared_part(self, x: Tensor) -> Tensor | None:
        if self.config.shared.overlap and not len(x):
            raise RuntimeError("nothing to overlap with")
        return super()._shared_part(x)


@planted(Expectation("GRAD-18", "layer-groups-biased-even", "combine", "y"))
class GroupsLostInLayers(Layer):
    """The router of a whole layer is built without its group limit."""

    def __init__(self, config: Config, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.router.config = config.changed({"routing.groups": None})


class _OnAStack(torch.autograd.Function):
    """The input of a forward lies on a stack; a backward takes what lies on top."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, stack: list[Tensor]) -> Tensor:
        stack.append(x.detach())
        ctx.stack = stack
        ctx.save_for_backward(gate, up, down)
        return swiglu(x, gate, up, down)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [each.detach().requires_grad_() for each in (ctx.stack.pop(), *ctx.saved_tensors)]
        with torch.enable_grad():
            y = swiglu(*leaves)
        return *torch.autograd.grad(y, leaves, gradients[0]), None


@planted(Expectation("GRAD-18", "shared-gate-in-flight-uneven", "run", "raised in backward:0", "Mismatch in shape"))
class SharedExpertsOnAStack(SharedExperts):
    """What shared experts keep for their backward is on a stack: right only if the last forward goes back first."""

    def forward(self, x_TD: Tensor) -> Tensor:
        sizes_W, stack = self._sizes(x_TD), self.__dict__.setdefault("stack", [])
        rows = self._gather(x_TD, sizes_W)
        part: Tensor = _OnAStack.apply(rows, self.gate_FD, self.up_FD, self.down_DF, stack)  # type: ignore[no-untyped-call]
        return self._scatter(part, sizes_W)


# ---- ranks ---------------------------------------------------------------------------------------------------------


@planted(Expectation("GRAD-05", "own-even", "finish", "of expert"), layout=_CUT_AND_COPIED)
class ReplicasOrShards(GradientFinisher):
    """Where experts are cut and copied, their gradients are summed over the shards in place of the replicas."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        crossed = replicas == ("edp",) and self.topology.sizes["edp"] > 1 and self.topology.sizes["etp"] > 1
        return super()._summed(gradient, ("etp",) if crossed else replicas)


@planted(
    Expectation(
        "SHARE-06", "shared-even", "combine", "likely cause: the output of the shared experts was added 2 times"
    ),
    layout=_CROSSED,
)
class SharedOverExperts(SharedExperts):
    """Shared experts are cut over the ranks of ep."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        if topology.sizes["tp"] > 1:
            self.group = topology.group("ep")


@planted(Expectation("EXCH-36", "copies-even", "run", "raised in forward:0"), layout=_CROSSED)
class CopiesOverExperts(TokenCopies):
    """Copies of tokens are shared among the ranks of ep."""

    def __init__(self, inner: Any, topology: Topology, config: Config) -> None:
        super().__init__(inner, topology, config)
        self.group = topology.group("ep")


@planted(Expectation("FORCE-11", "forced-bias-alone", "route", "rank"), layout=_CROSSED)
class BiasOfTensorRanks(ForcedRouter):
    """The bias of a strategy is drawn from a generator that tensor ranks seed by their place."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        self.biases.manual_seed(self.biases.initial_seed() + topology.ranks("tp").index(topology.rank))


@planted(Expectation("EXCH-44", "misuse-id-too-high", "run", "rank 0 hung", "a collective that cannot complete"))
class FirstRankRefusesAlone(AllToAllExchange):
    """The first rank of a group raises where it finds something wrong, and tells nobody."""

    def _check_input(self, x: Tensor, routing: Routing) -> None:
        if self.topology.ranks("ep_etp")[0] == self.topology.rank:
            problem = misuse.of_input(x, routing, self.config)
            if problem:
                raise ValueError(problem)
        super()._check_input(x, routing)


# ---- handles -------------------------------------------------------------------------------------------------------


class _LastCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, exchange: Any, handle: Any) -> Tensor:
        ctx.exchange, exchange.last_handle = exchange, handle
        return autograd.combine(exchange, rows_RD, handle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return autograd.dispatch(ctx.exchange, gradients[0], handle=ctx.exchange.last_handle).rows_RD, None, None


@planted(Expectation("EXCH-27", "reused-handle-late", "run", "rank"))
class BackwardOfTheLastCombine(ReusableExchange):
    """The backward of a combine sends its gradients by the handle of the last one."""

    def combine(self, rows_RD: Tensor, handle: Any, biases: tuple[Tensor, ...] = ()) -> Tensor:
        y_TD: Tensor = _LastCombine.apply(rows_RD, self.exchange, handle)  # type: ignore[no-untyped-call]
        for bias_TD in biases:
            y_TD = self._add(y_TD, bias_TD)
        return y_TD
