"""What a whole layer must yield, by the oracles, and how far from it an honest one may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.judging import bounds
from moe_conformance.judging.bounded import Target
from moe_conformance.judging.places import Place, backward_places_of
from moe_conformance.judging.stage_answers import StageAnswers
from moe_conformance.workloads.records import ParameterKey
from reference import routing, whole_layer, whole_layer_magnitudes
from reference.whole_layer import LayerGradients, Mix, Weighing, mixed
from reference.whole_layer_magnitudes import Shares

ROUTED = ("gate", "up", "down")


class LayerExpected(StageAnswers[LayerGradients]):
    """The oracle's answer to a "layer" workload."""

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
        (m, rank), config, parameters = place, self.workload.config, self.workload.parameters
        chosen = routing.route(
            self.workload.batches[m][rank].x_TD.double() @ parameters["router", None].double().T,
            top_k=config.top_k,
            score=config.score,
            bias_E=parameters.get(("balance_bias", None)),
            groups=config.groups,
            group_score=config.group_score,
        )
        return chosen.ids_TK

    def y_of(self, place: Place, tokens: Sequence[int], ids_nK: Tensor) -> Target:
        """The output (n, D) of n tokens of a place, were they to choose others, or fewer: ids (n, K), one at least.

        Only for weights that do not depend on who else is chosen: no normalisation, and softmax over all experts.
        """
        (m, rank), workload = place, self.workload
        batch, parameters, layout = workload.batches[m][rank], workload.parameters, workload.layout
        fed = batch.x_TD[tokens], ids_nK, batch.upstream[tokens], parameters, self._weighing
        y_nD = whole_layer.gradients(*fed, weights_at=self.weights_at).y_TD
        measured = whole_layer_magnitudes.measured_layer(
            *fed,
            rounding=bounds.rounding(workload.config.dtype),
            shares=Shares(etp=layout.etp, tp=layout.tp),
            weights_at=self.weights_at,
        )
        return Target(y_nD, self._allowed(measured.errors.y_TD))

    @property
    def _weighing(self) -> Weighing:
        config = self.workload.config
        return Weighing(config.score, config.normalise, config.scale)

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

    @cached_property
    def _reached(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(self._batch(backward_places_of(self.workload, ranks))[1].unique().tolist())
            for ranks in self.stages
        )

    def _solved(self, places: Sequence[Place]) -> tuple[LayerGradients, LayerGradients]:
        layout, microbatches = self.workload.layout, len({m for m, _ in places})
        replicas = layout.world // layout.pp  # every rank of a stage has tokens of its own
        measured = whole_layer_magnitudes.measured_layer(
            *self._batch(places),
            self.workload.parameters,
            self._weighing,
            rounding=bounds.rounding(self.workload.config.dtype),
            shares=Shares(
                etp=layout.etp,
                tp=layout.tp,
                places=tuple(self._count(place) for place in places),
                expert_sums=bounds.sums_of_a_gradient(microbatches, layout.edp),
                dense_sums=bounds.sums_of_a_gradient(microbatches, replicas),
            ),
            weights_at=self.weights_at,
        )
        return self.solve(places), measured.errors
