"""RULE: configurations that must be built, those that must be refused, and those that may be."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.chapters.config_rules.judge.changed_settings import judge_changed_later
from moe_conformance.chapters.config_rules.judge.config_rules import judge_packed
from moe_conformance.chapters.config_rules.judge.resolved_settings import (
    judge_changes,
    judge_refusals,
    judge_rule,
    judge_shown,
    judge_unknown,
)
from moe_conformance.chapters.config_rules.workloads import config_rules
from moe_conformance.chapters.config_rules.workloads.settings import CHANGING, LATER, SHOWN, UNKNOWN, workload_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_outputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ON_CONFIG_RULES, ON_SESSION, ExchangeStep
from moe_conformance.workloads.records.workload import Workload


def _of(rule: str) -> Callable[[Workload], bool]:
    return lambda workload: workload.name == workload_of(rule)


def _named(name: str) -> Callable[[Workload], bool]:
    return lambda workload: workload.name == name


def _of_rules(workload: Workload) -> bool:
    return workload.name not in (SHOWN, UNKNOWN, LATER)


def _may_change(workload: Workload) -> bool:
    return workload.name in map(workload_of, CHANGING)


class TestPackedSequences:
    @requirement("RULE-25", run=ON_SESSION, when=lambda workload: workload.name == config_rules.BUILT)
    def test_all_gathers_alone_may_refuse_them(self, outcome: Outcome, tally: Tally) -> None:
        """An all-to-all and a fused exchange build with packed sequences; others build or raise on every rank."""
        judge_packed(outcome, tally)

    @requirement("RULE-25", run=ExchangeStep(option="packing"))
    def test_who_takes_them_exchanges_them_right(self, reading: Reading, tally: Tally) -> None:
        """With packed sequences each pair is delivered once and outputs are correct, with any T on each rank."""
        judge_deliveries(reading, tally)
        judge_form(reading, tally)
        judge_outputs(reading, tally)


class TestWhatIsTold:
    @requirement("RULE-01", run=ON_CONFIG_RULES, when=_of_rules)
    def test_refusals_have_a_message_and_are_the_same_on_all_ranks(self, outcome: Outcome, tally: Tally) -> None:
        """Settings are refused while they are resolved, by the same error on all ranks."""
        judge_refusals(outcome, tally)

    @requirement("RULE-02", run=ON_CONFIG_RULES, when=_named(SHOWN))
    def test_valid_options_are_resolved_to_what_was_asked(self, outcome: Outcome, tally: Tally) -> None:
        """Every option appears in what was built, with its value."""
        judge_shown(outcome, tally)

    @requirement("RULE-03", run=ON_CONFIG_RULES, when=_may_change)
    def test_changed_options_are_warned_of(self, outcome: Outcome, tally: Tally) -> None:
        """What runs with another value than asked is warned of, and shown alike on all ranks."""
        judge_changes(outcome, tally)

    @requirement("RULE-04", run=ON_CONFIG_RULES, when=_named(UNKNOWN))
    def test_unknown_options_and_values_are_refused(self, outcome: Outcome, tally: Tally) -> None:
        """Misspelt and empty names are never taken for the default."""
        judge_unknown(outcome, tally)

    @requirement("RULE-05", run=ON_CONFIG_RULES, when=_named(LATER))
    def test_a_change_reaches_every_layer_or_none(self, outcome: Outcome, tally: Tally) -> None:
        """After a change every layer has the settings of one that is built with them, or the change raises."""
        judge_changed_later(outcome, tally)


class TestOverlap:
    @requirement("RULE-06", run=ON_CONFIG_RULES, when=_of("RULE-06"))
    def test_one_rank_has_nothing_to_overlap(self, outcome: Outcome, tally: Tally) -> None:
        """With ep = 1 overlap is refused or openly off."""
        judge_rule(outcome, "RULE-06", tally)

    @requirement("RULE-07", run=ON_CONFIG_RULES, when=_of("RULE-07"))
    def test_one_expert_or_none_has_nothing_to_overlap(self, outcome: Outcome, tally: Tally) -> None:
        """Without experts, or with one, overlap is refused or openly off."""
        judge_rule(outcome, "RULE-07", tally)

    @requirement("RULE-08", run=ON_CONFIG_RULES, when=_of("RULE-08"))
    def test_an_all_gather(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap of an all-gather is refused or honoured, and of an all-to-all or a fused exchange accepted."""
        judge_rule(outcome, "RULE-08", tally)

    @requirement("RULE-09", run=ON_CONFIG_RULES, when=_of("RULE-09"))
    def test_its_dtype(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap in float32 or float64 is refused or honoured, and in bfloat16 and float16 accepted."""
        judge_rule(outcome, "RULE-09", tally)

    @requirement("RULE-10", run=ON_CONFIG_RULES, when=_of("RULE-10"))
    def test_stages_that_are_not_divided(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with pp > 1 and no virtual stages is refused or honoured."""
        judge_rule(outcome, "RULE-10", tally)

    @requirement("RULE-11", run=ON_CONFIG_RULES, when=_of("RULE-11"))
    def test_full_recomputation(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with recomputation of whole layers is refused or honoured."""
        judge_rule(outcome, "RULE-11", tally)

    @requirement("RULE-12", run=ON_CONFIG_RULES, when=_of("RULE-12"))
    def test_a_method_of_recomputation(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with a method of choosing recomputed layers is refused or honoured."""
        judge_rule(outcome, "RULE-12", tally)

    @requirement("RULE-13", run=ON_CONFIG_RULES, when=_of("RULE-13"))
    def test_a_number_of_recomputed_layers(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with a number of recomputed layers, 0 too, is refused or honoured."""
        judge_rule(outcome, "RULE-13", tally)

    @requirement("RULE-14", run=ON_CONFIG_RULES, when=_of("RULE-14"))
    def test_recomputation_of_the_moe_layer(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with recomputation of the MoE layer is refused or honoured."""
        judge_rule(outcome, "RULE-14", tally)

    @requirement("RULE-15", run=ON_CONFIG_RULES, when=_of("RULE-15"))
    def test_overlap_of_shared_experts(self, outcome: Outcome, tally: Tally) -> None:
        """Both overlaps together, and one of shared experts that are not there, are not built silently."""
        judge_rule(outcome, "RULE-15", tally)

    @requirement("RULE-16", run=ON_CONFIG_RULES, when=_of("RULE-16"))
    def test_several_prediction_layers(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with two layers of multi-token prediction is refused or honoured."""
        judge_rule(outcome, "RULE-16", tally)

    @requirement("RULE-17", run=ON_CONFIG_RULES, when=_of("RULE-17"))
    def test_a_graph_of_what_is_overlapped(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap under a graph of the MoE layer, the MLP or everything is refused or honoured."""
        judge_rule(outcome, "RULE-17", tally)

    @requirement("RULE-18", run=ON_CONFIG_RULES, when=_of("RULE-18"))
    def test_an_input_that_is_freed(self, outcome: Outcome, tally: Tally) -> None:
        """Overlap with offloading of an input that the kernel frees is refused or honoured."""
        judge_rule(outcome, "RULE-18", tally)


class TestVersions:
    @requirement("RULE-19", run=ON_CONFIG_RULES, when=_of("RULE-19"))
    def test_are_compared_as_versions(self, outcome: Outcome, tally: Tally) -> None:
        """What needs a newer library is refused, and with 2.10 where 2.9 is needed accepted."""
        judge_rule(outcome, "RULE-19", tally)


class TestDeferredWeightGradients:
    @requirement("RULE-20", run=ON_CONFIG_RULES, when=_of("RULE-20"))
    def test_without_overlap(self, outcome: Outcome, tally: Tally) -> None:
        """Deferral without overlap is refused or honoured."""
        judge_rule(outcome, "RULE-20", tally)

    @requirement("RULE-21", run=ON_CONFIG_RULES, when=_of("RULE-21"))
    def test_under_a_graph_of_their_products(self, outcome: Outcome, tally: Tally) -> None:
        """Deferral under a graph needs the product to accumulate, or is refused or honoured."""
        judge_rule(outcome, "RULE-21", tally)

    @requirement("RULE-22", run=ON_CONFIG_RULES, when=_of("RULE-22"))
    def test_under_a_graph_with_a_bias(self, outcome: Outcome, tally: Tally) -> None:
        """Deferral under a graph of attention with a bias is refused or honoured."""
        judge_rule(outcome, "RULE-22", tally)


class TestKernels:
    @requirement("RULE-23", run=ON_CONFIG_RULES, when=_of("RULE-23"))
    def test_named_beside_another_dispatcher(self, outcome: Outcome, tally: Tally) -> None:
        """A kernel's name that has no effect is refused or openly dropped."""
        judge_rule(outcome, "RULE-23", tally)

    @requirement("RULE-24", run=ON_CONFIG_RULES, when=_of("RULE-24"))
    def test_that_are_absent(self, outcome: Outcome, tally: Tally) -> None:
        """A kernel that is absent on any rank is refused, or openly replaced together with its dispatcher."""
        judge_rule(outcome, "RULE-24", tally)


class TestSizes:
    @requirement("RULE-26", run=ON_CONFIG_RULES, when=_of("RULE-26"))
    def test_top_k_of_the_experts(self, outcome: Outcome, tally: Tally) -> None:
        """K < 1, K > E and E < 1 are refused, and K = E is accepted."""
        judge_rule(outcome, "RULE-26", tally)

    @requirement("RULE-27", run=ON_CONFIG_RULES, when=_of("RULE-27"))
    def test_groups_of_the_experts(self, outcome: Outcome, tally: Tally) -> None:
        """Groups that do not divide E or do not hold K experts are refused, as one size without the other."""
        judge_rule(outcome, "RULE-27", tally)
