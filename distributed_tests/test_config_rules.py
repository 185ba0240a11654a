"""RULE: configurations that must be built, those that must be refused, and those that may be."""

from __future__ import annotations

from moe_conformance.chapters.config_rules.judge.accepted_settings import judge_accepted
from moe_conformance.chapters.config_rules.judge.changed_settings import judge_changed_later
from moe_conformance.chapters.config_rules.judge.config_rules import judge_packed
from moe_conformance.chapters.config_rules.judge.resolved_settings import (
    judge_changes,
    judge_refusals,
    judge_rule,
    judge_shown,
    judge_unknown,
)
from moe_conformance.chapters.config_rules.workloads.settings import CHANGING, LATER, RULES, SHOWN, UNKNOWN
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_outputs
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import shows
from moe_conformance.workloads.records.runs import ON_CONFIG_RULES, ON_SESSION, AcceptedStep, ExchangeStep
from moe_conformance.workloads.records.workload import Workload


def packs(workload: Workload) -> bool:
    """Select scripts that build exchanges for packed sequences."""
    return any(call.given[0]["config"].padding.packed for call in workload.calls)


class TestPackedSequences:
    test_all_gathers_alone_may_refuse_them = Row("RULE-25", ON_SESSION, judge_packed, when=packs)
    """An all-to-all and a fused exchange build with packed sequences; others build or raise on every rank."""

    test_who_takes_them_exchanges_them_right = Row(
        "RULE-25", ExchangeStep(option="packing"), (judge_deliveries, judge_form, judge_outputs)
    )
    """With packed sequences each pair is delivered once and outputs are correct, with any T on each rank."""


class TestWhatIsTold:
    test_refusals_have_a_message_and_are_the_same_on_all_ranks = Row(
        "RULE-01", ON_CONFIG_RULES, judge_refusals, when=shows(*RULES)
    )
    """Settings are refused while they are resolved, by the same error on all ranks."""

    test_valid_options_are_resolved_to_what_was_asked = Row("RULE-02", ON_CONFIG_RULES, judge_shown, when=shows(SHOWN))
    """Every option appears in what was built, with its value."""

    test_changed_options_are_warned_of = Row("RULE-03", ON_CONFIG_RULES, judge_changes, when=shows(*CHANGING))
    """What runs with another value than asked is warned of, and shown alike on all ranks."""

    test_unknown_options_and_values_are_refused = Row("RULE-04", ON_CONFIG_RULES, judge_unknown, when=shows(UNKNOWN))
    """Misspelt and empty names are never taken for the default."""

    test_a_change_reaches_every_layer_or_none = Row("RULE-05", ON_CONFIG_RULES, judge_changed_later, when=shows(LATER))
    """After a change every layer has the settings of one that is built with them, or the change raises."""


class TestOverlap:
    test_one_rank_has_nothing_to_overlap = Row("RULE-06", ON_CONFIG_RULES, judge_rule, "RULE-06", when=shows("RULE-06"))
    """With ep = 1 overlap is refused or openly off."""

    test_one_expert_or_none_has_nothing_to_overlap = Row(
        "RULE-07", ON_CONFIG_RULES, judge_rule, "RULE-07", when=shows("RULE-07")
    )
    """Without experts, or with one, overlap is refused or openly off."""

    test_an_all_gather = Row("RULE-08", ON_CONFIG_RULES, judge_rule, "RULE-08", when=shows("RULE-08"))
    """Overlap of an all-gather is refused or honoured, and of an all-to-all or a fused exchange accepted."""

    test_its_dtype = Row("RULE-09", ON_CONFIG_RULES, judge_rule, "RULE-09", when=shows("RULE-09"))
    """Overlap in float32 or float64 is refused or honoured, and in bfloat16 and float16 accepted."""

    test_stages_that_are_not_divided = Row("RULE-10", ON_CONFIG_RULES, judge_rule, "RULE-10", when=shows("RULE-10"))
    """Overlap with pp > 1 and no virtual stages is refused or honoured."""

    test_full_recomputation = Row("RULE-11", ON_CONFIG_RULES, judge_rule, "RULE-11", when=shows("RULE-11"))
    """Overlap with recomputation of whole layers is refused or honoured."""

    test_a_method_of_recomputation = Row("RULE-12", ON_CONFIG_RULES, judge_rule, "RULE-12", when=shows("RULE-12"))
    """Overlap with a method of choosing recomputed layers is refused or honoured."""

    test_a_number_of_recomputed_layers = Row("RULE-13", ON_CONFIG_RULES, judge_rule, "RULE-13", when=shows("RULE-13"))
    """Overlap with a number of recomputed layers, 0 too, is refused or honoured."""

    test_recomputation_of_the_moe_layer = Row("RULE-14", ON_CONFIG_RULES, judge_rule, "RULE-14", when=shows("RULE-14"))
    """Overlap with recomputation of the MoE layer is refused or honoured."""

    test_overlap_of_shared_experts = Row("RULE-15", ON_CONFIG_RULES, judge_rule, "RULE-15", when=shows("RULE-15"))
    """Both overlaps together, and one of shared experts that are not there, are not built silently."""

    test_several_prediction_layers = Row("RULE-16", ON_CONFIG_RULES, judge_rule, "RULE-16", when=shows("RULE-16"))
    """Overlap with two layers of multi-token prediction is refused or honoured."""

    test_a_graph_of_what_is_overlapped = Row("RULE-17", ON_CONFIG_RULES, judge_rule, "RULE-17", when=shows("RULE-17"))
    """Overlap under a graph of the MoE layer, the MLP or everything is refused or honoured."""

    test_an_input_that_is_freed = Row("RULE-18", ON_CONFIG_RULES, judge_rule, "RULE-18", when=shows("RULE-18"))
    """Overlap with offloading of an input that the kernel frees is refused or honoured."""


class TestWhatIsAcceptedRuns:
    """Two microbatches, on two ranks: the oracle's values, those of the sequential step, and every option shows."""

    test_an_all_gather_that_is_overlapped = Row("RULE-08", AcceptedStep(), judge_accepted, "RULE-08")
    """An all-gather that is accepted with overlap is issued, and overlaps; so does an all-to-all."""

    test_any_dtype = Row("RULE-09", AcceptedStep(), judge_accepted, "RULE-09")
    """A step in a dtype that is accepted computes in it, and overlaps."""

    test_one_stage = Row("RULE-10", AcceptedStep(), judge_accepted, "RULE-10")
    """A step of one stage that is accepted overlaps."""

    test_full_recomputation_is_done = Row("RULE-11", AcceptedStep(), judge_accepted, "RULE-11")
    """Layers that are accepted for recomputation are computed again, and overlap."""

    test_a_method_of_recomputation = Row("RULE-12", AcceptedStep(), judge_accepted, "RULE-12")
    """With a method that is accepted the step computes the oracle's values, and overlaps."""

    test_a_number_of_recomputed_layers = Row("RULE-13", AcceptedStep(), judge_accepted, "RULE-13")
    """With a number that is accepted the step computes the oracle's values, and overlaps."""

    test_recomputation_of_the_moe_layer_is_done = Row("RULE-14", AcceptedStep(), judge_accepted, "RULE-14")
    """An MoE layer that is accepted for recomputation is computed again."""

    test_shared_experts_overlap_too = Row("RULE-15", AcceptedStep(), judge_accepted, "RULE-15")
    """Where both overlaps are accepted, both have an effect."""

    test_several_prediction_layers = Row("RULE-16", AcceptedStep(), judge_accepted, "RULE-16")
    """With prediction layers that are accepted the step computes the oracle's values, and overlaps."""

    test_a_graph_is_replayed = Row("RULE-17", AcceptedStep(), judge_accepted, "RULE-17")
    """A graph that is accepted is replayed with the values of its microbatch."""

    test_an_input_is_not_freed_too_early = Row("RULE-18", AcceptedStep(), judge_accepted, "RULE-18")
    """With offloading that is accepted gradients are those of the oracle."""

    test_deferral_alone_is_finished = Row("RULE-20", AcceptedStep(), judge_accepted, "RULE-20")
    """Gradients that are deferred without overlap are computed later, and before the step ends."""

    test_a_graph_defers_what_accumulates = Row("RULE-21", AcceptedStep(), judge_accepted, "RULE-21")
    """Gradients deferred under a graph are those of all microbatches."""

    test_a_graph_defers_with_a_bias = Row("RULE-22", AcceptedStep(), judge_accepted, "RULE-22")
    """Gradients deferred under a graph of attention with a bias are those of the oracle."""


class TestVersions:
    test_are_compared_as_versions = Row("RULE-19", ON_CONFIG_RULES, judge_rule, "RULE-19", when=shows("RULE-19"))
    """What needs a newer library is refused, and with 2.10 where 2.9 is needed accepted."""


class TestDeferredWeightGradients:
    test_without_overlap = Row("RULE-20", ON_CONFIG_RULES, judge_rule, "RULE-20", when=shows("RULE-20"))
    """Deferral without overlap is refused or honoured."""

    test_under_a_graph_of_their_products = Row("RULE-21", ON_CONFIG_RULES, judge_rule, "RULE-21", when=shows("RULE-21"))
    """Deferral under a graph needs the product to accumulate, or is refused or honoured."""

    test_under_a_graph_with_a_bias = Row("RULE-22", ON_CONFIG_RULES, judge_rule, "RULE-22", when=shows("RULE-22"))
    """Deferral under a graph of attention with a bias is refused or honoured."""


class TestKernels:
    test_named_beside_another_dispatcher = Row("RULE-23", ON_CONFIG_RULES, judge_rule, "RULE-23", when=shows("RULE-23"))
    """A kernel's name that has no effect is refused or openly dropped."""

    test_that_are_absent = Row("RULE-24", ON_CONFIG_RULES, judge_rule, "RULE-24", when=shows("RULE-24"))
    """A kernel that is absent on any rank is refused, or openly replaced together with its dispatcher."""


class TestSizes:
    test_top_k_of_the_experts = Row("RULE-26", ON_CONFIG_RULES, judge_rule, "RULE-26", when=shows("RULE-26"))
    """K < 1, K > E and E < 1 are refused, and K = E is accepted."""

    test_groups_of_the_experts = Row("RULE-27", ON_CONFIG_RULES, judge_rule, "RULE-27", when=shows("RULE-27"))
    """Groups that do not divide E or do not hold K experts are refused, as one size without the other."""
