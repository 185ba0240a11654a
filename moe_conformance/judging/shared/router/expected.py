"""Expected results, and their bounds, of a router for the experts that it selected, from the oracles.

The selection is that of the backend and is judged separately. Routers may compute in the tokens' dtype or in a wider
one; the bounds are those of the tokens' dtype, except in `WideExpected`.
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
from moe_conformance.reference.routing import routes, selection
from moe_conformance.reference.routing.selection import GroupScore
from moe_conformance.workloads.records.workload import ParameterKey, Workload

ROUTER: ParameterKey = ("router", None)
GATE_BIAS: ParameterKey = ("gate_bias", None)
Weigh = Callable[[Tensor, Tensor], Tensor]  # (logits (T, E), ids (T, K)) -> weights (T, K)


class Weighing(TypedDict):
    """How scores become weights, with the oracle's argument names."""

    score: routes.Score
    normalise: bool
    scale: float


class Limit(TypedDict):
    """The groups of experts that a token may select from, with the oracle's argument names."""

    groups: tuple[int, int] | None
    group_score: GroupScore


@dataclass(frozen=True)
class RouterExpected:
    """The oracle's results for a "route" workload and the backend's selection, computed at first use and kept."""

    workload: Workload
    ids: Mapping[Place, Tensor]  # int64 (T, K), K different experts in every row
    divisor: int  # of the finished gradient: 1 where it is summed, dp * cp where it is averaged

    @property
    def weighing(self) -> Weighing:
        """The arguments by which scores become weights."""
        config = self.workload.config
        return {"score": config.routing.score, "normalise": config.routing.normalise, "scale": config.routing.scale}

    @property
    def limit(self) -> Limit:
        """The arguments of the group limit."""
        return {"groups": self.workload.config.routing.groups, "group_score": self.workload.config.routing.group_score}

    @property
    def router_ED(self) -> Tensor:
        """The router's weight, (E, D)."""
        return self.workload.parameters[ROUTER]

    @property
    def gate_bias_E(self) -> Tensor | None:
        """The bias of the logits, or None."""
        return self.workload.parameters.get(GATE_BIAS)

    @property
    def bias_E(self) -> Tensor | None:
        """The expert bias, or None."""
        return self.workload.parameters.get(("balance_bias", None))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which a correct router may compute."""
        return self.workload.config.dtype

    def logits(self, place: Place) -> Tensor:
        """Return the logits of the tokens at a place, float64 (T, E)."""
        return routes.logits(self._x(place), self.router_ED, self.gate_bias_E)

    def selection_scores(self, place: Place, bias_E: Tensor | None) -> Tensor:
        """Return the scores by which experts are selected, with a bias or none, float64 (T, E)."""
        return routes.selection_scores(self.logits(place), score=self.weighing["score"], bias_E=bias_E)

    def choice(self, place: Place) -> Tensor:
        """Return the experts that the oracle selects, int64 (T, K)."""
        scores_TE = self.selection_scores(place, self.bias_E)
        return selection.select(scores_TE, top_k=self.workload.config.top_k, **self.limit)

    def doubt(self, place: Place) -> Tensor:
        """Return how far below zero the margin of a correct choice may be, (T,).

        It is twice the largest error of the selection scores of a token: see `reference.routing.selection.margins`.
        """
        return self._doubts[place]

    def legal(self, place: Place, scores_TE: Tensor | None = None, limit: Limit | None = None) -> Tensor:
        """Return whether each token's choice is legal within rounding, bool (T,), by default for the right scores."""
        if scores_TE is None and limit is None:
            return self._legal[place]
        if scores_TE is None:
            scores_TE = self.selection_scores(place, self.bias_E)
        margin_T = selection.margins(scores_TE, self.ids[place], **(limit or self.limit))
        return margin_T >= -self.doubt(place)

    def weights(self, place: Place) -> Target:
        """Return the expected weights of the selected experts, (T, K)."""
        return Target(self.weigh(self.logits(place), self.ids[place]), self._allowed_weights[place])

    def dx(self, place: Place) -> Target:
        """Return the expected gradient of the tokens, (T, D)."""
        return Target(self._dx[place], self._allowed_dx[place])

    def gradient(self, stage: int, key: ParameterKey = ROUTER) -> Target:
        """Return the expected finished gradient of the router (E, D), or of its gate bias (E,).

        It is over all tokens of a pipeline stage, and divided where gradients are averaged.
        """
        places = self.stage_places(stage)
        microbatches = len({m for m, _ in places})
        x_TD, ids_TK, dweights_TK = self._batch(places)
        replicas = len(stages(self.workload.layout)[stage])  # every rank of the stage has its own tokens
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
        return Target(*(self.part(side, key) / self.divisor for side in both))

    def part(self, of_weight: Tensor, key: ParameterKey) -> Tensor:
        """Return the part of `_weight` that belongs to a parameter: (E, D) of the router, (E,) of the gate bias."""
        return of_weight[:, : self.workload.config.hidden] if key == ROUTER else of_weight[:, -1]

    def upstream(self, place: Place) -> Tensor:
        """Return the gradient of the loss with respect to the selected experts' weights, (T, K)."""
        m, rank = place
        return self.workload.batches[m][rank].upstream.gather(1, self.ids[place])

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the weights (T, K) of a choice, differentiable in the logits (T, E)."""
        return routes.weights(logits_TE, ids_TK, **self.weighing)

    def solve(self, places: Sequence[Place], weigh: Weigh | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradients of the tokens of some places, (T, D), and of the router over them, (E, D).

        `weigh` is another rule by which scores become weights. With a gate bias both have one more column, see
        `_tokens`.
        """
        x_TD, ids_TK, dweights_TK = self._batch(places)
        x, router = (value.double().clone().requires_grad_() for value in (x_TD, self._weight))
        weights_TK = (weigh or self.weigh)(routes.logits(x, router), ids_TK)
        dx, drouter = torch.autograd.grad(weights_TK, [x, router], dweights_TK.double())
        return dx, drouter

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places of the workload."""
        return places_of(self.workload, range(self.workload.layout.world))

    def stage_places(self, stage: int) -> tuple[Place, ...]:
        """Return the places of a pipeline stage that are in the router's gradient."""
        return backward_places_of(self.workload, stages(self.workload.layout)[stage])

    # ---- computed for all places at once, as no token's result depends on another token

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
        """The router's weight and, as one more column, the gate bias if there is one; see `_tokens`."""
        if self.gate_bias_E is None:
            return self.router_ED
        return torch.cat([self.router_ED, self.gate_bias_E[:, None]], dim=1)

    def _tokens(self, places: Sequence[Place]) -> Tensor:
        """Return the tokens of some places, with a column of ones if there is a gate bias: one product has both."""
        x_TD = torch.cat([self._x(place) for place in places])
        return x_TD if self.gate_bias_E is None else torch.cat([x_TD, torch.ones_like(x_TD[:, :1])], dim=1)

    def _batch(self, places: Sequence[Place]) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._tokens(places),
            torch.cat([self.ids[place] for place in places]),
            torch.cat([self.upstream(place) for place in places]),
        )

    def _forced(self, places: Sequence[Place]) -> Measured | None:
        """Return the logits that replace the router's own, or None; see `ForcedExpected`."""
        del places
        return None

    def _summed(self, places: Sequence[Place]) -> Tensor | None:
        """Return the slots (T, K) in the sum that divides weights, None for all; see `token_drops.Drops`."""
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
    """The oracle's values for a router that computes in `Config.router_dtype`; gradients are not bounded."""

    @property
    def dtype(self) -> torch.dtype:
        """The configured router dtype, or the dtype of the tokens if that is wider."""
        config = self.workload.config
        return torch.promote_types(config.dtype, config.router_dtype or config.dtype)

    def logits_target(self, place: Place) -> Target:
        """Return the expected logits of all experts, (T, E)."""
        return Target(self.logits(place), self._allowed_logits[place])

    @cached_property
    def _allowed_logits(self) -> Mapping[Place, Tensor]:
        return self._by_place(self._allowed(self._logits_measured))


@dataclass(frozen=True)
class ForcedExpected(RouterExpected):
    """The oracle's results where a strategy replaced the router's logits by those that the backend returns."""

    forced: Mapping[Place, Tensor]  # (T, E)

    def logits(self, place: Place) -> Tensor:
        """Return the forced logits of the tokens at a place, float64 (T, E)."""
        return self.forced[place].double()

    def solve(self, places: Sequence[Place], weigh: Weigh | None = None) -> tuple[Tensor, Tensor]:
        """Return gradients as `RouterExpected.solve`, with the forced logits' gradient passed to the router's own."""
        rule = weigh or self.weigh
        forced_TE = self._of_all(places)
        return super().solve(places, lambda logits_TE, ids_TK: rule(straight_through(logits_TE, forced_TE), ids_TK))

    def _forced(self, places: Sequence[Place]) -> Measured:
        return exact(self._of_all(places))

    @cached_property
    def _logits_measured(self) -> Measured:
        return exact(self._of_all(self.places))

    def _of_all(self, places: Sequence[Place]) -> Tensor:
        return torch.cat([self.forced[place] for place in places])
