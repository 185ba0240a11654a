"""What a router must yield, by the oracles, for the selection that it made; and how far from it a correct one may be.

Routers compute in the tokens' dtype or in a wider one; the bounds are those of the tokens' dtype, except in
`WideExpected`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import torch
from torch import Tensor

from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.observed.scopes import Place, backward_places_of, places_of, stages
from moe_conformance.reference.forcing.scores import straight_through
from moe_conformance.reference.rounding.errors import Measured, Rounding, exact
from moe_conformance.reference.rounding.routing_magnitudes import (
    gradients_measured,
    logits_measured,
    scores_measured,
    selection_scores_measured,
    weights_measured,
)
from moe_conformance.reference.routing import gate, routes, selection
from moe_conformance.reference.routing.selection import GroupScore
from moe_conformance.workloads.records.workload import ParameterKey, Workload

ROUTER: ParameterKey = ("router", None)
GATE_BIAS: ParameterKey = ("gate_bias", None)
Weigh = Callable[[Tensor, Tensor], Tensor]  # (logits (T, E), ids (T, K)) -> weights (T, K)


class Weighing(TypedDict):
    """How scores become weights, under the oracle's names."""

    score: routes.Score
    normalise: bool
    scale: float


class Limit(TypedDict):
    """Which groups of experts a token may select from, under the oracle's names."""

    groups: tuple[int, int] | None
    group_score: GroupScore


@dataclass(frozen=True)
class RouterExpected:
    """The oracle's answer to a "route" workload, given what was selected. All computed at first use and kept."""

    workload: Workload
    ids: Mapping[Place, Tensor]  # int64 (T, K), K different experts in every row
    divisor: int  # of the finished gradient: 1 where it is summed, dp * cp where it is averaged

    @property
    def weighing(self) -> Weighing:
        """How scores become weights."""
        config = self.workload.config
        return {"score": config.routing.score, "normalise": config.routing.normalise, "scale": config.routing.scale}

    @property
    def limit(self) -> Limit:
        """Which groups are open."""
        return {"groups": self.workload.config.routing.groups, "group_score": self.workload.config.routing.group_score}

    @property
    def router_ED(self) -> Tensor:
        """The router's weight."""
        return self.workload.parameters[ROUTER]

    @property
    def gate_bias_E(self) -> Tensor | None:
        """The bias of the logits, if there is one."""
        return self.workload.parameters.get(GATE_BIAS)

    @property
    def bias_E(self) -> Tensor | None:
        """The expert bias, if there is one."""
        return self.workload.parameters.get(("balance_bias", None))

    @property
    def dtype(self) -> torch.dtype:
        """In which a correct router may compute."""
        return self.workload.config.dtype

    def logits(self, place: Place) -> Tensor:
        """The logits of the tokens at a place, float64 (T, E)."""
        return gate.logits(self._x(place), self.router_ED, self.gate_bias_E)

    def selection_scores(self, place: Place, bias_E: Tensor | None) -> Tensor:
        """By what experts are selected, with some bias or none, float64 (T, E)."""
        return routes.selection_scores(self.logits(place), score=self.weighing["score"], bias_E=bias_E)

    def choice(self, place: Place) -> Tensor:
        """What the oracle selects, int64 (T, K)."""
        scores_TE = self.selection_scores(place, self.bias_E)
        return selection.select(scores_TE, top_k=self.workload.config.top_k, **self.limit)

    def doubt(self, place: Place) -> Tensor:
        """How far below zero the margin of a correct choice may lie, (T,).

        Twice what the selection score of any of the token's experts may err by: `reference.routing.selection.margins`.
        """
        return self._doubts[place]

    def legal(self, place: Place, scores_TE: Tensor | None = None, limit: Limit | None = None) -> Tensor:
        """Whether each token's choice is legal within rounding, bool (T,), by other scores or groups too."""
        if scores_TE is None and limit is None:
            return self._legal[place]
        if scores_TE is None:
            scores_TE = self.selection_scores(place, self.bias_E)
        margin_T = selection.margins(scores_TE, self.ids[place], **(limit or self.limit))
        return margin_T >= -self.doubt(place)

    def weights(self, place: Place) -> Target:
        """The weights of what was selected, (T, K)."""
        return Target(self.weigh(self.logits(place), self.ids[place]), self._allowed_weights[place])

    def dx(self, place: Place) -> Target:
        """The gradient of the tokens, (T, D)."""
        return Target(self._dx[place], self._allowed_dx[place])

    def gradient(self, stage: int, key: ParameterKey = ROUTER) -> Target:
        """The finished gradient of the router (E, D), or of its gate bias (E,).

        Over all tokens of a pipeline stage, divided where averaged.
        """
        places = self.stage_places(stage)
        microbatches = len({m for m, _ in places})
        x_TD, ids_TK, dweights_TK = self._batch(places)
        replicas = len(stages(self.workload.layout)[stage])  # every rank of the stage has tokens of its own
        _, measured = gradients_measured(
            self._rounding,
            x_TD,
            self._weight,
            ids_TK,
            dweights_TK,
            **self.weighing,
            places=[len(self._x(place)) for place in places],
            sums=bounds.sums_of_a_gradient(microbatches, replicas),
            forced_TE=self._forced(places),
            kept_TK=self._summed(places),
        )
        both = self.solve(places)[1], self._allowed(measured, tokens=len(x_TD))
        return Target(*(self.part(each, key) / self.divisor for each in both))

    def part(self, of_weight: Tensor, key: ParameterKey) -> Tensor:
        """Take the part of a parameter from what belongs to `_weight`: (E, D) of the router, (E,) of the gate bias."""
        return of_weight[:, : self.workload.config.hidden] if key == ROUTER else of_weight[:, -1]

    def upstream(self, place: Place) -> Tensor:
        """The gradient of the loss in the weights of what was selected, (T, K)."""
        m, rank = place
        return self.workload.batches[m][rank].upstream.gather(1, self.ids[place])

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Weigh a choice, (T, E) and (T, K) -> (T, K), differentiable in the logits."""
        return routes.weights(logits_TE, ids_TK, **self.weighing)

    def solve(self, places: Sequence[Place], weigh: Weigh | None = None) -> tuple[Tensor, Tensor]:
        """Ask the oracle for the gradients (T, D) of the tokens of some places and (E, D) of the router over these.

        By another rule of weighing, if one is given. With a gate bias both have a column more, see `_tokens`.
        """
        x_TD, ids_TK, dweights_TK = self._batch(places)
        x, router = (value.double().clone().requires_grad_() for value in (x_TD, self._weight))
        weights_TK = (weigh or self.weigh)(gate.logits(x, router), ids_TK)
        dx, drouter = torch.autograd.grad(weights_TK, [x, router], dweights_TK.double())
        return dx, drouter

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places."""
        return places_of(self.workload, range(self.workload.layout.world))

    def stage_places(self, stage: int) -> tuple[Place, ...]:
        """The places of a pipeline stage that are in the router's gradient."""
        return backward_places_of(self.workload, stages(self.workload.layout)[stage])

    # ---- of all places at once, as no token's result depends on another token

    @cached_property
    def _doubts(self) -> Mapping[Place, Tensor]:
        scores_TE = scores_measured(self._rounding, self._logits_measured, self.weighing["score"])
        scores_TE = selection_scores_measured(self._rounding, scores_TE, self.bias_E)
        return self._by_place(2 * self._allowed(scores_TE).max(1).values)

    @cached_property
    def _legal(self) -> Mapping[Place, Tensor]:
        return {place: self.legal(place, self.selection_scores(place, self.bias_E)) for place in self.places}

    @cached_property
    def _allowed_weights(self) -> Mapping[Place, Tensor]:
        _, ids_TK, _ = self._batch(self.places)
        summed_TK = self._summed(self.places)
        measured = weights_measured(self._rounding, self._logits_measured, ids_TK, **self.weighing, kept_TK=summed_TK)
        return self._by_place(self._allowed(measured))

    @cached_property
    def _dx(self) -> Mapping[Place, Tensor]:
        return self._by_place(self.solve(self.places)[0][:, : self.workload.config.hidden])

    @cached_property
    def _allowed_dx(self) -> Mapping[Place, Tensor]:
        x_TD, ids_TK, dweights_TK = self._batch(self.places)
        forced_TE = self._forced(self.places)
        measured, _ = gradients_measured(
            self._rounding,
            x_TD,
            self._weight,
            ids_TK,
            dweights_TK,
            **self.weighing,
            forced_TE=forced_TE,
            kept_TK=self._summed(self.places),
        )
        return self._by_place(self._allowed(measured)[:, : self.workload.config.hidden])

    def _by_place(self, of_all: Tensor) -> Mapping[Place, Tensor]:
        return dict(zip(self.places, of_all.split([len(self._x(place)) for place in self.places]), strict=True))

    def _x(self, place: Place) -> Tensor:
        m, rank = place
        return self.workload.batches[m][rank].x_TD

    @property
    def _weight(self) -> Tensor:
        """The router's weight and, as one column more, the gate bias if there is one; see `_tokens`."""
        if self.gate_bias_E is None:
            return self.router_ED
        return torch.cat([self.router_ED, self.gate_bias_E[:, None]], dim=1)

    def _tokens(self, places: Sequence[Place]) -> Tensor:
        """The tokens of some places, with a column of ones where there is a gate bias: one product has both."""
        x_TD = torch.cat([self._x(place) for place in places])
        return x_TD if self.gate_bias_E is None else torch.cat([x_TD, torch.ones_like(x_TD[:, :1])], dim=1)

    def _batch(self, places: Sequence[Place]) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._tokens(places),
            torch.cat([self.ids[place] for place in places]),
            torch.cat([self.upstream(place) for place in places]),
        )

    def _forced(self, places: Sequence[Place]) -> Measured | None:
        """The logits that take the place of the router's own; see `ForcedExpected`."""
        del places
        return None

    def _summed(self, places: Sequence[Place]) -> Tensor | None:
        """Which slots are in the sum that weights are divided by, (T, K), if not all; see `token_drops.Drops`."""
        del places
        return None

    @property
    def _rounding(self) -> Rounding:
        return bounds.rounding(self.dtype)

    @cached_property
    def _logits_measured(self) -> Measured:
        return logits_measured(self._rounding, self._tokens(self.places), self._weight)

    def _allowed(self, measured: Measured, tokens: int = 0) -> Tensor:
        config = self.workload.config
        return bounds.allowed(measured.error, self.dtype, addends=bounds.longest_sum(config) + tokens)


@dataclass(frozen=True)
class WideExpected(RouterExpected):
    """The oracle's answer to a router that is asked to compute in `Config.router_dtype`: values, no gradients."""

    @property
    def dtype(self) -> torch.dtype:
        """What is asked for, or the dtype of the tokens if that is wider."""
        config = self.workload.config
        return torch.promote_types(config.dtype, config.router_dtype or config.dtype)

    def logits_target(self, place: Place) -> Target:
        """The logits of all experts, (T, E)."""
        return Target(self.logits(place), self._allowed_logits[place])

    @cached_property
    def _allowed_logits(self) -> Mapping[Place, Tensor]:
        return self._by_place(self._allowed(self._logits_measured))


@dataclass(frozen=True)
class ForcedExpected(RouterExpected):
    """The oracle's answer where a strategy put logits, as the backend tells them, in the place of the router's own."""

    forced: Mapping[Place, Tensor]  # (T, E)

    def logits(self, place: Place) -> Tensor:
        """The forced ones."""
        return self.forced[place].double()

    def solve(self, places: Sequence[Place], weigh: Weigh | None = None) -> tuple[Tensor, Tensor]:
        """Ask for gradients as before, where that of the forced logits goes straight through to the router's own."""
        rule = weigh or self.weigh
        forced_TE = self._of_all(places)
        return super().solve(places, lambda own_TE, ids_TK: rule(straight_through(own_TE, forced_TE), ids_TK))

    def _forced(self, places: Sequence[Place]) -> Measured:
        return exact(self._of_all(places))

    @cached_property
    def _logits_measured(self) -> Measured:
        return exact(self._of_all(self.places))

    def _of_all(self, places: Sequence[Place]) -> Tensor:
        return torch.cat([self.forced[place] for place in places])
