"""RULE: bugs in what is refused, and in what is built though it should not be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange
from moe_conformance.backends.native.fused.managers import DeepEPManager
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.contract import Config, Delivery, Routing, Topology
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted

_REFUSES = "refuses packed sequences (T differs between ranks), which it must accept, on rank"


@planted(Expectation("RULE-25", "packed-built", "run", f"an all-to-all {_REFUSES} 0, rank 1", "wants ranks of equal T"))
class WantsEqualTokens(AllToAllExchange):
    """The assertion that is meant for the all-gather dispatcher stands in front of all of them."""

    def __init__(self, config: Config, topology: Topology) -> None:
        if config.padding.packed:
            raise CannotBuild("the dispatcher wants ranks of equal T, and padding.packed=True leaves them uneven")
        super().__init__(config, topology)


@planted(
    Expectation("RULE-25", "packed-built", "run", f"a fused token exchange {_REFUSES} 0, rank 1, rank 2", "fixed"),
    layout=EP2_ETP2,
)
class BufferOfFixedTokens(DeepEPManager):
    """The fused exchange is refused for packed sequences, as if its buffers were for one number of tokens."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        if config.padding.packed:
            raise CannotBuild("buffers hold a fixed number of tokens: not padding.packed=True")
        super().__init__(config, exchange)


@planted(Expectation("RULE-25", "packed-built", "run", "built on rank 0 and refused on rank 1", "padding.packed=True"))
class RefusedBeyondTheFirst(AllGatherExchange):
    """The configuration of an all-gather is checked where the first rank reads it, and there too late."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        if config.padding.packed and topology.rank:
            raise CannotBuild("an all-gather wants equal T: not padding.packed=True")


@planted(Expectation("RULE-25", "packed-sequences-uneven", "dispatch", "rank 0 token 4", "was not delivered to expert"))
class SizedByTheLastRank(AllGatherExchange):
    """An all-gather is built for packed sequences, and every rank brings as many rows as the last rank has tokens."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        P = self._sizes(len(x), x.device)[-1]
        cut = Routing(_resized(routing.ids_TK, P, -1), _resized(routing.weights_TK, P, 0), routing.experts)
        delivery, handle = super().dispatch(_resized(x, P, 0), cut)
        return delivery, (handle, len(x))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        gathered, tokens = handle
        return _resized(super().combine(rows, gathered), tokens, 0)


def _resized(values: Tensor, rows: int, fill: int) -> Tensor:
    """Cut values to that many rows, or fill them up."""
    return F.pad(values[:rows], (0, 0, 0, max(0, rows - len(values))), value=fill)


@planted(
    Expectation("RULE-25", "packed-sequences-uneven", "dispatch", "rank 0 token 8", "was not delivered to expert"),
    layout=EP2_ETP2,
)
class TailThatFillsNoBlock(DeepEPManager):
    """Kernels work on blocks of four tokens, and what is left of the last sequence is sent nowhere."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        whole_T = torch.arange(len(ids_TK), device=ids_TK.device) < len(ids_TK) // 4 * 4
        return super().dispatch(x_TD, torch.where(whole_T[:, None], ids_TK, -1), weights_TK)


class _Back(torch.autograd.Function):
    """Tokens as they are; some of their gradients are changed on the way back."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, changed_T: Tensor, into: float) -> Tensor:
        ctx.changed_T1, ctx.into = changed_T[:, None], into
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.where(ctx.changed_T1, ctx.into, grads[0]), None, None


@planted(Expectation("PACK-14", "packed-sequences-uneven", "gradient", "dx of rank 0 token"))
class EqualPartsOnTheWayBack(AllGatherExchange):
    """Gradients of packed tokens come back in equal parts, and ranks with more tokens have zeros behind theirs."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.config.padding.packed:
            sizes_W = self._sizes(len(x), x.device)
            x = _Back.apply(x, torch.arange(len(x)) >= sum(sizes_W) // len(sizes_W), 0.0)  # type: ignore[no-untyped-call]
        return super().dispatch(x, routing)


@planted(Expectation("PACK-08", "packed-sequences-gaps-uneven", "gradient", "dx of rank 0 token"))
class GradientsInGaps(AllToAllExchange):
    """Memory that nobody wrote is returned as the gradient of the gaps between packed sequences."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.config.padding.packed:
            x = _Back.apply(x, (routing.ids_TK < 0).all(1), 7.0)  # type: ignore[no-untyped-call]
        return super().dispatch(x, routing)
