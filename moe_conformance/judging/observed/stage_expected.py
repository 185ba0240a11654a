"""Expected results, and their bounds, of a run with the backend's own parameters, stage by stage.

A pipeline stage has its own batch and parameters, so the oracles are called once per stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.observed.finished_gradients import divisor_of
from moe_conformance.judging.observed.probe_expected import Drawn
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, backward_places_of, places_of, stages
from moe_conformance.reference.exchange.layer import WeightsAt
from moe_conformance.workloads.records.workload import ParameterKey, Workload


class Solved(Protocol):
    """The results of an oracle: values, or errors of them."""

    @property
    def y_TD(self) -> Tensor:
        """The output y, (T, D)."""

    @property
    def dx_TD(self) -> Tensor:
        """The gradient of the tokens, (T, D)."""

    @property
    def parameters(self) -> Mapping[Any, Tensor]:
        """The gradient of every parameter."""


S = TypeVar("S", bound=Solved)

_LARGE = 100_000  # elements of all parameters


@dataclass(frozen=True)
class StageAnswers(ABC, Generic[S]):
    """The oracle's results for a workload, and their bounds. All are computed at first use and kept."""

    workload: Workload
    weights_at: WeightsAt
    divisor: int  # of finished gradients, as `divisor_of` has it

    @classmethod
    def of_session(cls, workload: Workload, weights_at: str, loss_convention: str) -> Self:
        """Return the cached results for a workload and for the `weights_at` and `loss_convention` of a session.

        All variants of a backend run the same workloads with the same expected results.
        """
        place: WeightsAt = "input" if weights_at == "input" else "output"
        elements = sum(value.numel() for value in workload.parameters.values())
        kept = _small if elements <= _LARGE else _large
        return cast(Self, kept(cls, Drawn(workload), place, divisor_of(workload, loss_convention)))

    @classmethod
    def of(cls, reading: Reading, workload: Workload | None = None) -> Self:
        """Return the results for a reading: of its workload, or of another workload with the same session."""
        first = reading.ranks[0]  # what a session reports is the same on every rank
        return cls.of_session(workload or reading.outcome.workload, first.weights_at, first.loss_convention)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline stage."""
        return stages(self.workload.layout)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places of the workload."""
        return places_of(self.workload, range(self.workload.layout.world))

    def y(self, place: Place) -> Target:
        """Return the expected output at a place, (T, D)."""
        return self._tokens[place][0]

    def dx(self, place: Place) -> Target:
        """Return the expected gradient of the tokens at a place, (T, D)."""
        return self._tokens[place][1]

    def parameter(self, stage: int, key: ParameterKey) -> Target:
        """Return the expected finished gradient of a whole parameter, summed or averaged over the stage's tokens.

        Only microbatches that go backward count.
        """
        return self._parameters[stage][key]

    @abstractmethod
    def _solved(self, places: Sequence[Place]) -> tuple[S, S]:
        """Return the values and errors for the tokens of some places of one stage."""

    def _of_tokens(self, solved: S) -> tuple[Tensor, ...]:
        """Return the results that have one row per token, y and dx first."""
        return solved.y_TD, solved.dx_TD

    @cached_property
    def _results(self) -> tuple[tuple[S, S], ...]:
        """The values and errors of every stage, for all its tokens."""
        return tuple(self._solved(places_of(self.workload, ranks)) for ranks in self.stages)

    @cached_property
    def _backward_results(self) -> tuple[tuple[S, S], ...]:
        """The values and errors of every stage, for its tokens that go backward."""
        if all(map(self.workload.goes_backward, range(len(self.workload.batches)))):
            return self._results
        return tuple(self._solved(backward_places_of(self.workload, ranks)) for ranks in self.stages)

    @cached_property
    def _tokens(self) -> dict[Place, tuple[Target, ...]]:
        found = {}
        for ranks, (values, errors) in zip(self.stages, self._results, strict=True):
            both = zip(self._of_tokens(values), self._of_tokens(errors), strict=True)
            targets = [Target(value, self._allowed(error)) for value, error in both]
            start = 0
            for place in places_of(self.workload, ranks):
                rows = slice(start, start + self._count(place))
                start = rows.stop
                found[place] = tuple(Target(target.expected[rows], target.allowed[rows]) for target in targets)
        return found

    @cached_property
    def _parameters(self) -> tuple[dict[ParameterKey, Target], ...]:
        found = []
        for ranks, (values, errors) in zip(self.stages, self._backward_results, strict=True):
            tokens = sum(self._count(place) for place in backward_places_of(self.workload, ranks))
            targets = dict[ParameterKey, Target]()
            for keys in _of_one_shape(values.parameters):  # all keys of one shape at once
                value, error = (torch.stack([solved.parameters[key] for key in keys]) for solved in (values, errors))
                both = value / self.divisor, self._allowed(error, tokens) / self.divisor
                targets |= {key: Target(*of_key) for key, *of_key in zip(keys, *both, strict=True)}
            found.append(targets)
        return tuple(found)

    def _count(self, place: Place) -> int:
        m, rank = place
        return len(self.workload.batches[m][rank].x_TD)

    def _allowed(self, error: Tensor, tokens: int = 0) -> Tensor:
        config = self.workload.config
        longest = max(bounds.longest_sum(config), *config.shared.ffn, 0)
        return bounds.allowed(error, config.dtype, addends=longest + tokens)


def _of_one_shape(parameters: Mapping[ParameterKey, Tensor]) -> Iterable[list[ParameterKey]]:
    """Return the keys of the parameters that have the same shape."""
    of_shape: dict[tuple[int, ...], list[ParameterKey]] = {}
    for key, value in parameters.items():
        of_shape.setdefault(tuple(value.shape), []).append(key)
    return of_shape.values()


def _answers(kind: type[StageAnswers[Any]], drawn: Drawn, weights_at: WeightsAt, divisor: int) -> StageAnswers[Any]:
    return kind(drawn.workload, weights_at, divisor)


_small = lru_cache(maxsize=96)(_answers)  # checks of a case and its equivalent runs share them
_large = lru_cache(maxsize=4)(_answers)  # the checks of one case share it; an answer takes 50 bytes an element
