"""FAST: a backend's own experts without gradients, and changes of their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from moe_conformance.chapters.fast_paths.judge.changed_weights import (
    judge_gradients,
    judge_memory,
    judge_modes,
    judge_present,
    judge_strided,
    judge_unequal,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.changes import Recorded, Replaced, Unrecorded
from moe_conformance.workloads.records.runs import ON_CHANGING_EXPERTS
from moe_conformance.workloads.records.workload import Workload


def changed(*unions: object) -> Callable[[Workload], bool]:
    """Select scripts that make one of these changes, and ask nothing about memory."""
    ways = {way for union in unions for way in get_args(union)}

    def chosen(workload: Workload) -> bool:
        made = {call.given[0]["way"] for call in workload.calls if call.method == "change"}
        return bool(made & ways) and not asks_for_memory(workload)

    return chosen


def asks_for_memory(workload: Workload) -> bool:
    """Select scripts that count what holds old values."""
    return any(call.method == "remains" for call in workload.calls)


def goes_backward(workload: Workload) -> bool:
    """Select scripts that go backward around forwards without gradients."""
    return any(call.upstream for call in workload.calls) and not strided(workload)


def strided(workload: Workload) -> bool:
    """Select scripts on rows with strides."""
    return any("stride" in call.given[0] for call in workload.calls)


def counted(workload: Workload) -> bool:
    """Select scripts that make the same calls in every mode."""
    forwards = [call for call in workload.calls if call.method == "forward"]
    modes = {call.modes for call in forwards}
    return len(modes) > 2 and not any(call.upstream for call in forwards)


def unequal(workload: Workload) -> bool:
    """Select scripts with counts that are not equal, or not known."""
    forwards = [call for call in workload.calls if call.method == "forward" and not call.upstream]
    return any(len({*call.given[0]["counts_N"]}) > 1 for call in forwards) and not strided(workload)


class TestExpertsWithoutGradients:
    test_recorded_changes_are_used = Row("FAST-06", ON_CHANGING_EXPERTS, judge_present, when=changed(Recorded))
    """The forward behind a change that version counters record is that of the new values."""

    test_unrecorded_changes_are_used = Row("FAST-07", ON_CHANGING_EXPERTS, judge_present, when=changed(Unrecorded))
    """The forward behind a change that leaves no trace is that of the new values."""

    test_replaced_weights_are_used = Row("FAST-08", ON_CHANGING_EXPERTS, judge_present, when=changed(Replaced))
    """The forward behind another parameter, storage or dtype, or behind another gathering, is of the new values."""

    test_replaced_weights_are_freed = Row("FAST-09", ON_CHANGING_EXPERTS, judge_memory, when=asks_for_memory)
    """No tensor holds what weights were before they were replaced, nor what deleted experts had."""

    test_gradients_know_nothing_of_forwards_without = Row(
        "FAST-10", ON_CHANGING_EXPERTS, judge_gradients, when=goes_backward
    )
    """Every parameter has the gradient that it has if no forward without gradients was made before."""

    test_grad_modes_have_one_output = Row("FAST-11", ON_CHANGING_EXPERTS, judge_modes, when=counted)
    """With gradients, under no_grad and in inference mode the outputs are the same within rounding."""

    test_unequal_counts_are_followed = Row("FAST-12", ON_CHANGING_EXPERTS, judge_unequal, when=unequal)
    """Where counts are not equal, or not known, every row still goes to its own expert."""

    test_strides_change_nothing = Row("FAST-13", ON_CHANGING_EXPERTS, judge_strided, when=strided)
    """Rows and upstream gradients give the same however they lie in memory."""
