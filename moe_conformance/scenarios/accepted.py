"""Run settings that a backend accepts: build the step that they ask for, and take it on the microbatches of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from moe_conformance.contract import Claims, ConfigRules, Malformed, RunRules, Settings, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.graph_replays import counted_replays
from moe_conformance.scenarios.outcome import RankOutcome
from moe_conformance.scenarios.overlapped import OverlapSeen, StepRuns
from moe_conformance.scenarios.proof import refused_by
from moe_conformance.scenarios.reported import claims_of_all, shown_of
from moe_conformance.scenarios.sessions import build, meet, opened, recorded
from moe_conformance.workloads.records.workload import Batch, Workload


@dataclass(frozen=True)
class SettingsRun:
    """What one rank did with settings: refused them, accepted them without a way to run them, failed, or ran."""

    asked: Settings
    ran: Settings | None = None  # as resolved; None where they were refused
    seen: OverlapSeen | None = None  # None where nothing ran
    why: str = ""  # nothing ran: the refusal, what is missing, or the error of the build or of the step
    failed: bool = False  # whether `why` is such an error
    warned: tuple[str, ...] = ()
    loss_convention: str = "sum"  # of the step, else of the session
    claims: Claims = field(default_factory=Claims)
    uncovered: tuple[str, ...] = ()
    replays: int | None = None  # of captured graphs; None where there is no device that captures


class AcceptedSettings:
    """The scenario: the state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""
        self.context, self.workload = context, workload
        self.reached = "open"

    def run(self, backend_name: str) -> RankOutcome:
        """Run all settings, one after the other, and return the record of this rank.

        Raises:
            Unsupported: the backend resolves no settings, or runs none of those that it accepts.
        """
        self.kept = opened(self.context, backend_name, self.workload.layout)
        self.reached = "build"
        rules = build(self.kept.session, "config_rules", self.workload.config)
        if not hasattr(rules, "step"):
            raise Unsupported("settings are accepted by `resolve` alone: without `step` nothing shows that they run")
        world: dist.ProcessGroup = self.kept.topology.group("world")
        found = []
        for number, call in enumerate(self.workload.calls):
            self.reached = f"settings:{number}"
            found.append(self._run(rules, call.given[self.context.rank]["asked"]))
            meet(self.context, world)  # a rank that raised waits here for those that it left behind
        self.reached = "done"
        return RankOutcome(
            rank=self.context.rank,
            status="ok",
            reached=self.reached,
            resolved=shown_of([rules], Claims()),
            loss_convention=self.kept.session.loss_convention,
            seen=tuple(found),
        )

    def _run(self, rules: RunRules, asked: Settings) -> SettingsRun:
        record = self._resolved(rules, asked)
        if record.ran is None:
            return record
        try:
            with recorded():  # what it warns of was recorded where it was resolved
                step = rules.step(asked)
        except Unsupported as error:
            proved = refused_by(error, self.kept.backend) == "library"
            return replace(record, ran=None if proved else record.ran, why=str(error))
        except Exception as error:
            return replace(record, why=f"cannot be built: {type(error).__name__}: {error}", failed=True)
        phase = ["begin"]
        batches = [_cast(ranks[self.context.rank], record.ran) for ranks in self.workload.batches]
        runs = StepRuns(self.context, self.kept.session, step, batches, lambda reached: phase.append(reached))
        try:
            runs.write(self.workload.parameters)
            with counted_replays() as replays:
                seen = runs.seen()
        except Exception as error:
            why = f"cannot run: {type(error).__name__} in the step {phase[-1]}: {error}"
            return replace(record, why=why, failed=True)
        return replace(
            record,
            seen=seen,
            loss_convention=getattr(step, "loss_convention", self.kept.session.loss_convention),
            claims=claims_of_all([step]),
            uncovered=tuple(complaint for layer in step.layers for complaint in parameters.coverage(layer)),
            replays=replays.count if self.context.device.type == "cuda" else None,
        )

    def _resolved(self, rules: ConfigRules, asked: Settings) -> SettingsRun:
        try:
            with recorded() as warned:
                ran: Any = rules.resolve(asked)
        except Exception as error:
            return SettingsRun(asked, why=str(error))
        if not isinstance(ran, Settings):
            raise Malformed(f"resolve returned {type(ran).__name__}; expected Settings")
        return SettingsRun(asked, ran, warned=tuple(warned))


def _cast(batch: Batch, settings: Settings) -> Batch:
    """Return tokens and upstream gradients in the dtype of the settings; they are drawn in bfloat16."""
    return replace(batch, x_TD=batch.x_TD.to(settings.dtype), upstream=batch.upstream.to(settings.dtype))
