"""ROUTE: scores, selection and weights of a router, and their gradients."""

from __future__ import annotations

from moe_conformance.chapters.determinism.workloads import recomputed_noise
from moe_conformance.chapters.forcing.workloads.forcing import holds_copies
from moe_conformance.chapters.routing.judge.biases import judge_gate_bias, judge_near_biases
from moe_conformance.chapters.routing.judge.extreme_logits import (
    judge_extreme,
    judge_extreme_choice,
    judge_extreme_dx,
    judge_extreme_weights,
    judge_spoilt_routes,
)
from moe_conformance.chapters.routing.judge.initial import judge_initial
from moe_conformance.chapters.routing.judge.jitter import judge_evaluation, judge_jitter
from moe_conformance.chapters.routing.judge.replay import judge_lacking, judge_places, judge_replayed_weights
from moe_conformance.chapters.routing.judge.tp_duplicated_tokens import judge_copies
from moe_conformance.chapters.routing.judge.wide import judge_layer_dtype, judge_wide
from moe_conformance.judging.shared.equivalence.routes import judge_recomputed, judge_same_routes
from moe_conformance.judging.shared.layer.layer import judge_layer_dx, judge_layer_outputs
from moe_conformance.judging.shared.router.routers import (
    judge_bias,
    judge_group_limit,
    judge_load,
    judge_router_dx,
    judge_router_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads import laws
from moe_conformance.workloads.records.features import likened
from moe_conformance.workloads.records.runs import ON_INITIAL_ROUTER, ON_REPLAY_ROUTERS, LayerStep, RouterStep, Script
from moe_conformance.workloads.records.workload import Workload


def is_biased(workload: Workload) -> bool:
    """Whether there are an expert bias and scores that differ."""
    return workload.config.routing.balance_bias and not is_biased_alone(workload)


def is_biased_alone(workload: Workload) -> bool:
    """Whether there is an expert bias, and every score is equal, as all tokens are zero."""
    batches = [batch for ranks in workload.batches for batch in ranks]
    return workload.config.routing.balance_bias and not any(bool(batch.x_TD.any()) for batch in batches)


class TestSelection:
    test_the_best_experts_are_chosen = Row("ROUTE-01", RouterStep(), judge_selection)
    """Every token gets K different experts with the highest selection scores."""

    test_a_bias_selects_and_does_not_weigh = Row("ROUTE-03", RouterStep(), judge_bias, when=is_biased)
    """The expert bias changes the selection, and no weight of a selected expert."""

    test_a_bias_is_not_rounded = Row("ROUTE-03", RouterStep(), judge_near_biases, when=is_biased_alone)
    """Biases that differ by less than a step of the tokens' dtype decide between equal scores."""

    test_groups_limit_the_choice = Row(
        "ROUTE-04", RouterStep(), judge_group_limit, when=lambda workload: workload.config.routing.groups is not None
    )
    """Experts come from the best groups only."""

    test_the_reported_load_is_true = Row("ROUTE-09", RouterStep(), judge_load)
    """The load that a router reports is the number of tokens that selected each expert."""


class TestTwins:
    test_copies_are_routed_alike = Row(
        "ROUTE-12", RouterStep(), judge_same_routes, to_the_bit=True, when=likened, twins=laws.shared
    )
    """Ranks that hold the same tokens select the same experts for them with the same weights, ties included."""

    test_other_tokens_do_not_matter = Row(
        "ROUTE-13", RouterStep(), judge_same_routes, to_the_bit=False, when=likened, twins=laws.recut
    )
    """A token is routed alike at another place of another batch, and alone."""


class TestCopies:
    test_copies_are_forced_alike = Row("ROUTE-12", RouterStep(forced="draws"), judge_copies, when=holds_copies)
    """Ranks that hold the same tokens route them alike with forced routing too, of logits or of ids."""


class TestExtremes:
    test_logits_of_any_size_have_a_route = Row(
        "ROUTE-14", RouterStep(logits="extreme"), judge_extreme, when=lambda workload: len(workload.batches) == 1
    )
    """Huge logits, equal ones and masks of -inf give K different experts, and finite weights and gradients."""

    test_the_best_of_extreme_logits_are_chosen = Row(
        "ROUTE-01", RouterStep(logits="extreme"), judge_extreme_choice, when=lambda workload: len(workload.batches) == 1
    )
    """Huge logits, equal ones and masks of -inf give every token K different experts with the highest scores."""

    test_weights_are_the_scores_of_extreme_logits = Row(
        "ROUTE-02",
        RouterStep(logits="extreme"),
        judge_extreme_weights,
        when=lambda workload: len(workload.batches) == 1,
    )
    """Huge logits, equal ones and masks of -inf give every selected expert the weight of its score."""

    test_tokens_beside_extreme_ones_keep_their_gradients = Row(
        "ROUTE-07", RouterStep(logits="extreme"), judge_extreme_dx, when=lambda workload: workload.goes_backward(0)
    )
    """Every token receives the gradient of its weights, whatever the logits of the others are."""

    test_a_spoilt_token_harms_no_other = Row(
        "ROUTE-15", RouterStep(logits="extreme"), judge_spoilt_routes, when=lambda workload: len(workload.batches) > 1
    )
    """A NaN logit raises, or ids stay within range and the other tokens keep their routes."""


class TestWeights:
    test_weights_are_the_scores_of_the_chosen = Row("ROUTE-02", RouterStep(), judge_router_weights)
    """Every weight is the configured score of its expert."""

    test_normalised_weights_are_divided_by_their_sum = Row(
        "ROUTE-05", RouterStep(), judge_router_weights, when=lambda workload: workload.config.routing.normalise
    )
    """With normalisation weights are divided by their sum over the selected experts, without the expert bias."""

    test_the_scale_multiplies_once = Row(
        "ROUTE-06", RouterStep(), judge_router_weights, when=lambda workload: workload.config.routing.scale != 1
    )
    """The routing scale multiplies every weight once, normalised or not."""


def has_gate_bias(workload: Workload) -> bool:
    """Whether the router's logits have a bias."""
    return workload.config.gate_bias


class TestGateBias:
    test_the_gate_bias_is_in_the_logits = Row("ROUTE-10", RouterStep(), judge_gate_bias, when=has_gate_bias)
    """Experts are selected and weighed by logits with the gate bias, which gets its gradient over all ranks."""


def is_wide(workload: Workload) -> bool:
    """Whether the router is asked to compute in a dtype of its own."""
    return workload.config.router_dtype is not None


class TestWideRouters:
    test_values_have_the_errors_of_the_wider_dtype = Row("ROUTE-11", RouterStep(), judge_wide, when=is_wide)
    """Logits, choices and weights are those of the stored tokens and weight within the errors of that dtype."""

    test_a_layer_keeps_the_dtype_of_its_tokens = Row("ROUTE-11", LayerStep(), judge_layer_dtype, when=is_wide)
    """The output of a layer has the dtype of its tokens, whatever that of its router is."""


def is_undecided(workload: Workload) -> bool:
    """Whether the router's weight is zero, so that no factor changes a logit."""
    return not bool(workload.parameters["router", None].any())


class TestRecomputation:
    test_random_routes_are_recomputed = Row(
        "ROUTE-20", RouterStep(noise=True), judge_recomputed, twins=recomputed_noise
    )
    """With recomputation random routes and their gradients have the bits that they have without, from one seed."""

    test_layers_recompute_their_routes = Row(
        "ROUTE-20",
        LayerStep(noise=True),
        judge_recomputed,
        when=lambda workload: not is_undecided(workload),
        twins=recomputed_noise,
    )
    """With recomputation a layer whose router has jitter gives the bits that it gives without, from one seed."""


class TestNoise:
    test_the_input_of_the_gate_is_multiplied = Row("ROUTE-18", Script("router"), judge_jitter)
    """Logits in training are those of the input times independent factors in bounds, and so are gradients."""

    test_experts_receive_the_input_itself = Row(
        "ROUTE-18", LayerStep(noise=True), (judge_layer_outputs, judge_layer_dx), when=is_undecided
    )
    """Where jitter changes no weight it changes no output, no dtype and no gradient of a token."""

    test_evaluation_has_no_noise = Row("ROUTE-19", Script("router"), judge_evaluation)
    """In evaluation mode a router with jitter routes as one without, twice in the same way."""


class TestInitialParameters:
    test_all_ranks_begin_with_the_same_router = Row("ROUTE-23", ON_INITIAL_ROUTER, judge_initial)
    """The parameters of a new router are finite, tell experts apart, and are the same on all of its ranks."""


def lacks(workload: Workload) -> bool:
    """Whether records are missing."""
    return any("change" in call.given[0] for call in workload.calls)


class TestReplay:
    test_recorded_experts_are_weighed_by_present_logits = Row(
        "ROUTE-16", ON_REPLAY_ROUTERS, judge_replayed_weights, when=lambda workload: not lacks(workload)
    )
    """Replay selects the recorded experts, with the weights and gradients that the present logits give them."""

    test_records_return_to_their_place = Row(
        "ROUTE-17", ON_REPLAY_ROUTERS, judge_places, when=lambda workload: not lacks(workload)
    )
    """Every layer gets in every microbatch what it recorded there, in any order of passes."""

    test_a_record_that_is_missing_is_refused = Row("ROUTE-17", ON_REPLAY_ROUTERS, judge_lacking, when=lacks)
    """Without a record of its place, its tokens and its slots a router raises."""


class TestGradients:
    test_the_input_gets_the_gradient_of_the_weights = Row("ROUTE-07", RouterStep(), judge_router_dx)
    """The gradient of the weights reaches the tokens through scores and normalisation."""

    test_the_router_gets_the_gradient_of_all_ranks = Row("ROUTE-08", RouterStep(), judge_router_gradient)
    """Every rank ends with the router gradient of the whole batch, in the declared convention."""
