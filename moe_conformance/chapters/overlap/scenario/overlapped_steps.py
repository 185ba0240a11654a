"""Run steps of a model of several layers on one rank, sequential and overlapped by the backend.

Both are steps of the same layers, with the same parameters and microbatches. The overlapped step runs twice: without
gradients at its beginning, and after a microbatch that has left some.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from moe_conformance.chapters.overlap.scenario.observed_products import Observed, Places
from moe_conformance.chapters.overlap.scenario.records import OverlapSeen, StepSeen
from moe_conformance.contract import OverlappedStep, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters, state
from moe_conformance.scenarios.outcome import Grad, Microbatch, RankOutcome
from moe_conformance.scenarios.reported import claims_of_all, shown_of, without_noise
from moe_conformance.scenarios.sessions import build, opened
from moe_conformance.scenarios.tensors import to_cpu
from moe_conformance.workloads.records.workload import ParameterKey, Workload

_DELAYED = 0.1  # share of operators that are delayed on a late rank


class OverlappedSteps:
    """The scenario of overlapped steps: the state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""
        self.context, self.workload, self.config = context, workload, workload.config
        self.reached = "open"

    def run(self, backend_name: str) -> RankOutcome:
        """Run the steps and return the record of this rank."""
        with state.deterministic() if self.workload.twist.deterministic else nullcontext():
            kept = opened(self.context, backend_name, self.workload.layout)
            self.session, self.reached = kept.session, "build"
            self.step: OverlappedStep = build(self.session, "overlapped_step", self.config)
            for number, layer in enumerate(self.step.layers):
                parameters.write(layer, _of_layer(self.workload, number))
                without_noise(layer)
            return self._bring_back(self._seen())

    def _seen(self) -> OverlapSeen:
        rest = range(1, len(self.workload.batches)) or range(1)  # a lone microbatch overlaps, too
        self.added: list[dict[ParameterKey, Tensor]] = []
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
            tuple(second.written),
        )

    def _observed(self) -> Observed:
        late = self.workload.twist.late
        seconds, drawn = late[self.context.rank] if late else 0.0, random.Random(self.context.rank)

        def delay() -> None:
            if seconds and drawn.random() < _DELAYED:
                time.sleep(seconds)

        return Observed(self.context.in_flight, Places(self.step.layers, lambda parameter: parameter.detach()), delay)

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
        self.reached = phase
        layers, attribute = self.step.layers, self.session.grad_attr
        parameters.clear(layers, attribute, to_zero=False)
        batches = (ranks[self.context.rank] for ranks in self.workload.batches)
        xs = [batch.x_TD.to(self.context.device, copy=True).requires_grad_() for batch in batches]
        begun = self.context.calls()
        ys = [y.detach().clone() for y in act(xs)]
        calls = begun, self.context.calls()
        local, final = self._gradients(), None
        self.reached = f"finish of {phase}"
        try:
            self.session.finish_gradients(*layers)
            final = self._gradients()
        except Unsupported:
            pass
        return StepSeen(tuple(y.cpu() for y in ys), tuple(Grad(to_cpu(x.grad)) for x in xs), local, final, calls)

    def _upstream(self, m: int) -> Tensor:
        return self.workload.batches[m][self.context.rank].upstream.to(self.context.device, copy=True)

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

    def _bring_back(self, seen: OverlapSeen) -> RankOutcome:
        self.reached = "done"
        claims, first = claims_of_all([self.step]), seen.overlapped[0]
        return RankOutcome(
            rank=self.context.rank,
            status="ok",
            reached=self.reached,
            microbatches=tuple(
                Microbatch(y=y, y_shape=tuple(y.shape), y_dtype=y.dtype, dx_TD=dx_TD, dweights_TK=Grad(None))
                for y, dx_TD in zip(first.y, first.dx_TD, strict=True)
            ),
            uncovered=tuple(complaint for layer in self.step.layers for complaint in parameters.coverage(layer)),
            resolved=shown_of([self.step], claims),
            claims=claims,
            loss_convention=self.session.loss_convention,
            seen=seen,
        )


def _of_layer(workload: Workload, number: int) -> dict[ParameterKey, Tensor]:
    prefix = f"layer{number}/"
    return {
        (name.removeprefix(prefix), expert): value
        for (name, expert), value in workload.parameters.items()
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


SCENARIOS = {"overlapped steps": OverlappedSteps}
