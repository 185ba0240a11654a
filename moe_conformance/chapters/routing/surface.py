"""Routing options, routers of a new model and router replay: sections, surfaces, claims. Import from `contract`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved, Routed
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config

Strategy = Literal["random", "biased", "round_robin", "worst_rank", "one_expert", "one_node", "alternating", "ratio"]


@dataclass(frozen=True)
class RoutingOptions:
    """`Config.routing`: scores, selection and weights. Read by routers and layers."""

    score: Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"] = "softmax"
    # softmax_topk: the K largest logits are selected, and the softmax is over them alone. A router that selects by the
    # softmax over all experts and normalises is "softmax" with `normalise`: it cannot tell apart what underflows there.
    normalise: bool = False  # the K weights of a token are divided by their sum
    scale: float = 1.0  # multiplies the weights, after normalisation
    groups: tuple[int, int] | None = None  # group-limited routing: (number of expert groups, groups selected)
    group_score: Literal["top2_sum", "topk_sum", "max"] = "top2_sum"  # topk_sum: of the K / (groups selected) best
    balance_bias: bool = False  # expert bias: added to the scores for the selection only, not for the weights
    # Forced routing: strategies in place of the router's scores, each with its parameter; two are refused. Random and
    # biased (parameter: standard deviation; negative: one bias is kept) replace the logits, all others the expert ids.
    # one_node has the number of expert parallel ranks of a node; ratio that of the hot rank's load over another's.
    forced: tuple[tuple[Strategy, float | None], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "routing.")


@dataclass(frozen=True)
class Replay:
    """`Config.replay`: router replay, in which the routers of a model use recorded experts."""

    layers: tuple[int, ...] = (0,)  # numbers, ascending, of the layers of the model that have a router
    recompute: bool = False  # activation recomputation of the router

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "replay.", layers=0)


class ReplayRouters(Parametrised, Resolved, Protocol):
    """The routers of a model with router replay (`Config.replay`), one per MoE layer.

    `named` yields "router" and so on with the number of the layer in the model in place of an expert id. A place is
    the number of a layer in the model and that of a microbatch; several microbatches may be in flight. x is (S, B, D).
    """

    def record(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Return the routing of x of every layer as without replay, and record the experts that are selected."""

    def records(self) -> Mapping[tuple[int, int], Tensor]:
        """Return the recorded ids (T, K) by place."""

    def load(self, records: Mapping[tuple[int, int], Tensor]) -> None:
        """Set the records that are replayed, in place of earlier ones."""

    def replay(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Return the routing of x of every layer to the recorded experts, weighed by the present logits.

        Raise where there is no record of its place, or one of another T or K.
        """


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def initial_router(self, config: Config) -> Parametrised:
        """Build a router with the parameters of a new model, as a trainer does; collective.

        Generators of the process have been seeded alike on all ranks, as trainers do; seeding is left to the adapter
        where the backend needs more. No call follows: the parameters are read.
        """
        raise Unsupported("this backend offers no router with the parameters of a new model")

    def replay_routers(self, config: Config) -> ReplayRouters:
        """Build the routers of a model with router replay; collective. It reads routing and replay."""
        raise Unsupported("this backend offers no router that replays recorded experts")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # A router adds noise while it trains (ROUTE-01, ROUTE-02). training: the built surface has a method `train(mode)`,
    # as `nn.Module` has, and the suite calls `train(False)` before it runs anything: without noise all checks hold.
    noise: Literal["no", "training"] = "no"
    # The weight of the one slot of a token, K = 1, under `routing.normalise` (ROUTE-02, ROUTE-05). one: it is 1, times
    # the scale, and has no gradient; score: it is the score, as without normalisation, so that it trains the router:
    # the gate of Switch Transformers, and libraries that divide by the sum only where K > 1.
    top_1: Literal["one", "score"] = "one"


SECTIONS = {"routing": RoutingOptions, "replay": Replay}
