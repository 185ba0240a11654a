"""Expected results, and their bounds, of a run with the backend's own experts, from the oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.goldens import stored_values
from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.observed.chunks import solve_in_chunks
from moe_conformance.judging.observed.scopes import Place, backward_places_of
from moe_conformance.judging.observed.stage_expected import StageAnswers
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.exchange.layer import Gradients, WeightsAt
from moe_conformance.reference.experts import Expert, Function, Parameters, function_experts, swiglu_experts
from moe_conformance.reference.rounding.expert_magnitudes import Sharing, function_measured, swiglu_measured
from moe_conformance.reference.rounding.magnitudes import magnitudes
from moe_conformance.workloads.records.workload import Workload

Key = tuple[str, int]  # (name, global expert id)


class ExpertsExpected(StageAnswers[Gradients]):
    """The oracle's results for an "experts" workload."""

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """The pipeline stage of every rank."""
        return {rank: at for at, ranks in enumerate(self.stages) for rank in ranks}

    def dweights(self, place: Place) -> Target:
        """Return the expected gradient of the routing weights at a place, (T, K)."""
        return self._tokens[place][2]

    @cached_property
    def idle(self) -> tuple[frozenset[int], ...]:
        """For every stage, the experts that no token reaches in any microbatch that goes backward."""
        everyone = frozenset(range(self.workload.config.experts))
        return tuple(
            everyone - set(batch_of(self.workload, backward_places_of(self.workload, ranks)).ids_TK.unique().tolist())
            for ranks in self.stages
        )

    def _of_tokens(self, solved: Gradients) -> tuple[Tensor, ...]:
        return solved.y_TD, solved.dx_TD, solved.dweights_TK

    def _solved(self, places: Sequence[Place]) -> tuple[Gradients, Gradients]:
        parameters, weights_at = parameters_of(self.workload), self.weights_at
        layout, rounding = self.workload.layout, bounds.rounding(self.workload.config.dtype)
        build = experts_of(self.workload.config)
        sums = bounds.sums_of_a_gradient(len({m for m, _ in places}), layout.edp)

        def values(batches: Sequence[layer.Batch]) -> Gradients:
            return layer.gradients(*layer.global_batch(batches), build, parameters, weights_at=weights_at)

        def measured(batches: Sequence[layer.Batch]) -> Gradients:
            return magnitudes(
                *layer.global_batch(batches),
                swiglu_measured if build is swiglu_experts else function_measured(function_of(self.workload.config)),
                parameters,
                rounding=rounding,
                sharing=Sharing(layout.etp, [len(batch.x_TD) for batch in batches], sums),
                weights_at=weights_at,
            )

        def errors(batches: Sequence[layer.Batch]) -> Gradients:
            of_all, once = measured(batches), folded(batches)
            # Copies of a token err alike, so that their errors in the gradient of a parameter do not cancel.
            return of_all if len(once) == len(batches) else replace(of_all, parameters=measured(once).parameters)

        batches = batches_of(self.workload, places)
        experts = self.workload.config.experts
        if self.workload.golden:  # of all tokens in their order: there is one stage
            return stored(self.workload.golden, weights_at), solve_in_chunks(batches, experts, errors)
        return solve_in_chunks(batches, experts, values), solve_in_chunks(batches, experts, errors)


def function_of(config: Config) -> Function:
    """Return the activation function of the experts of a config."""
    activation = config.activation
    return Function(activation.function, activation.gated, activation.limit, activation.slope, activation.offset)


def experts_of(config: Config) -> Callable[[Parameters], Expert]:
    """Return the function that builds the experts of a config from parameters."""
    plain = (config.activation, config.expert_biases) == (Config.activation, Config.expert_biases)
    return swiglu_experts if plain else function_experts(function_of(config))


def stored(chapter: str, weights_at: WeightsAt) -> Gradients:
    """Return the golden results of a chapter, for the tokens of all ranks in order.

    Raises:
        GoldenError: the golden is missing or was changed.
    """
    golden = stored_values.read(stored_values.folder(), chapter)
    made = {name.removeprefix(f"{weights_at}/out/"): value for name, value in golden.items()}
    parameters = {(name, e): value for name in ("gate", "up", "down") for e, value in enumerate(made[f"d{name}"])}
    return Gradients(made["y_TD"], made["dx_TD"], made["dweights_TK"], parameters)


def folded(batches: Sequence[layer.Batch]) -> list[layer.Batch]:
    """Put equal batches into one, whose upstream gradient is the sum of theirs."""
    equal: dict[tuple[bytes, ...], list[layer.Batch]] = {}
    for batch in batches:
        equal.setdefault(tuple(part.double().numpy().tobytes() for part in batch), []).append(batch)
    return [copies[0]._replace(dy_TD=len(copies) * copies[0].dy_TD.double()) for copies in equal.values()]


def batches_of(workload: Workload, places: Sequence[Place]) -> list[layer.Batch]:
    """Return the tokens of some places as batches of the oracle."""
    batches = [workload.batches[m][rank] for m, rank in places]
    return [layer.Batch(b.x_TD, b.ids_TK, b.weights_TK, b.upstream) for b in batches]


def batch_of(workload: Workload, places: Sequence[Place]) -> layer.Batch:
    """Return the tokens of some places as one batch of the oracle."""
    return layer.global_batch(batches_of(workload, places))


def parameters_of(workload: Workload) -> Parameters:
    """Return the experts' parameters under the oracle's keys."""
    return {cast(Key, key): value for key, value in workload.parameters.items()}


def solve(
    workload: Workload,
    places: Sequence[Place],
    weights_at: WeightsAt,
    parameters: Parameters | None = None,
    build: Callable[[Parameters], Expert] | None = None,
) -> Gradients:
    """Return the oracle's results for some places, optionally with other parameters or other experts."""
    batch = batch_of(workload, places)
    build = build or experts_of(workload.config)
    return layer.gradients(*batch, build, parameters or parameters_of(workload), weights_at=weights_at)
