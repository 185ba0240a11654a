"""The scenario of overlapped steps: a model of several layers, sequential and as the backend overlaps it."""

from __future__ import annotations

from contextlib import nullcontext

from moe_conformance.contract import OverlappedStep
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters, state
from moe_conformance.scenarios.outcome import Grad, Microbatch, RankOutcome
from moe_conformance.scenarios.overlapped import OverlapSeen, StepRuns
from moe_conformance.scenarios.reported import claims_of_all, shown_of
from moe_conformance.scenarios.sessions import build, opened
from moe_conformance.workloads.records.workload import Workload


class OverlappedSteps:
    """The state of one run on one rank."""

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
            batches = [ranks[self.context.rank] for ranks in self.workload.batches]
            late = self.workload.twist.late[self.context.rank] if self.workload.twist.late else 0.0
            runs = StepRuns(self.context, self.session, self.step, batches, self._reach, late)
            runs.write(self.workload.parameters)
            return self._bring_back(runs.seen())

    def _reach(self, phase: str) -> None:
        self.reached = phase

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


SCENARIOS = {"overlapped steps": OverlappedSteps}
