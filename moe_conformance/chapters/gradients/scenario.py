"""Training steps on one rank whose gradients are differentiated once more, and the runs that have them.

With g = dL/dx, of a backward that keeps its graph, every rank differentiates its s = sum_t <g_t, v_t> by its upstream
gradient and its routing weights, a rank without tokens as well: the second backward has collectives too. A rank may
refuse by an exception. In the first backward it ends at once, in the second one only after all ranks have met, so that
no rank is stopped by another one's refusal. Gradients of parameters are not finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.outcome import Grad, RankOutcome
from moe_conformance.scenarios.sessions import meet, opened
from moe_conformance.scenarios.step import TrainingStep, go_back
from moe_conformance.scenarios.tensors import to_cpu
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload

BACKWARD, SECOND_BACKWARD = "backward", "second backward"  # phases, with the microbatch behind a colon


# ---- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExchangeTwice(ExchangeStep):
    """The run of an exchange with the probe, which is linear, whose gradients are differentiated."""

    scenario: ClassVar[str] = "second derivatives"


@dataclass(frozen=True)
class ExpertsTwice(ExpertsStep):
    """The run of an exchange with the backend's experts, whose gradients are differentiated."""

    scenario: ClassVar[str] = "second derivatives"


def direction(workload: Workload, m: int, rank: int) -> Tensor:
    """Return v of the tokens of a rank (T, D): quarters of few bits, as upstream gradients of the probe are."""
    size = workload.tokens[m][rank], workload.config.hidden
    generator = draw.generator("direction", workload.layout.name, m, rank)
    steps_TD = torch.randint(1, 8, size, generator=generator)
    return steps_TD * (torch.randint(0, 2, size, generator=generator) * 2 - 1) / 4


# ---- on a rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecondSeen:
    """What one rank observed of the second backward of one microbatch."""

    recorded: bool  # whether g requires a gradient, without which there is no second backward
    upstream_TD: Grad  # ds/du
    weights_TK: Grad  # ds/dw


class SecondDerivatives(TrainingStep):
    """The scenario of steps with a second backward: the state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""
        super().__init__(context, workload)
        self.twice: dict[int, SecondSeen] = {}  # by microbatch

    def run(self, backend_name: str) -> RankOutcome:
        """Run the steps and return the record of this rank."""
        self.world = opened(self.context, backend_name, self.workload.layout).topology.group("world")
        return super().run(backend_name)

    def _backward(self, m: int) -> None:
        inputs, output = self.flights[m].inputs, self.flights[m].output
        upstream, refusal = inputs.upstream.requires_grad_(), None
        assert output is not None
        go_back(output, upstream, create_graph=True)  # GRAD-19 decides who may raise here
        self._reach(SECOND_BACKWARD, m)
        try:
            self.twice[m] = self._second_backward(m, inputs.x, inputs.routing.weights_TK, upstream)
        except Exception as error:
            refusal = error
        if self.workload.layout.world > 1:
            meet(self.context, self.world)  # no rank ends because another one has raised, and a rank left behind hangs
        if refusal is not None:
            raise refusal

    def _second_backward(self, m: int, x: Tensor, weights_TK: Tensor, upstream: Tensor) -> SecondSeen:
        gradient = x.grad
        x.grad = weights_TK.grad = None
        parameters.cut_graphs(self.built.parametrised)
        if gradient is None or not gradient.requires_grad:
            return SecondSeen(False, Grad(None), Grad(None))
        v = direction(self.workload, m, self.context.rank).to(x.device, x.dtype).reshape(x.shape)
        # All of it: torch.autograd.grad leaves out what leads to none of its inputs, also what would refuse.
        torch.autograd.backward((gradient * v).sum())
        return SecondSeen(True, Grad(to_cpu(upstream.grad)), Grad(to_cpu(weights_TK.grad)))

    def _bring_back(self, before: Mapping[str, str]) -> RankOutcome:
        return replace(super()._bring_back(before), seen=self.twice)


SCENARIOS = {"second derivatives": SecondDerivatives}
