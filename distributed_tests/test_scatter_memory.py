"""ALIAS: rows added to an output that may lie in the memory of others, under grad modes and compilers."""

from __future__ import annotations

from moe_conformance.chapters.scatter.judge.scatter_memory import (
    judge_choice,
    judge_forms,
    judge_gradients,
    judge_modes,
    judge_programs,
    judge_routed,
    judge_setting,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.memory import Laid
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload


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
    @requirement("ALIAS-04", run=Script("combine_add"), when=related)
    def test_the_input_of_the_layer_keeps_its_bytes(self, outcome: Outcome, tally: Tally) -> None:
        """Routed rows are added to what a shared expert returned, whatever memory that shares with its input."""
        judge_routed(outcome, tally)

    @requirement("ALIAS-05", run=Script("combine_add"), when=related)
    def test_in_place_where_nobody_can_tell(self, outcome: Outcome, tally: Tally) -> None:
        """The sum is made in place only where output and tokens have no byte in common."""
        judge_choice(outcome, tally)

    @requirement("ALIAS-06", run=Script("combine_add"), when=with_gradients)
    def test_gradients_are_those_of_the_sum(self, outcome: Outcome, tally: Tally) -> None:
        """Output, source rows and what saved the output have the gradients of the out-of-place sum."""
        judge_gradients(outcome, tally)

    @requirement("ALIAS-07", run=Script("combine_add"), when=nested)
    def test_grad_modes_change_no_bit(self, outcome: Outcome, tally: Tally) -> None:
        """Every nesting of grad modes gives the same bits, and a gradient where grad is on."""
        judge_modes(outcome, tally)

    @requirement("ALIAS-08", run=Script("combine_add"), when=with_settings)
    def test_the_deterministic_setting_is_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """The setting of deterministic algorithms is the same behind every call."""
        judge_setting(outcome, tally)

    @requirement("ALIAS-09", run=Script("combine_add"), when=without_data)
    def test_tensors_without_data_have_a_form(self, outcome: Outcome, tally: Tally) -> None:
        """On fake and meta tensors the result has its shape, dtype and device."""
        judge_forms(outcome, tally)

    @requirement("ALIAS-09", run=Script("combine_add"), when=exported)
    def test_an_exported_program_gives_the_same(self, outcome: Outcome, tally: Tally) -> None:
        """Exported and run, it gives the bits of the eager call and writes what that writes."""
        judge_programs(outcome, tally)

    @requirement("ALIAS-10", run=Script("combine_add"), when=compiled)
    def test_a_compiled_graph_gives_the_same(self, outcome: Outcome, tally: Tally) -> None:
        """Compiled as one graph, it gives the values and gradients of the eager call, or is refused."""
        judge_programs(outcome, tally)


class TestScatterAddUnderModes:
    @requirement("ALIAS-06", run=Script("scatter_add"), when=with_gradients)
    def test_gradients_are_those_of_the_sum(self, outcome: Outcome, tally: Tally) -> None:
        """Output, source rows and what saved the output have the gradients of the out-of-place sum."""
        judge_gradients(outcome, tally)

    @requirement("ALIAS-07", run=Script("scatter_add"), when=nested)
    def test_grad_modes_change_no_bit(self, outcome: Outcome, tally: Tally) -> None:
        """Every nesting of grad modes gives the same bits, and a gradient where grad is on."""
        judge_modes(outcome, tally)

    @requirement("ALIAS-08", run=Script("scatter_add"), when=with_settings)
    def test_the_deterministic_setting_is_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """The setting of deterministic algorithms is the same behind every call."""
        judge_setting(outcome, tally)

    @requirement("ALIAS-09", run=Script("scatter_add"), when=without_data)
    def test_tensors_without_data_have_a_form(self, outcome: Outcome, tally: Tally) -> None:
        """On fake and meta tensors the result has its shape, dtype and device."""
        judge_forms(outcome, tally)

    @requirement("ALIAS-09", run=Script("scatter_add"), when=exported)
    def test_an_exported_program_gives_the_same(self, outcome: Outcome, tally: Tally) -> None:
        """Exported and run, it gives the bits of the eager call and writes what that writes."""
        judge_programs(outcome, tally)

    @requirement("ALIAS-10", run=Script("scatter_add"), when=compiled)
    def test_a_compiled_graph_gives_the_same(self, outcome: Outcome, tally: Tally) -> None:
        """Compiled as one graph, it gives the values and gradients of the eager call, or is refused."""
        judge_programs(outcome, tally)
