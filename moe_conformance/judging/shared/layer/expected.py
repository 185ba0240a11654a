"""Expected results, and their bounds, of a whole layer, from the oracles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.observed.drop_rule import DropRule
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, backward_places_of
from moe_conformance.judging.observed.stage_expected import StageAnswers
from moe_conformance.reference.capacity import drops
from moe_conformance.reference.rounding import whole_layer_magnitudes
from moe_conformance.reference.rounding.whole_layer_magnitudes import Shares
from moe_conformance.reference.routing import routes
from moe_conformance.reference.shared_experts import whole_layer
from moe_conformance.reference.shared_experts.whole_layer import Drop, LayerGradients, Mix, Weighing, mixed
from moe_conformance.workloads.records.workload import ParameterKey, Workload

ROUTED = ("gate", "up", "down")


@dataclass(frozen=True)
class LayerExpected(StageAnswers[LayerGradients]):
    """The oracle's results for a "layer" workload, also of layers that drop."""

    rule: DropRule = field(default_factory=DropRule)  # as claimed
    narrow: torch.dtype | None = None  # the claimed dtype of a part, if narrower than the tokens'
    residual: bool = False  # as claimed: x is added to the output, once

    @classmethod
    def of(cls, reading: Reading, workload: Workload | None = None) -> LayerExpected:
        """Return the results for a reading, with the drop rule and the dtype that the backend claims."""
        expected = super().of(reading, workload).by(DropRule.of(reading.claims)).computed_in(reading.claims.dtype)
        return replace(expected, residual=True) if reading.claims.residual == "yes" else expected

    def by(self, rule: DropRule) -> LayerExpected:
        """Return the results under another drop rule."""
        drops_none = self.workload.config.capacity.factor is None
        return self if drops_none or rule == self.rule else replace(self, rule=rule)

    def computed_in(self, dtype: torch.dtype | None) -> LayerExpected:
        """Return the results with the bounds of a dtype, if it is narrower than that of the tokens."""
        dtype_of_tokens = self.workload.config.dtype
        narrower = dtype is not None and torch.finfo(dtype).eps > torch.finfo(dtype_of_tokens).eps
        return replace(self, narrow=dtype) if narrower and dtype != self.narrow else self

    def y(self, place: Place) -> Target:
        """Return the expected output at a place, (T, D)."""
        m, rank = place
        return self._added(super().y(place), self.workload.batches[m][rank].x_TD)

    def dx(self, place: Place) -> Target:
        """Return the expected gradient of the tokens at a place, (T, D)."""
        m, rank = place
        return self._added(super().dx(place), self.workload.batches[m][rank].upstream)

    def _added(self, target: Target, other_TD: Tensor) -> Target:
        """Return a target plus what the residual adds, with the error of one more addition."""
        if not self.residual:
            return target
        total_TD = target.expected + other_TD.double()
        return Target(total_TD, target.allowed + torch.finfo(self._dtype).eps * total_TD.abs())

    @property
    def _dtype(self) -> torch.dtype:
        return self.narrow or self.workload.config.dtype

    def _allowed(self, error: Tensor, tokens: int = 0) -> Tensor:
        config = self.workload.config
        longest = max(bounds.longest_sum(config), *config.shared.ffn, 0)
        return bounds.allowed(error, self._dtype, addends=longest + tokens)

    def idle(self, stage: int, key: ParameterKey) -> bool:
        """Return whether a parameter belongs to a routed expert without kept slots in microbatches that go backward."""
        name, expert = key
        return name in ROUTED and expert not in self._reached[stage]

    def solve(self, places: Sequence[Place], mix: Mix = mixed, drop: Drop | None = None) -> LayerGradients:
        """Return the oracle's results for some places; with another mix or drop, those of a mistake."""
        return whole_layer.gradients(
            *self._batch(places),
            self.workload.parameters,
            self._weighing,
            weights_at=self.weights_at,
            kept_TK=self._kept(places),
            mix=mix,
            drop=drop or self.rule.after_drop(self.workload.config),
        )

    def ids(self, place: Place) -> Tensor:
        """Return the experts that every token of a place selects, (T, K).

        The workload is drawn so that no selection is nearly a tie.
        """
        config = self.workload.config
        chosen = routes.route(
            self._logits(place),
            top_k=config.top_k,
            score=config.routing.score,
            bias_E=self.workload.parameters.get(("balance_bias", None)),
            groups=config.routing.groups,
            group_score=config.routing.group_score,
        )
        return chosen.ids_TK

    def _logits(self, place: Place) -> Tensor:
        m, rank = place
        return self.workload.batches[m][rank].x_TD.double() @ self.workload.parameters["router", None].double().T

    @cached_property
    def kept(self) -> Mapping[Place, Tensor]:
        """The slots that every token of a place keeps, bool (T, K): all of them where there is no capacity."""
        return {place: self._stay(place) for place in self.places}

    @property
    def _weighing(self) -> Weighing:
        config = self.workload.config
        return Weighing(config.routing.score, config.routing.normalise, config.routing.scale)

    def _batch(self, places: Sequence[Place]) -> tuple[Tensor, Tensor, Tensor]:
        batches = [self.workload.batches[m][rank] for m, rank in places]
        return (
            torch.cat([batch.x_TD for batch in batches]),
            torch.cat([self._chosen[place] for place in places]),
            torch.cat([batch.upstream for batch in batches]),
        )

    @cached_property
    def _chosen(self) -> Mapping[Place, Tensor]:
        return {place: self.ids(place) for place in self.places}

    def _stay(self, place: Place) -> Tensor:
        """Return the slots that are kept under the one legal capacity, bool (T, K).

        The workload is drawn so that the selection has no near ties, every selected weight exceeds its margin (and
        counts as selected), and the last slot that an expert keeps by weight is clearly heavier than the first that it
        drops.
        """
        config, ids_TK = self.workload.config, self._chosen[place]
        if config.capacity.factor is None:
            return torch.ones_like(ids_TK, dtype=torch.bool)
        (room,), policy = self.rule.capacities(config, len(ids_TK)), self.rule.policy(config)
        return drops.keep(ids_TK, config.experts, capacity=room, policy=policy, weights_TK=self._ranked(place))

    def _ranked(self, place: Place) -> Tensor:
        """Return the values by which the policy "weights" orders slots, (T, K)."""
        logits_TE, ids_TK = self._logits(place), self._chosen[place]
        if self.rule.drop_by == "scores":
            return routes.scores(logits_TE, self.workload.config.routing.score).gather(1, ids_TK)
        return routes.weights(logits_TE, ids_TK, **vars(self._weighing))

    def _kept(self, places: Sequence[Place]) -> Tensor:
        return torch.cat([self.kept[place] for place in places])

    @cached_property
    def _reached(self) -> tuple[frozenset[int], ...]:
        found = []
        for ranks in self.stages:
            places = backward_places_of(self.workload, ranks)
            found.append(frozenset(self._batch(places)[1][self._kept(places)].tolist()))
        return tuple(found)

    def _solved(self, places: Sequence[Place]) -> tuple[LayerGradients, LayerGradients]:
        layout, microbatches = self.workload.layout, len({m for m, _ in places})
        replicas = layout.world // layout.pp  # every rank of a stage has its own tokens
        measured = whole_layer_magnitudes.measured_layer(
            *self._batch(places),
            self.workload.parameters,
            self._weighing,
            rounding=bounds.rounding(self._dtype),
            shares=Shares(
                etp=layout.etp,
                tp=layout.tp,
                places=tuple(self._count(place) for place in places),
                expert_sums=bounds.sums_of_a_gradient(microbatches, layout.edp),
                dense_sums=bounds.sums_of_a_gradient(microbatches, replicas),
            ),
            weights_at=self.weights_at,
            kept_TK=self._kept(places),
            renormalise=self.rule.renormalises(self.workload.config),
        )
        return self.solve(places), measured.errors
