"""Searches as a run makes them, without pytest around: what Hypothesis finds in one cell of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hypothesis import settings

from moe_conformance.contract import Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.drawn_batch import judge_batch
from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plugin import drawing
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.drawn import distribution
from moe_conformance.workloads.drawn.freedom import Freedom
from moe_conformance.workloads.drawn.router_strategies import route_workloads
from moe_conformance.workloads.drawn.strategies import probe_workloads
from moe_conformance.workloads.plan import Cell
from moe_conformance.workloads.records.runs import DrawnStep, ExchangeStep, RouterStep
from moe_conformance.workloads.records.workload import Workload
from self_tests.planted_bugs.plant import EP2

STRATEGIES = {ExchangeStep(): probe_workloads, RouterStep(): route_workloads}
_PROBE = ExchangeStep()


@dataclass(frozen=True)
class Found:
    """How a search ended."""

    trial: Trial
    ended: Ending
    seen: tuple[Mismatch, ...]  # by the judge, from the first to the last
    refusals: int  # runs that the backend refused

    @property
    def examples(self) -> dict[str | None, Workload]:
        """The smallest failing workloads by the requirement that each violates."""
        found = {mismatch.requirement: mismatch.outcome for mismatch in self.ended.failed}
        return {requirement: outcome.workload for requirement, outcome in found.items() if outcome is not None}


def search(
    engine: Engine,
    backend: str,
    run: DrawnStep = _PROBE,
    *,
    layout: Layout = EP2,
    limits: Sequence[Limit] = (),
    left_out: Sequence[str] = (),
) -> Found:
    """Search one cell for a failing workload, as the quick profile does."""
    cell = Cell("alltoall", layout, tuple(limits), "cpu", 0)
    trial = Trial((), "search", cell)
    freedom = Freedom.under(limits, layout, "cpu")
    features = distribution.required(run, freedom)
    required = [feature for feature in features if feature.name not in left_out]
    waived = [feature for feature in features if feature.name in left_out]
    hunt = drawing.Search(trial, required, waived, partial(moe_step, engine, backend), cell.id)
    workloads = STRATEGIES[run](cell.variant, layout, limits, "cpu")
    seen: list[Mismatch] = []

    def judge(outcome: Outcome) -> None:
        try:
            judge_batch(outcome, trial.tally)
        except Mismatch as mismatch:
            seen.append(mismatch)
            raise

    before = settings.get_current_profile_name()
    drawing.load_profile("quick")
    try:
        hunt.hold(workloads, judge)
    except Exception as error:
        return Found(trial, ending(trial, error), tuple(seen), hunt.refusals)
    finally:
        settings.load_profile(before)
    return Found(trial, ending(trial, None), tuple(seen), hunt.refusals)
