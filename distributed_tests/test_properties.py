"""Hypothesis batches: all checks on one drawn workload, within what the backend allows.

Each kind of fault has its own exception type, so shrinking follows one fault to its smallest batch.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.strategies import SearchStrategy

from moe_conformance.judging.drawn_batch import PROBE, ROUTE, decided_by, judge_batch
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.drawn.router_strategies import route_workloads
from moe_conformance.workloads.drawn.strategies import probe_workloads
from moe_conformance.workloads.plan import Cell
from moe_conformance.workloads.records.runs import DrawnRuns, ExchangeStep, RouterStep
from moe_conformance.workloads.records.workload import Workload

Drive = Callable[[SearchStrategy[Workload], Callable[[Outcome], None]], None]


class TestAnyBatch:
    @requirement(*decided_by(PROBE), run=DrawnRuns(ExchangeStep()))
    def test_a_drawn_batch_passes_every_exact_judgement(self, cell: Cell, drive: Drive, tally: Tally) -> None:
        """Whatever sizes, routing, drops, duplicates, weights, dtype and schedule are drawn, no check fails."""
        workloads = probe_workloads(cell.variant, cell.layout, cell.limits, cell.device)
        drive(workloads, lambda outcome: judge_batch(outcome, tally))

    @requirement(*decided_by(ROUTE), run=DrawnRuns(RouterStep()))
    def test_a_drawn_router_passes_every_judgement(self, cell: Cell, drive: Drive, tally: Tally) -> None:
        """Whatever scores, groups, bias, sizes, logits, ties, dtype and schedule are drawn, no check fails."""
        workloads = route_workloads(cell.variant, cell.layout, cell.limits, cell.device)
        drive(workloads, lambda outcome: judge_batch(outcome, tally))
