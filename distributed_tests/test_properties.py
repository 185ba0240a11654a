"""Hypothesis batches: all exact judgements on one drawn workload, within what the backend allows.

Each kind of fault has its own exception type, so shrinking follows one fault to its smallest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hypothesis import given
from hypothesis import strategies as st

from moe_conformance.judging.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.finished import judge_finished
from moe_conformance.judging.gradients import judge_dweights, judge_dx
from moe_conformance.judging.kept import judge_kept_gradients
from moe_conformance.judging.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.reading import read
from moe_conformance.judging.row_gradients import judge_out_gradients, judge_rows_gradients
from moe_conformance.judging.verdict import Mismatch, NotOffered, Tally
from moe_conformance.judging.weights import judge_weights
from moe_conformance.plan import Cell
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records import Workload
from moe_conformance.workloads.strategies import probe_workloads

JUDGES = (
    ("EXCH-09", judge_finished),
    ("EXCH-01", judge_deliveries),
    ("EXCH-02", judge_rows),
    ("EXCH-03", judge_weights),
    ("EXCH-05", judge_outputs),
    ("EXCH-07", judge_form),
    ("EXCH-08", judge_inputs),
    ("GRAD-01", judge_out_gradients),
    ("GRAD-02", judge_rows_gradients),
    ("GRAD-02", judge_dx),
    ("GRAD-03", judge_dweights),
    ("GRAD-07", judge_kept_gradients),
)


@contextmanager
def deciding(each: str) -> Iterator[None]:
    """Let a mismatch say which of the check's requirements it violates."""
    try:
        yield
    except Mismatch as mismatch:
        mismatch.requirement = each
        raise


class TestAnyBatch:
    @requirement(*dict(JUDGES), kind="property")
    @given(data=st.data())
    def test_a_drawn_batch_passes_every_exact_judgement(
        self, cell: Cell, drive: Callable[[Workload], Outcome], tally: Tally, data: st.DataObject
    ) -> None:
        """Whatever sizes, routing, drops, duplicates, dtype and schedule are drawn, every rule holds."""
        workload = data.draw(probe_workloads(cell.variant, cell.layout, cell.limits, cell.device))
        outcome = drive(workload)
        with deciding("EXCH-09"):
            reading = read(outcome)
        for each, judge in JUDGES:
            with deciding(each), suppress(NotOffered):  # weights that are applied in combine do not travel
                judge(reading, tally)
