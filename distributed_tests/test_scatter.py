"""ALIAS: rows added back into an output, in place or not."""

from __future__ import annotations

from moe_conformance.chapters.scatter.judge.scatter import judge_bits, judge_memory, judge_sums
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload


def plain(workload: Workload) -> bool:
    """Select scripts that call both forms on tensors that lie apart."""
    return any(call.method == "add_" for call in workload.calls) and not any(call.through for call in workload.calls)


class TestScatterAdd:
    @requirement("ALIAS-01", run=Script("scatter_add"), when=plain)
    def test_every_source_row_is_added(self, outcome: Outcome, tally: Tally) -> None:
        """Every output row has all source rows that name it added, and keeps its bits if none does."""
        judge_sums(outcome, tally)

    @requirement("ALIAS-02", run=Script("scatter_add"), when=plain)
    def test_the_bits_are_the_same_in_every_run(self, outcome: Outcome, tally: Tally) -> None:
        """The same inputs give the same bits in every call, in place or not, and in every process."""
        judge_bits(outcome, tally)

    @requirement("ALIAS-03", run=Script("scatter_add"), when=plain)
    def test_arguments_keep_their_bytes(self, outcome: Outcome, tally: Tally) -> None:
        """The out-of-place form writes none of its arguments, the in-place form its output alone."""
        judge_memory(outcome, tally)
