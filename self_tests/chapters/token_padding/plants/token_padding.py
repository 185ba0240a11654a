"""PACK: bugs in the common token count, in the padding to it, and in how it is cut off again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange
from moe_conformance.backends.native.exchange.token_padding import PaddedExchange, TokenPadding, Untrimmed
from moe_conformance.contract import Config, Delivery, Routing, Topology
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted

# ---- the count -----------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("PACK-01", "padded-counts-64", "dispatch"),
        *("likely cause: the maximum was taken over its ep group", "in its exchange group"),
    ),
    Expectation("PACK-01", "padded-uneven", "dispatch", "its ep group, for the largest token count in forward:0"),
    layout=EP2_ETP2,
    real="NVIDIA/Megatron-LM#4816, review",
)
class LargestOfExpertRanks(TokenPadding):
    """The largest count is taken over ep, and the buffer spans ep and etp."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self.group = topology.group("ep")


@planted(
    Expectation(
        *("PACK-01", "padded-counts-16", "dispatch"),
        *("rank 1 pads 0 tokens to 0 rows instead of 80", "for 5, 0, 70, 3 tokens in its exchange group"),
    ),
    layout=EP2_ETP2,
)
class OwnCountAligned(TokenPadding):
    """Every rank rounds its own count up, and asks nobody."""

    def _largest(self, tokens: int) -> int:
        return tokens


@planted(
    Expectation("PACK-02", "padded-counts-128", "dispatch", "not a multiple of the alignment 128"),
    Expectation(
        *("PACK-01", "padded-counts-16", "dispatch"),
        *("pads 5 tokens to 128 rows instead of 80", "for 5, 0, 70, 3 tokens in its exchange group"),
    ),
    layout=EP2_ETP2,
)
class AlignmentOfItsOwn(TokenPadding):
    """The count is rounded up to the 64 of a kernel, whatever alignment the other parts use."""

    def _aligned(self, rows: int) -> int:
        return -(-rows // 64) * 64


# ---- the rows ------------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "PACK-03", "padded-uneven", "dispatch", "rows of zeros for expert 0", "likely cause: padding tokens were routed"
    ),
    layout=EP2_ETP2,
)
class AddedRowsRouted(PaddedExchange):
    """The ids of added rows are zeros like their tokens, and 0 is an expert."""

    def _pad(self, x_TD: Tensor, routing: Routing, missing: int) -> tuple[Tensor, Routing]:
        x_PD, padded = super()._pad(x_TD, routing, missing)
        return x_PD, Routing(F.pad(routing.ids_TK, (0, 0, 0, missing)), padded.weights_TK, routing.experts)


@planted(Expectation("PACK-04", "padded-uneven", "combine", "zero"), layout=EP2_ETP2)
class CutAtTheWrongEnd(PaddedExchange):
    """The last T rows are returned in place of the first."""

    def _trim(self, y_PD: Tensor, handle: Untrimmed) -> Tensor:
        return y_PD[len(y_PD) - handle.tokens :]


@planted(
    Expectation("PACK-05", "padded-uneven", "gradient", "the gradient of the weights on rank 0", "is None"),
    layout=EP2_ETP2,
)
class PaddedInABuffer(PaddedExchange):
    """The weights are copied into a buffer of P rows, and its gradient goes nowhere."""

    def _pad(self, x_TD: Tensor, routing: Routing, missing: int) -> tuple[Tensor, Routing]:
        buffer_PK = F.pad(routing.weights_TK.detach(), (0, 0, 0, missing)).requires_grad_()
        x_PD, padded = super()._pad(x_TD, routing, missing)
        return x_PD, Routing(padded.ids_TK, buffer_PK, routing.experts)


@planted(
    Expectation("PACK-06", "padded-halves-in-flight-uneven", "combine", "has the shape (4, 32) instead of (9, 32)"),
    layout=EP2_ETP2,
)
class CountKeptOnTheExchange(PaddedExchange):
    """How many tokens there were is kept on the exchange, and the next microbatch overwrites it before the combine."""

    last: Untrimmed | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Untrimmed]:
        delivery, self.last = super().dispatch(x, routing)
        return delivery, self.last

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        assert self.last is not None
        return super().combine(rows, Untrimmed(handle.handle, self.last.tokens, self.last.shape))


# ---- bounds --------------------------------------------------------------------------------------------------------


@planted(Expectation("PACK-11", "bounded-uneven", "dispatch", "for a largest number in forward:0"), layout=EP2_ETP2)
class AsksInSpiteOfTheBound(TokenPadding):
    """The bound is compared with the largest count of the group, which has to be asked for."""

    def _within(self, tokens: int, bound: int) -> int:
        return super()._within(self._largest(tokens), bound)


@planted(
    Expectation(
        *("PACK-11", "padded-counts-bound", "dispatch"),
        *("tokens to 23 rows instead of 24", "for 5, 0, 23, 3 tokens in its exchange group"),
    ),
    layout=EP2_ETP2,
)
class BoundNotAligned(TokenPadding):
    """The bound is taken as it is, and only counts are rounded up."""

    def count(self, tokens: int) -> int:
        return super().count(tokens) if self.bound is None else self._within(tokens, self.bound)


@planted(Expectation("PACK-12", "bound-broken", "run", "hung"), layout=EP2_ETP2)
class BreaksTheBoundAlone(PaddedExchange):
    """A rank with too many tokens raises by itself, and the others wait for its rows."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Untrimmed]:
        self.padding.count(len(routing.ids_TK))
        return super().dispatch(x, routing)


@planted(
    Expectation(
        *("PACK-12", "bound-broken", "dispatch"),
        *("rank 1 has 29 tokens and the bound is 23", "but the step returned on rank"),
    ),
    layout=EP2_ETP2,
)
class TokensBeyondTheBoundLost(PaddedExchange):
    """Tokens beyond the bound are cut off like padding."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Untrimmed]:
        B = self.padding.bound or len(x)
        return super().dispatch(x[:B], Routing(routing.ids_TK[:B], routing.weights_TK[:B], routing.experts))


# ---- without padding -----------------------------------------------------------------------------------------------


@planted(
    Expectation("PACK-13", "uneven", "dispatch", "a largest number in forward:0, before the rows are sent"),
    layout=EP2_ETP2,
)
class AsksThoughSwitchedOff(AllToAllExchange):
    """The largest count is asked for in each dispatch, and used if padding is on."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        collectives.largest(len(routing.ids_TK), self.topology.group("ep_etp"), x.device)
        return super().dispatch(x, routing)


@planted(
    Expectation("PACK-14", "uneven", "combine", "token 8 is zero", "y of rank 1 token 0 is that of rank 0 token 8"),
    layout=EP2_ETP2,
)
class PartsTakenForEqual(AllGatherExchange):
    """The sums are scattered in equal parts, whatever each rank brought."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        everything, W = self._unpermute(rows, handle.permuted), len(handle.sizes_W)
        parts = [sum(handle.sizes_W) // W] * W
        own = collectives.reduce_scatter(everything, parts, self.topology.group("ep_etp"))
        return F.pad(own, (0, 0, 0, handle.shape[0] - len(own)))
