"""What a whole layer must yield, by the oracles, and how far from it an honest one may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.judging import bounds
from moe_conformance.judging.bounded import Target
from moe_conformance.judging.places import Place, backward_places_of, places_of, stages
from moe_conformance.workloads.records import ParameterKey, Workload
from reference import routing, whole_layer, whole_layer_magnitudes
from reference.layer import WeightsAt
from reference.whole_layer import LayerGradients, Mix, Weighing, mixed
from reference.whole_layer_magnitudes import Shares

ROUTED = ("gate", "up", "down")


@dataclass(frozen=True)
class LayerExpected:
    """The oracle's answer to a "layer" workload, and the bounds around it. All computed at first use and kept."""

    workload: Workload
    weights_at: WeightsAt
    divisor: int  # of finished gradients: 1 where they are summed, dp * cp where they are averaged

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline stage."""
        return stages(self.workload.layout)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places."""
        return places_of(self.workload, range(self.workload.layout.world))

    def y(self, place: Place) -> Target:
        """The output (T, D) at a place."""
        return self._tokens[place][0]

    def dx(self, place: Place) -> Target:
        """The gradient of the tokens (T, D) at a place."""
        return self._tokens[place][1]

    def parameter(self, stage: int, key: ParameterKey) -> Target:
        """The finished gradient of a whole parameter, over the tokens of its stage that go backward."""
        return self._parameters[stage][key]

    def idle(self, stage: int, key: ParameterKey) -> bool:
        """Whether a parameter is a routed expert's that no token of the stage reaches on its way backward."""
        name, expert = key
        return name in ROUTED and expert not in self._reached[stage]

    def solve(self, places: Sequence[Place], mix: Mix = mixed) -> LayerGradients:
        """Ask the oracle about the tokens of some places; with another mix, what a mistake would yield."""
        x_TD, ids_TK, dy_TD = self._batch(places)
        return whole_layer.gradients(
            x_TD, ids_TK, dy_TD, self.workload.parameters, self._weighing, weights_at=self.weights_at, mix=mix
        )

    def ids(self, place: Place) -> Tensor:
        """Whom every token of a place chooses, (T, K): clearly, as the workload is drawn that way."""
        config, parameters = self.workload.config, self.workload.parameters
        chosen = routing.route(
            self._x(place).double() @ parameters["router", None].double().T,
            top_k=config.top_k,
            score=config.score,
            bias_E=parameters.get(("balance_bias", None)),
            groups=config.groups,
            group_score=config.group_score,
        )
        return chosen.ids_TK

    @property
    def _weighing(self) -> Weighing:
        config = self.workload.config
        return Weighing(config.score, config.normalise, config.scale)

    def _x(self, place: Place) -> Tensor:
        m, rank = place
        return self.workload.batches[m][rank].x_TD

    def _batch(self, places: Sequence[Place]) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.cat([self._x(place) for place in places]),
            torch.cat([self._chosen[place] for place in places]),
            torch.cat([self.workload.batches[m][rank].upstream for m, rank in places]),
        )

    @cached_property
    def _chosen(self) -> Mapping[Place, Tensor]:
        return {place: self.ids(place) for place in self.places}

    @cached_property
    def _reached(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(self._batch(backward_places_of(self.workload, ranks))[1].unique().tolist())
            for ranks in self.stages
        )

    def _solved(self, places: Sequence[Place]) -> tuple[LayerGradients, LayerGradients]:
        """Return values and errors of the tokens of some places of one stage."""
        workload, layout = self.workload, self.workload.layout
        x_TD, ids_TK, dy_TD = self._batch(places)
        microbatches = len({m for m, _ in places})
        replicas = layout.world // layout.pp  # every rank of a stage has tokens of its own
        shares = Shares(
            etp=layout.etp,
            tp=layout.tp,
            places=tuple(len(self._x(place)) for place in places),
            expert_sums=bounds.sums_of_a_gradient(microbatches, layout.edp),
            dense_sums=bounds.sums_of_a_gradient(microbatches, replicas),
        )
        errors = whole_layer_magnitudes.magnitudes(
            x_TD,
            ids_TK,
            dy_TD,
            workload.parameters,
            self._weighing,
            rounding=bounds.rounding(workload.config.dtype),
            shares=shares,
            weights_at=self.weights_at,
        )
        return self.solve(places), errors

    @cached_property
    def _results(self) -> tuple[tuple[LayerGradients, LayerGradients], ...]:
        return tuple(self._solved(places_of(self.workload, ranks)) for ranks in self.stages)

    @cached_property
    def _backward_results(self) -> tuple[tuple[LayerGradients, LayerGradients], ...]:
        if all(map(self.workload.goes_backward, range(len(self.workload.batches)))):
            return self._results
        return tuple(self._solved(backward_places_of(self.workload, ranks)) for ranks in self.stages)

    @cached_property
    def _tokens(self) -> dict[Place, tuple[Target, Target]]:
        found = {}
        for ranks, (values, errors) in zip(self.stages, self._results, strict=True):
            start = 0
            for place in places_of(self.workload, ranks):
                rows = slice(start, start + len(self._x(place)))
                start = rows.stop
                found[place] = (
                    Target(values.y_TD[rows], self._allowed(errors.y_TD[rows])),
                    Target(values.dx_TD[rows], self._allowed(errors.dx_TD[rows])),
                )
        return found

    @cached_property
    def _parameters(self) -> tuple[dict[ParameterKey, Target], ...]:
        found = []
        for ranks, (values, errors) in zip(self.stages, self._backward_results, strict=True):
            tokens = sum(len(self._x(place)) for place in backward_places_of(self.workload, ranks))
            found.append(
                {
                    key: Target(value / self.divisor, self._allowed(errors.parameters[key], tokens) / self.divisor)
                    for key, value in values.parameters.items()
                }
            )
        return tuple(found)

    def _allowed(self, error: Tensor, tokens: int = 0) -> Tensor:
        config = self.workload.config
        longest = max(bounds.longest_sum(config), *config.shared_ffn, 0)
        return bounds.allowed(error, config.dtype, addends=longest + tokens)


def expect_layer(workload: Workload, weights_at: str, loss_convention: str) -> LayerExpected:
    """Make the expectation from the workload and from what the session says of itself (see `RankOutcome`)."""
    layout = workload.layout
    divisor = layout.dp * layout.cp if loss_convention == "mean_over_dp" else 1
    return LayerExpected(workload, "input" if weights_at == "input" else "output", divisor)
