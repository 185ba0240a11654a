"""GRAD: all gradients: exact with the suite's probe, within bounds with the backend's experts."""

from __future__ import annotations

import torch

from moe_conformance.chapters.determinism.workloads import cleared, with_deterministic
from moe_conformance.chapters.gradients.judge.finite_differences import judge_differences
from moe_conformance.chapters.gradients.judge.gradient_accumulation import (
    judge_accumulation,
    judge_padding_gradients,
    judge_steps,
    judge_sum,
    large_and_small_alone,
)
from moe_conformance.chapters.gradients.judge.hooked import judge_hooked
from moe_conformance.chapters.gradients.judge.second_derivatives import (
    differentiated_twice,
    judge_second_derivatives,
)
from moe_conformance.chapters.gradients.judge.sharding import judge_sharded_gradients
from moe_conformance.chapters.gradients.workloads.gradients import ACCUMULATES
from moe_conformance.judging.observed.aliasing import judge_kept_gradients
from moe_conformance.judging.shared.equivalence.refusals import judge_with_a_graph
from moe_conformance.judging.shared.equivalence.runs import judge_repeated
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx, judge_required_gradients
from moe_conformance.judging.shared.exchange.identity_experts import (
    judge_answered_dweights,
    judge_answered_dx,
    judge_identity_dweights,
    judge_identity_dx,
)
from moe_conformance.judging.shared.exchange.row_gradients import judge_out_gradients, judge_rows_gradients
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_dweights,
    judge_expert_dx,
    judge_expert_gradients,
    judge_expert_outputs,
    judge_idle_expert_gradients,
    judge_replicas,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads import laws
from moe_conformance.workloads.records.features import (
    differentiated,
    has_idle_expert,
    likened,
    likened_once,
    likened_steps,
    likened_sums,
    shows,
)
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload


def fills_up_or_likened(workload: Workload) -> bool:
    """Whether experts are padded to capacity, or runs are compared with it anyway."""
    return workload.config.capacity.padded or likened_once(workload)


def in_every_library(workload: Workload) -> bool:
    """Whether equivalent runs are compared in bfloat16, which all libraries' experts have, or in float64."""
    return differentiated(workload) or (likened(workload) and workload.config.dtype == torch.bfloat16)


class TestExchange:
    test_upstream_gradient_reaches_the_experts = Row("GRAD-01", ExchangeStep(), judge_out_gradients)
    """The gradient at an expert output is the token's upstream gradient, times the weight if combine applies it."""

    test_tokens_get_the_sum_over_their_slots = Row("GRAD-02", ExchangeStep(), (judge_rows_gradients, judge_dx))
    """The gradient of a token is the sum of the gradients of its rows at the experts' input."""

    test_every_weight_gets_its_own_gradient = Row("GRAD-03", ExchangeStep(), judge_dweights)
    """The gradient of a weight is the dot product of its own expert's output and its token's upstream gradient."""

    test_tokens_get_their_gradient_through_the_same_tensor = Row(
        "GRAD-02", ExchangeStep(answered="identity"), judge_identity_dx
    )
    """Where experts return their input, the gradient of a token is the weighted upstream gradient."""

    test_weights_get_their_gradient_of_the_same_tensor = Row(
        "GRAD-03", ExchangeStep(answered="identity"), judge_identity_dweights
    )
    """Where experts return their input, the gradient of a weight is the dot product of row and upstream."""

    test_tokens_get_every_bit_of_their_gradient = Row(
        "GRAD-02", ExchangeStep(answered="identity of parts"), judge_answered_dx
    )
    """Upstream gradients and weights that use every bit of their dtype come back to their tokens unrounded."""

    test_weights_get_every_bit_of_their_gradient = Row(
        "GRAD-03", ExchangeStep(answered="identity of parts"), judge_answered_dweights
    )
    """The gradient of a weight is exact where it is one element of the expert output or of the upstream."""

    test_weights_get_theirs_where_tokens_ask_for_none = Row(
        "GRAD-15",
        ExchangeStep(unasked=True),
        judge_required_gradients,
        when=lambda workload: "x" in workload.twist.unasked,
    )
    """The weights have their gradients where x asks for none, which has none."""

    test_tokens_get_theirs_where_weights_ask_for_none = Row(
        "GRAD-15",
        ExchangeStep(unasked=True),
        judge_required_gradients,
        when=lambda workload: "weights" in workload.twist.unasked,
    )
    """The tokens have their gradients where the weights ask for none, which have none."""

    test_gradients_of_padding_reach_nothing = Row(
        "GRAD-09", ExchangeStep(option="capacity padding"), judge_padding_gradients, twins=laws.padding_gradients
    )
    """Large gradients at capacity padding change no gradient of a token or a weight."""

    test_gradients_of_what_is_left_over_reach_nothing = Row(
        "GRAD-09", ExchangeStep(), judge_padding_gradients, when=likened, twins=laws.padding_gradients
    )
    """Nor do those at rows that the exchange adds as padding, or has after the last row."""

    test_gradients_outlive_the_next_microbatch = Row(
        "GRAD-07", ExchangeStep(), judge_kept_gradients, when=lambda workload: len(workload.batches) > 1
    )
    """A gradient keeps its bytes while other microbatches run."""

    test_gradients_can_be_differentiated = Row(
        "GRAD-20", ExchangeStep(), judge_second_derivatives, when=likened, twins=differentiated_twice
    )
    """Derivatives of tokens' gradients by upstream gradients and weights are right, or refused on every rank."""


class TestOwnExperts:
    test_tokens_and_weights_get_the_dense_gradients = Row(
        "GRAD-04", ExpertsStep(), (judge_expert_dx, judge_expert_dweights)
    )
    """With the backend's experts, tokens and weights have the gradients of the dense formulation."""

    test_experts_get_the_gradient_of_all_ranks = Row("GRAD-05", ExpertsStep(), judge_expert_gradients)
    """Every owner of an expert ends with the gradient over all ranks' tokens, in the declared convention."""

    test_gradients_outlive_the_next_microbatch_of_experts = Row(
        "GRAD-07", ExpertsStep(), judge_kept_gradients, when=lambda workload: len(workload.batches) > 1
    )
    """With the backend's experts too, a gradient keeps its bytes while other microbatches run."""

    test_microbatches_add_up = Row("GRAD-11", ExpertsStep(), judge_sum, when=likened_sums, twins=laws.alone)
    """Experts end with the sum of the gradients that every microbatch gives alone."""

    test_small_gradients_are_not_rounded_away = Row(
        "GRAD-17", ExpertsStep(), judge_accumulation, when=shows(ACCUMULATES), twins=large_and_small_alone
    )
    """Small gradients that follow large ones are in the sum over microbatches, which has float32 in between."""

    test_hooks_see_what_is_accumulated = Row(
        "GRAD-11", ExpertsStep(), judge_hooked, when=lambda workload: workload.twist.hooked
    )
    """What autograd passes to hooks of a parameter in every backward adds up to its gradient, bit for bit."""

    test_the_next_step_starts_from_zero = Row("GRAD-11", ExpertsStep(), judge_steps, when=likened_steps, twins=cleared)
    """With gradients cleared after every microbatch, experts end with the gradients of that one alone."""

    test_what_asks_for_no_gradient_gets_none = Row(
        "GRAD-15", ExpertsStep(), judge_repeated, when=likened_once, twins=with_deterministic(laws.unasked)
    )
    """Tokens, weights or experts without requires_grad receive no gradient, all others the same bits."""

    test_experts_learn_behind_tokens_that_ask_for_no_gradient = Row(
        "GRAD-15", ExpertsStep(unasked=True), judge_expert_gradients
    )
    """Experts of which each has as many rows receive their gradients where the rows ask for none."""

    test_a_backward_may_keep_its_graph = Row(
        "GRAD-19", ExpertsStep(), judge_with_a_graph, when=likened_once, twins=laws.with_a_graph
    )
    """With create_graph tokens, weights and experts receive the gradients that they receive without."""

    test_gradients_behind_experts_can_be_differentiated = Row(
        "GRAD-20", ExpertsStep(), judge_second_derivatives, when=in_every_library, twins=differentiated_twice
    )
    """With the backend's experts, which are not linear, they are right too, or refused on every rank."""

    test_gradients_of_padding_reach_no_parameter = Row(
        "GRAD-09", ExpertsStep(), judge_padding_gradients, when=fills_up_or_likened, twins=laws.padding_gradients
    )
    """Large gradients at padding rows change no gradient of the experts' parameters either."""

    test_gradients_are_derivatives_of_the_forward = Row(
        "GRAD-10", ExpertsStep(), judge_differences, when=differentiated
    )
    """Along random directions in tokens, weights and parameters the slope of the loss is that of the gradients."""

    test_idle_experts_get_zeros = Row("GRAD-06", ExpertsStep(), judge_idle_expert_gradients, when=has_idle_expert)
    """An expert that no token reached ends with a gradient of zeros."""

    test_replicas_hold_the_same_bytes = Row(
        "GRAD-08", ExpertsStep(), judge_replicas, when=lambda workload: workload.layout.edp > 1
    )
    """Ranks that hold the same part of an expert end with the same gradient, bit for bit."""

    test_sharded_gradients_make_up_those_of_all_ranks = Row(
        "GRAD-16",
        ExpertsStep(option="sharding"),
        (judge_expert_outputs, judge_expert_dx, judge_expert_dweights, judge_sharded_gradients),
    )
    """Tokens, weights and experts have the same gradients where these, or parameters, are cut over replicas."""
