"""ALIAS: rows added back into an output, in place or not."""

from __future__ import annotations

from moe_conformance.chapters.scatter.judge.scatter import judge_bits, judge_memory, judge_sums
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload


def plain(workload: Workload) -> bool:
    """Select scripts that call both forms on tensors that lie apart."""
    return any(call.method == "add_" for call in workload.calls) and not any(call.through for call in workload.calls)


class TestScatterAdd:
    test_every_source_row_is_added = Row("ALIAS-01", Script("scatter_add"), judge_sums, when=plain)
    """Every output row has all source rows that name it added, and keeps its bits if none does."""

    test_the_bits_are_the_same_in_every_run = Row("ALIAS-02", Script("scatter_add"), judge_bits, when=plain)
    """The same inputs give the same bits in every call, in place or not, and in every process."""

    test_arguments_keep_their_bytes = Row("ALIAS-03", Script("scatter_add"), judge_memory, when=plain)
    """The out-of-place form writes none of its arguments, the in-place form its output alone."""
