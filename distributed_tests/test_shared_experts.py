"""SHARE: whole layers with shared experts."""

from __future__ import annotations

from functools import partial

from moe_conformance.chapters.shared_experts.judge import judge_overlap
from moe_conformance.judging.observed.aliasing import judge_kept_gradients, judge_kept_outputs, judge_state
from moe_conformance.judging.shared.exchange.outputs import judge_inputs
from moe_conformance.judging.shared.layer.layer import (
    SHARED,
    judge_layer_dx,
    judge_layer_gradients,
    judge_layer_outputs,
    judge_layer_replicas,
    judge_lone_bias,
    judge_shared_unrouted,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads.layers import leaves_a_bias
from moe_conformance.workloads.records.runs import LayerStep
from moe_conformance.workloads.records.workload import Workload


def shares(workload: Workload) -> bool:
    """Whether there are shared experts."""
    return bool(workload.config.shared.ffn)


def shares_and_scales(workload: Workload) -> bool:
    """Whether there are shared experts and a routing scale."""
    return shares(workload) and workload.config.routing.scale != 1


def gates(workload: Workload) -> bool:
    """Whether the shared experts have a gate."""
    return workload.config.shared.gate


def cuts(workload: Workload) -> bool:
    """Whether shared experts are sharded over tp."""
    return shares(workload) and workload.layout.tp > 1


def fuses(workload: Workload) -> bool:
    """Whether there are several shared experts."""
    return len(workload.config.shared.ffn) > 1


def overlaps(workload: Workload) -> bool:
    """Whether shared experts run during the exchange (shared.overlap)."""
    return workload.config.shared.overlap


def several(workload: Workload) -> bool:
    """Whether there are several microbatches."""
    return len(workload.batches) > 1


class TestOutputs:
    test_shared_experts_are_added_once = Row("SHARE-01", LayerStep(), judge_layer_outputs, when=shares)
    """The output of every shared expert is added once to the routed output of every token."""

    test_shared_experts_are_not_routed = Row("SHARE-02", LayerStep(), judge_shared_unrouted, when=shares_and_scales)
    """No routing weight and no routing scale multiplies the shared experts' output."""

    test_a_gate_is_one_sigmoid_of_the_shared_part = Row(
        "SHARE-03",
        LayerStep(),
        (judge_layer_outputs, judge_layer_dx, judge_layer_gradients),
        ("shared_score",),
        when=gates,
    )
    """The gate multiplies the shared experts' output only, forward and backward, and has its own gradient."""


class TestGradients:
    test_tokens_get_both_gradients = Row("SHARE-04", LayerStep(), judge_layer_dx, when=shares)
    """The gradient of a token is the sum of those through routed and through shared experts."""

    test_shared_parameters_get_the_gradient_of_all_tokens = Row(
        "SHARE-05", LayerStep(), (partial(judge_layer_gradients, names=SHARED), judge_layer_replicas), when=shares
    )
    """Shared experts and their gate end with the gradient over all ranks' tokens, the same on all holders."""

    test_a_layer_is_one_function = Row(
        "GRAD-18", LayerStep(), (judge_layer_outputs, judge_layer_dx, judge_layer_gradients)
    )
    """Output and all gradients of a whole layer are those of the dense formulation."""


class TestBehaviour:
    test_a_layer_leaves_its_inputs_alone = Row("EXCH-08", LayerStep(), judge_inputs)
    """Tokens and upstream gradients hold the same bytes after the step."""

    test_a_layer_leaves_global_state_alone = Row("EXCH-11", LayerStep(), judge_state)
    """Random generators and the settings of the process are as before the step."""

    test_outputs_of_a_layer_outlive_other_microbatches = Row("EXCH-32", LayerStep(), judge_kept_outputs, when=several)
    """An output holds its bytes until its own backward has ended."""

    test_gradients_of_a_layer_outlive_the_next_microbatch = Row(
        "GRAD-07", LayerStep(), judge_kept_gradients, when=several
    )
    """The gradient of the tokens keeps its bytes while other microbatches run."""


class TestOverlap:
    test_overlap_changes_nothing = Row("SHARE-07", LayerStep(), judge_overlap, when=overlaps)
    """Shared experts give the same during the exchange as after it, and every collective is called once."""


class TestParts:
    test_shards_make_up_the_whole = Row(
        "SHARE-06", LayerStep(), (judge_layer_outputs, judge_layer_dx, judge_layer_gradients), SHARED, when=cuts
    )
    """A shared expert sharded over tp gives the output and the gradients of the whole one."""

    test_a_bias_is_added_as_it_is = Row("SHARE-06", LayerStep(), judge_lone_bias, when=leaves_a_bias)
    """Where every expert output is zero but for one output bias, the output is that bias, bit for bit."""

    test_several_are_as_one_wider_expert = Row(
        "SHARE-08", LayerStep(), (judge_layer_outputs, judge_layer_dx, judge_layer_gradients), SHARED, when=fuses
    )
    """Several shared experts add up, and each has its own gradient."""
