"""What the steps of a script should give, from the oracles, and how far a correct trainer may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from moe_conformance.goldens import stored_values
from moe_conformance.goldens.chapters.training import written
from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.scopes import Shard, shard_of
from moe_conformance.judging.observed.script import values
from moe_conformance.reference.rounding.training_magnitudes import StepErrors, train_measured
from moe_conformance.reference.training.model import Graded, Key, Tokens, graded
from moe_conformance.reference.training.optimisers import SGD, AdamW, Optimiser
from moe_conformance.reference.training.steps import State, Step, begun, train
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload

PARAMETERS = "parameters"  # what is compared after a step: these, or one of what the optimiser keeps, by its name
Place = tuple[int, int]  # (microbatch, rank)


@dataclass(frozen=True)
class Expected:
    """The oracle's steps, and their errors."""

    workload: Workload
    graded_so_far: dict[Any, Graded] = field(default_factory=dict)  # many mistakes are made of the same parts

    @classmethod
    def of(cls, outcome: Outcome) -> Expected:
        """Return those of an outcome, computed once."""
        return once(outcome, _of)

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser that is asked for."""
        given = self.workload.config.training
        if given.optimiser == "sgd":
            return SGD(given.rate, given.momentum, given.decay)
        return AdamW(given.rate, given.betas, given.epsilon, given.decay)

    @property
    def largest_norm(self) -> float:
        """The norm to which gradients are clipped; inf if they are not."""
        largest = self.workload.config.training.largest_norm
        return inf if largest is None else largest

    def places(self, step: int) -> list[Place]:
        """Return the places that have tokens in a step."""
        given = self.workload.calls[step].given
        return [(m, rank) for rank, each in enumerate(given) for m in range(len(each["batches"]))]

    def tokens(self, step: int, places: Sequence[Place] | None = None) -> Tokens:
        """Return the tokens of some places in a step; of all if None."""
        given = self.workload.calls[step].given
        batches = [given[rank]["batches"][m] for m, rank in (self.places(step) if places is None else places)]
        return Tokens(*(torch.cat([getattr(each, name) for each in batches]) for name in Tokens._fields))

    def state_before(self, step: int) -> State:
        """Return the model before a step."""
        return begun(self.workload.parameters, self.optimiser) if step == 0 else self.steps[step - 1].after

    @cached_property
    def steps(self) -> list[Step]:
        """The steps, on one device."""
        tokens = [self.tokens(step) for step in range(len(self.workload.calls))]
        how: dict[str, Any] = {"top_k": self.workload.config.top_k, "largest_norm": self.largest_norm}
        found = train(self.workload.parameters, tokens, self.optimiser, **how)
        return _stored(found) if self.workload.golden else found

    @cached_property
    def errors(self) -> list[StepErrors]:
        """What the steps may be off by."""
        config = self.workload.config
        places = [self.places(step) for step in range(len(self.steps))]
        return train_measured(
            self.workload.parameters,
            [(self.tokens(step), each) for step, each in enumerate(self.steps)],
            self.optimiser,
            rounding=bounds.rounding(config.dtype),
            top_k=config.top_k,
            largest_norm=self.largest_norm,
            sums=max(map(len, places)) + 3,  # every part is stored, parts are added up, and the sum may be divided
        )

    def graded(self, step: int, places: Sequence[Place] | None = None, *, divisor: float | None = None) -> Graded:
        """Return loss and gradients of some places in a step, with the parameters before it."""
        at = step, None if places is None else tuple(places), divisor
        if at not in self.graded_so_far:
            tokens, parameters = self.tokens(step, places), self.state_before(step).parameters
            self.graded_so_far[at] = graded(tokens, parameters, self.workload.config.top_k, divisor=divisor)
        return self.graded_so_far[at]

    def axes(self) -> dict[int, str]:
        """Return the names of all axes by their size, where that is more than one, such as {2: "ep or edp"}."""
        names: dict[int, list[str]] = {}
        for name, size in self.workload.layout.sizes().items():
            if size > 1 and name != "world":
                names.setdefault(size, []).append(name)
        return {size: " or ".join(each) for size, each in names.items()}

    def after(self, step: int, what: str, key: Key, shard: Shard = None) -> Target:
        """Return the shard of a parameter after a step, or of what is kept of it, and its allowed error."""
        value, error = of_state(self.steps[step].after, what, key), self._error(step, what, key)
        allowed = bounds.allowed(error, self.workload.config.dtype, addends=1)
        return Target(shard_of(value, shard), shard_of(allowed, shard))

    def _error(self, step: int, what: str, key: Key) -> Tensor:
        errors = self.errors[step]
        return errors.parameters[key] if what == PARAMETERS else errors.kept[key][what]

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of what the optimiser keeps."""
        return tuple(next(iter(self.steps[0].after.kept.values())))

    def idle(self, step: int) -> list[Key]:
        """Return the parameters of experts whose gradient is exactly zero in a step: no counted token is sent there."""
        zero = [key for key, gradient in self.steps[step].clipped.items() if not bool(gradient.any())]
        return [key for key in zero if key[1] is not None]


def _stored(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with losses, norms and states of the golden in the place of the oracle's."""
    stored = stored_values.read(stored_values.folder(), "training")
    own = {name.split("/")[2]: value for name, value in stored.items() if "/out/" in name}
    found = []
    for number, step in enumerate(steps):
        parameters = {key: own[written(key)][number] for key in step.after.parameters}
        names = {key: {what: f"{written(key)}.{what}" for what in each} for key, each in step.after.kept.items()}
        kept = {key: {what: own[name][number] for what, name in each.items()} for key, each in names.items()}
        after = State(parameters, kept, step.after.steps)
        found.append(replace(step, loss=own["loss_S"][number], norm=own["norm_S"][number], after=after))
    return found


def of_state(state: State, what: str, key: Key) -> Tensor:
    """Return a parameter of a state, or what is kept of it."""
    return state.parameters[key] if what == PARAMETERS else state.kept[key][what]


def seen(outcome: Outcome, step: int, what: str) -> list[dict[Key, Tensor]]:
    """Return parameters after a step, or what is kept of them, of every rank."""
    if what == PARAMETERS:
        return [dict(each) for each in values(outcome, step, PARAMETERS)]
    return [dict(each.get(what, {})) for each in values(outcome, step, "kept")]


def shards(outcome: Outcome, step: int) -> list[dict[Key, Shard]]:
    """Return which shard of every parameter a rank has."""
    return [dict(each) for each in values(outcome, step, "shards")]


def said(key: Key) -> str:
    """Return the name of a parameter in a sentence, such as `layer1/gate of expert 3`."""
    name, expert = key
    return name if expert is None else f"{name} of expert {expert}"


def _of(outcome: Outcome) -> Expected:
    return Expected(outcome.workload)
