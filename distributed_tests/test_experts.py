"""EXPT: the backend's own experts with its exchange."""

from __future__ import annotations

from moe_conformance.chapters.experts.judge import judge_initial_experts, judge_matching_parts
from moe_conformance.chapters.experts.workloads import NEW
from moe_conformance.judging.observed.aliasing import judge_kept_outputs, judge_state
from moe_conformance.judging.shared.equivalence.runs import judge_same_answers
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs
from moe_conformance.judging.shared.experts.experts import (
    EXPERT_RESULTS,
    judge_expert_outputs,
    judge_idle_expert_gradients,
    judge_weight_place,
    judge_windows,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads import laws
from moe_conformance.workloads.records.features import bare_answers, has_filled_memory, outputs_meet_others
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Workload


def says_where_weights_go(workload: Workload) -> bool:
    """Whether the configuration asks for weights at the input or at the output."""
    return workload.config.weights_applied != "native"


def cut_over_etp(workload: Workload) -> bool:
    """Whether experts are sharded over etp, and the shards not once more over replicas."""
    return workload.layout.etp > 1 and workload.layout.edp == 1


class TestOwnExperts:
    test_output_is_that_of_the_dense_formulation = Row("EXPT-01", ExpertsStep(), judge_expert_outputs)
    """The output is the weighted sum of SwiGLU experts, within the rounding error of the dtype."""

    test_output_has_the_form_of_the_input = Row("EXCH-07", ExpertsStep(), judge_form)
    """With own experts too, the output has the input's form."""

    test_inputs_are_left_alone = Row("EXCH-08", ExpertsStep(), judge_inputs)
    """Own experts write into no token, id, weight or upstream gradient either."""

    test_global_state_is_left_alone = Row("EXCH-11", ExpertsStep(), judge_state)
    """Nor do they leave random generators, flags or threads otherwise than they were."""

    test_outputs_outlive_other_microbatches = Row(
        "EXCH-32", ExpertsStep(), judge_kept_outputs, when=outputs_meet_others
    )
    """The output of own experts holds its bytes until its own backward has ended."""

    test_uninitialised_memory_reaches_nothing = Row("EXCH-39", ExpertsStep(), EXPERT_RESULTS, when=has_filled_memory)
    """Outputs and gradients are right where uninitialised memory is full of NaN."""

    test_an_answer_does_not_depend_on_other_rows = Row(
        "EXPT-08", ExpertsStep(), judge_same_answers, when=bare_answers, twins=laws.among_fewer
    )
    """The output of an expert for a row has the same bits alone, among fewer rows and in another order."""

    test_windows_cover_every_parameter = Row("EXPT-02", ExpertsStep(), judge_windows)
    """The windows on the experts' parameters are views, disjoint and complete."""

    test_parts_of_an_expert_match = Row(
        "EXPT-05", ExpertsStep(), (judge_matching_parts, judge_expert_outputs), when=cut_over_etp
    )
    """The etp ranks of an expert hold the same part of gate, up and down; their outputs add up to its output."""

    test_biases_are_added_once = Row(
        "EXPT-06", ExpertsStep(option="biases"), (*EXPERT_RESULTS, judge_idle_expert_gradients)
    )
    """Biases are added once in all, the output bias behind down and times the weight of that place; gradients too.

    Every expert has its own, also in gradients: idle experts get zeros, and padding adds nothing.
    """

    test_the_activation_is_that_which_is_asked_for = Row("EXPT-07", ExpertsStep(option="activation"), EXPERT_RESULTS)
    """Outputs and gradients are those of the activation, its limit, slope and offset; what is cut passes none."""

    test_weights_are_applied_where_asked = Row("EXPT-03", ExpertsStep(), judge_weight_place, when=says_where_weights_go)
    """With weights_applied="input" weights are applied before the activation, with "output" after it."""


class TestNewExperts:
    test_replicas_are_equal_and_experts_differ = Row("EXPT-11", NEW, judge_initial_experts)
    """In a new model ranks that hold the same part of an expert hold the same bytes, and all other parts differ."""
