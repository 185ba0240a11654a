"""ALIAS: rows added back into an output, in place or not, under grad modes and compilers, and in shared memory."""

from __future__ import annotations

from moe_conformance.chapters.scatter.judge.scatter import judge_bits, judge_memory, judge_sums
from moe_conformance.chapters.scatter.judge.scatter_memory import (
    judge_choice,
    judge_forms,
    judge_gradients,
    judge_modes,
    judge_programs,
    judge_routed,
    judge_setting,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.memory import Laid
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


def related(workload: Workload) -> bool:
    """Select scripts whose output lies in every way to the tokens."""
    return any(isinstance(value, Laid) for call in workload.calls for value in call.given[0].values())


def with_gradients(workload: Workload) -> bool:
    """Select scripts in which something goes backward."""
    return any(call.upstream for call in workload.calls)


def nested(workload: Workload) -> bool:
    """Select scripts that make one call under every nesting of grad modes."""
    return any("enable_grad" in call.modes for call in workload.calls)


def with_settings(workload: Workload) -> bool:
    """Select scripts that ask for deterministic algorithms."""
    return any("deterministic" in call.modes for call in workload.calls)


def without_data(workload: Workload) -> bool:
    """Select scripts on fake and meta tensors."""
    return any(call.through == "fake" for call in workload.calls)


def exported(workload: Workload) -> bool:
    """Select scripts with exported programs."""
    return any(call.through == "export" for call in workload.calls)


def compiled(workload: Workload) -> bool:
    """Select scripts with compiled programs."""
    return any(call.through == "compile" for call in workload.calls)


class TestCombineAdd:
    test_the_input_of_the_layer_keeps_its_bytes = Row("ALIAS-04", Script("combine_add"), judge_routed, when=related)
    """Routed rows are added to what a shared expert returned, whatever memory that shares with its input."""

    test_in_place_where_nobody_can_tell = Row("ALIAS-05", Script("combine_add"), judge_choice, when=related)
    """The sum is made in place only where output and tokens have no byte in common."""

    test_gradients_are_those_of_the_sum = Row("ALIAS-06", Script("combine_add"), judge_gradients, when=with_gradients)
    """Output, source rows and what saved the output have the gradients of the out-of-place sum."""

    test_grad_modes_change_no_bit = Row("ALIAS-07", Script("combine_add"), judge_modes, when=nested)
    """Every nesting of grad modes gives the same bits, and a gradient where grad is on."""

    test_the_deterministic_setting_is_left_alone = Row(
        "ALIAS-08", Script("combine_add"), judge_setting, when=with_settings
    )
    """The setting of deterministic algorithms is the same behind every call."""

    test_tensors_without_data_have_a_form = Row("ALIAS-09", Script("combine_add"), judge_forms, when=without_data)
    """On fake and meta tensors the result has its shape, dtype and device."""

    test_an_exported_program_gives_the_same = Row("ALIAS-09", Script("combine_add"), judge_programs, when=exported)
    """Exported and run, it gives the bits of the eager call and writes what that writes."""

    test_a_compiled_graph_gives_the_same = Row("ALIAS-10", Script("combine_add"), judge_programs, when=compiled)
    """Compiled as one graph, it gives the values and gradients of the eager call, or is refused."""


class TestScatterAddUnderModes:
    test_gradients_are_those_of_the_sum = Row("ALIAS-06", Script("scatter_add"), judge_gradients, when=with_gradients)
    """Output, source rows and what saved the output have the gradients of the out-of-place sum."""

    test_grad_modes_change_no_bit = Row("ALIAS-07", Script("scatter_add"), judge_modes, when=nested)
    """Every nesting of grad modes gives the same bits, and a gradient where grad is on."""

    test_the_deterministic_setting_is_left_alone = Row(
        "ALIAS-08", Script("scatter_add"), judge_setting, when=with_settings
    )
    """The setting of deterministic algorithms is the same behind every call."""

    test_tensors_without_data_have_a_form = Row("ALIAS-09", Script("scatter_add"), judge_forms, when=without_data)
    """On fake and meta tensors the result has its shape, dtype and device."""

    test_an_exported_program_gives_the_same = Row("ALIAS-09", Script("scatter_add"), judge_programs, when=exported)
    """Exported and run, it gives the bits of the eager call and writes what that writes."""

    test_a_compiled_graph_gives_the_same = Row("ALIAS-10", Script("scatter_add"), judge_programs, when=compiled)
    """Compiled as one graph, it gives the values and gradients of the eager call, or is refused."""
