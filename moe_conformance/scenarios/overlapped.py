"""Run steps of a model of several layers on one rank, sequential and overlapped by the backend, and record them.

Both are steps of the same layers, with the same parameters and microbatches. The overlapped step runs twice: without
gradients at its beginning, and after a microbatch that has left some.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.contract import OverlappedStep, Session, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.observed_products import Observed, Places, Product
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.scenarios.reported import without_noise
from moe_conformance.scenarios.tensors import to_cpu
from moe_conformance.workloads.records.workload import Batch, ParameterKey

_DELAYED = 0.1  # share of operators that are delayed on a late rank


@dataclass(frozen=True)
class StepSeen:
    """The record of one step of a model of several layers; keys are ("layer0/gate", 3), for example."""

    y: tuple[Tensor, ...]  # by microbatch
    dx_TD: tuple[Grad, ...]
    local: Mapping[ParameterKey, Grad]  # gradients of parameters when the step returned
    final: Mapping[ParameterKey, Grad] | None  # after finish_gradients; None where none is offered
    calls: tuple[int, int]  # numbers of its first collective, and of the first after it


@dataclass(frozen=True)
class OverlapSeen:
    """The records of the sequential step and of two overlapped steps of one model, on one rank.

    The first overlapped step begins without gradients. The second one follows the first microbatch, which runs alone.
    """

    sequential: StepSeen
    overlapped: tuple[StepSeen, StepSeen]
    added: tuple[Mapping[ParameterKey, Tensor], ...]  # to gradients, by microbatch of the sequential step; float64
    products: Mapping[int, tuple[str, ...]]  # first: weights of the products run during a collective, by its number
    worked: bool  # whether the first ran any product of non-empty tensors
    trace: tuple[Product, ...]  # first: all products, in order
    written: tuple[str, ...]  # second: the weights whose gradients were written in place, in order


class StepRuns:
    """The steps of one `OverlappedStep` on one rank."""

    def __init__(
        self,
        context: RankContext,
        session: Session,
        step: OverlappedStep,
        batches: Sequence[Batch],
        reach: Callable[[str], None],
        late: float = 0.0,
    ) -> None:
        """Take the step, the rank's batch of every microbatch, and what is called as a phase begins.

        `late`: seconds before every tenth operator.
        """
        self.context, self.session, self.step, self.batches = context, session, step, batches
        self._reach, self._late = reach, late
        self.added: list[dict[ParameterKey, Tensor]] = []

    def write(self, values: Mapping[ParameterKey, Tensor]) -> None:
        """Write the parameters of all layers, keyed by ("layer0/gate", 3)."""
        for number, layer in enumerate(self.step.layers):
            parameters.write(layer, _of_layer(values, number))
            without_noise(layer)

    def seen(self) -> OverlapSeen:
        """Run the sequential step and both overlapped ones, and return their records."""
        rest = range(1, len(self.batches)) or range(1)  # a lone microbatch overlaps, too
        sequential = self._taken("sequential", lambda xs: [self._alone(m, x) for m, x in enumerate(xs)])
        with self._observed() as first:
            all_at_once = self._taken("overlapped", lambda xs: self._overlapped(range(len(xs)), xs))
        with self._observed() as second:
            behind = self._taken(
                "overlapped behind another",
                lambda xs: [*(self._alone(m, xs[m]) for m in range(rest.start)), *self._behind(second, rest, xs)],
            )
        return OverlapSeen(
            sequential,
            (all_at_once, behind),
            tuple(self.added),
            {order: tuple(dict.fromkeys(names)) for order, names in first.during.items()},
            first.worked,
            tuple(first.trace),
            tuple(second.written),
        )

    def _observed(self) -> Observed:
        seconds, drawn = self._late, random.Random(self.context.rank)

        def delay() -> None:
            if seconds and drawn.random() < _DELAYED:
                time.sleep(seconds)

        weights = Places(self.step.layers, lambda parameter: parameter.detach())
        return Observed(self.context.calls, self.context.in_flight, weights, delay)

    def _behind(self, observed: Observed, microbatches: Sequence[int], xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the overlapped step, and record the order in which existing gradients are written."""
        attribute = self.session.grad_attr

        def read(parameter: Tensor) -> Tensor:
            grad: Tensor | None = getattr(parameter, attribute, None)
            return torch.empty(parameter.shape, device="meta") if grad is None else grad.detach()

        observed.gradients = Places(self.step.layers, read)
        ys = self._overlapped(microbatches, xs)
        observed.gradients = None
        return ys

    def _taken(self, phase: str, act: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> StepSeen:
        """Run a step without gradients at its beginning, finish its gradients, and return its record."""
        self._reach(phase)
        layers, attribute = self.step.layers, self.session.grad_attr
        parameters.clear(layers, attribute, to_zero=False)
        xs = [batch.x_TD.to(self.context.device, copy=True).requires_grad_() for batch in self.batches]
        begun = self.context.calls()
        ys = [y.detach().clone() for y in act(xs)]
        calls = begun, self.context.calls()
        local, final = self._gradients(), None
        self._reach(f"finish of {phase}")
        try:
            self.session.finish_gradients(*layers)
            final = self._gradients()
        except Unsupported:
            pass
        return StepSeen(tuple(y.cpu() for y in ys), tuple(Grad(to_cpu(x.grad)) for x in xs), local, final, calls)

    def _upstream(self, m: int) -> Tensor:
        return self.batches[m].upstream.to(self.context.device, copy=True)

    def _alone(self, m: int, x: Tensor) -> Tensor:
        """Run the forward and backward of a microbatch, and record in the first step what it adds to the gradients."""
        y = x
        for layer in self.step.layers:
            y = layer(y)
        before = self._gradients() if len(self.added) == m else {}
        torch.autograd.backward(y, self._upstream(m))
        if len(self.added) == m:
            self.added.append(_differences(before, self._gradients()))
        return y

    def _overlapped(self, microbatches: Sequence[int], xs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.step.run([xs[m] for m in microbatches], [self._upstream(m) for m in microbatches])

    def _gradients(self) -> dict[ParameterKey, Grad]:
        return {
            (f"layer{number}/{name}", expert): grad
            for number, layer in enumerate(self.step.layers)
            for (name, expert), grad in parameters.gradients([layer], self.session.grad_attr).items()
        }


def _of_layer(values: Mapping[ParameterKey, Tensor], number: int) -> dict[ParameterKey, Tensor]:
    prefix = f"layer{number}/"
    return {
        (name.removeprefix(prefix), expert): value
        for (name, expert), value in values.items()
        if name.startswith(prefix)
    }


def _differences(before: dict[ParameterKey, Grad], after: dict[ParameterKey, Grad]) -> dict[ParameterKey, Tensor]:
    """Return the difference of every gradient; those that are absent are left out."""
    found = {}
    for key, grad in after.items():
        if grad.value is not None:
            there = before[key].value
            found[key] = grad.value.double() - (0 if there is None else there.double())
    return found
