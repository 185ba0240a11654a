"""Hypothesis batches: all exact judgements on one drawn workload, within what the backend allows.

Each kind of fault has its own exception type, so shrinking follows one fault to its smallest batch.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from moe_conformance.judging.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.gradients import judge_dweights, judge_dx
from moe_conformance.judging.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.reading import read, require_finished
from moe_conformance.judging.row_gradients import judge_out_gradients, judge_rows_gradients
from moe_conformance.judging.verdict import Tally
from moe_conformance.judging.weights import judge_weights
from moe_conformance.plan import Cell
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records import Workload
from moe_conformance.workloads.strategies import probe_workloads

JUDGES = (
    judge_deliveries,
    judge_rows,
    judge_weights,
    judge_outputs,
    judge_form,
    judge_inputs,
    judge_out_gradients,
    judge_rows_gradients,
    judge_dx,
    judge_dweights,
)


class TestAnyBatch:
    @requirement(
        "EXCH-01", "EXCH-02", "EXCH-03", "EXCH-05", "EXCH-06", "EXCH-07", "EXCH-08", "EXCH-09", "EXCH-10",
        "GRAD-01", "GRAD-02", "GRAD-03",
        kind="property",
    )  # fmt: skip
    @given(data=st.data())
    def test_a_drawn_batch_passes_every_exact_judgement(
        self, cell: Cell, drive: Callable[[Workload], Outcome], tally: Tally, data: st.DataObject
    ) -> None:
        """Whatever sizes, routing, drops, duplicates, dtype and schedule are drawn, every rule holds."""
        workload = data.draw(probe_workloads(cell.variant, cell.layout, cell.limits, cell.device))
        outcome = drive(workload)
        require_finished(outcome)
        reading = read(outcome)
        for judge in JUDGES:
            judge(reading, tally)
