"""The training of the balance bias of routers: `Config.balance`, a surface, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved, Routed
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Balance:
    """`Config.balance`: the training of the balance bias of routers (`Config.routing.balance_bias`)."""

    # sign: the rate is added to the bias of an expert below the mean load, and subtracted above it; quantile: the bias
    # becomes the one with which every expert would have been selected by its share of the step's tokens
    rule: Literal["sign", "quantile"] = "sign"
    rate: float = 0.001  # step size of "sign"
    recompute: bool = False  # activation recomputation of the router
    layers: int = 1  # routers of the model, one per MoE layer
    dense_layers: int = 0  # layers of the model without a router, before those with one

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "balance.", rate=0, layers=1, dense_layers=0)


class BalancingRouters(Parametrised, Resolved, Protocol):
    """The routers of a model whose balance bias is updated by the load (`Config.balance`), one per MoE layer.

    `named` yields "router" and "balance_bias" with the number of the layer, from 0, in place of an expert id; the
    views stay valid. Microbatches are those of `TrainingRouters`, without losses, and one update ends a step of any
    number of them. It claims `balance_loads`, `balance_counters`, `balance_quantiles` and
    `forced_loads`.
    """

    takes_mask: bool  # whether a padding mask may be passed; if not, no token is padding

    def train(self, mode: bool = True) -> object:
        """Switch between training and evaluation, as `nn.Module` does; what is built is in training."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Return the routing of x (S, B, D) of every layer; the mask, bool (S * B,), is True at padding."""

    def update(self) -> None:
        """Do what the trainer does after the last backward of a step, which updates every bias; collective."""

    def loads(self) -> Sequence[Tensor] | None:
        """Return the load counters of every layer, (E,), since the last update; None if they cannot be read."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves, as `nn.Module` does."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Load what `state_dict` returned, as `nn.Module` does."""

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters that the trainer's optimizer updates."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the routers of a model with a balance bias; collective. It reads routing, capacity and balance."""
        raise Unsupported("this backend offers no router whose balance bias is updated")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # With a capacity, the loads that move a balance bias (BIAS-05). selected: of all slots that a router selected;
    # kept: of those that were not dropped.
    balance_loads: Literal["selected", "kept"] = "selected"
    # The tokens of which quantile balancing takes quantiles (BIAS-12). step: all of the step; parts: of each microbatch
    # and data parallel group, and their mean; estimated: by histogram, which is not judged.
    balance_quantiles: Literal["step", "parts", "estimated"] = "step"
    # What the counters of loads hold between updates (BIAS-04, BIAS-05, BIAS-06). of_rank: the loads of this rank,
    # which the update sums over ranks; of_all: those of all ranks, summed in each forward.
    balance_counters: Literal["of_rank", "of_all"] = "of_rank"


SECTIONS = {"balance": Balance}
