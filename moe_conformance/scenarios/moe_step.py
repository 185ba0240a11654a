"""Run a workload on the ranks: the driver's side, and the function that every rank executes first.

A workload is a training step (`step.py`), a script of calls on one surface (`script.py`), or a scenario of a chapter:
an entry of the table `SCENARIOS` in its module `scenario`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

from moe_conformance.backends.registry import load
from moe_conformance.contract import Malformed, Unsupported
from moe_conformance.discovery import registered
from moe_conformance.engine import Engine, Job, JobResult, RankContext, RankResult, Running
from moe_conformance.scenarios.lifetime import Lifetime
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from moe_conformance.scenarios.parts import common, joined, part
from moe_conformance.scenarios.proof import refused_by
from moe_conformance.scenarios.routed_exchange import may_refuse_routes
from moe_conformance.scenarios.script import Script
from moe_conformance.scenarios.step import TrainingStep
from moe_conformance.workloads.records.workload import Asynchrony, Workload


class Scenario(Protocol):
    """The code that every rank executes for one workload."""

    reached: str  # the present phase: "open", "build", then phases of the scenario

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""

    def run(self, backend_name: str) -> RankOutcome:
        """Run the workload and return the record of this rank."""


@dataclass(frozen=True)
class Assignment:
    """The part of a job that is the same for all ranks; `RankContext.rank_payload` has the part of one rank."""

    backend: str  # a name of the registry or pkg.mod:Class
    workload: Workload


@dataclass(frozen=True)
class Step:
    """A workload that was sent to the ranks, alone or with others."""

    backend: str
    workload: Workload
    running: Running

    def outcome(self) -> Outcome:
        """Wait for every rank and return their records. A fault of a rank raises nothing here."""
        return outcome_of(self.backend, self.workload, self.running.result())


def start(engine: Engine, backend: str, workload: Workload, deadline_s: float = 60.0) -> Step:
    """Send a workload to the ranks and return without waiting for it."""
    return Step(backend, workload, engine.start(job(engine.device, backend, workload, deadline_s)))


def start_many(engine: Engine, backend: str, workloads: Sequence[Workload], deadline_s: float = 60.0) -> list[Step]:
    """Send workloads for one world to the ranks together; every outcome is the same as if it were sent alone."""
    jobs = [job(engine.device, backend, workload, deadline_s) for workload in workloads]
    return [Step(backend, *pair) for pair in zip(workloads, engine.start_many(jobs), strict=True)]


def job(device: str, backend: str, workload: Workload, deadline_s: float = 60.0) -> Job:
    """Return the job that runs a workload: the function `run`, the payload of all ranks, and those of single ranks."""
    world = workload.layout.world
    return Job(
        function="moe_conformance.scenarios.moe_step:run",
        payload=Assignment(backend, common(workload)),
        world=world,
        groups=workload.layout.groups(),
        deadline_s=deadline_s,
        asynchrony=_on(device, workload.asynchrony),
        rank_payloads=[part(workload, rank) for rank in range(world)],
    )


def _on(device: str, asynchrony: Asynchrony) -> Asynchrony | Literal["delayed_communication"]:
    """Return the mode of asynchronous collectives on a device: on a GPU "poisoned" becomes "delayed_communication".

    Only buffers on a CPU can be poisoned. On a GPU data arrive late in any case, and are delayed further.
    """
    return "delayed_communication" if device == "cuda" and asynchrony == "poisoned" else asynchrony


def moe_step(engine: Engine, backend: str, workload: Workload, deadline_s: float = 60.0) -> Outcome:
    """Run a workload through a backend and return the records of all ranks. A fault of a rank raises nothing here."""
    return start(engine, backend, workload, deadline_s).outcome()


def outcome_of(backend: str, workload: Workload, result: JobResult) -> Outcome:
    """Return the result of a job as the outcome that the judge reads."""
    deserted = any(rank.status == "hung" for rank in result.ranks)
    ranks = tuple(_rank_outcome(rank, deserted) for rank in result.ranks)
    return Outcome(backend, workload, ranks, result.seconds, result.disagreements)


def _rank_outcome(result: RankResult, deserted: bool) -> RankOutcome:
    """Return the record of a rank, with what the engine reports of it; `deserted`: some rank waits for ever."""
    if result.status == "ok" and (result.error is None or result.secondary or not deserted):
        assert isinstance(result.value, RankOutcome)
        return replace(result.value, ledger=result.ledger, hazards=result.hazards)
    malformed = result.error_type == f"{Malformed.__module__}.{Malformed.__qualname__}"
    reached = str(result.error_attributes.get("reached", ""))
    collectives = result.error_attributes.get("collectives")
    return RankOutcome(
        rank=result.rank,
        # A rank may return while its peers wait for it in a collective: then it is the one at fault.
        status="malformed" if malformed else "hung" if result.status == "ok" else result.status,
        reached=reached,
        phases=() if collectives is None else ((reached, int(collectives)),),
        error=result.error,
        traceback=result.traceback,
        secondary=result.secondary,
        output=result.output,
        ledger=result.ledger,
        hazards=result.hazards,
    )


def run(context: RankContext, assignment: Assignment) -> RankOutcome:
    """Run the workload's scenario on this rank. An exception gets the phase in which it was raised as `reached`."""
    workload = joined(assignment.workload, context.rank_payload, context.rank)
    step = _scenario_of(workload)(context, workload)
    try:
        return step.run(assignment.backend)
    except Unsupported as error:
        if step.reached not in ("open", "build") and not may_refuse_routes(workload):
            _mark(error, step)
            raise
        by = refused_by(error, load(assignment.backend))
        return RankOutcome(context.rank, "refused", step.reached, error=str(error), error_by=by)
    except Exception as error:
        _mark(error, step)
        raise


def _mark(error: Exception, step: Scenario) -> None:
    """Add to an exception the phase in which it was raised, and the number of collectives before that phase."""
    error.reached = step.reached  # type: ignore[attr-defined]
    if isinstance(step, TrainingStep) and step.phases:
        began = [calls for phase, calls in step.phases if phase == step.reached]  # not the call of the experts
        error.collectives = began[-1]  # type: ignore[attr-defined]


def _scenario_of(workload: Workload) -> type[Scenario]:
    return Lifetime if workload.twist.lifetime else _scenarios()[workload.run.scenario]


@cache
def _scenarios() -> Mapping[str, type[Scenario]]:
    """Return the scenarios by name: those that several chapters use, and those that one chapter defines."""
    return {"training step": TrainingStep, "script": Script, **registered("scenario", "SCENARIOS")}
