"""ROUTE: scores, selection and weights of a router, and their gradients."""

from __future__ import annotations

from moe_conformance.chapters.determinism.workloads import recomputed_noise
from moe_conformance.chapters.forcing.workloads.forcing import holds_copies
from moe_conformance.chapters.routing.judge.extreme_logits import (
    judge_extreme,
    judge_extreme_choice,
    judge_extreme_dx,
    judge_extreme_weights,
    judge_spoilt_routes,
)
from moe_conformance.chapters.routing.judge.gate_bias import judge_gate_bias
from moe_conformance.chapters.routing.judge.initial import judge_initial
from moe_conformance.chapters.routing.judge.jitter import judge_evaluation, judge_jitter
from moe_conformance.chapters.routing.judge.near_biases import judge_near_biases
from moe_conformance.chapters.routing.judge.replay import judge_lacking, judge_places, judge_replayed_weights
from moe_conformance.chapters.routing.judge.tp_duplicated_tokens import judge_copies
from moe_conformance.chapters.routing.judge.wide import judge_layer_dtype, judge_wide
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.routes import judge_recomputed, judge_same_routes
from moe_conformance.judging.shared.equivalence.runs import RunTwins
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
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
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
    @requirement("ROUTE-01", run=RouterStep())
    def test_the_best_experts_are_chosen(self, reading: Reading, tally: Tally) -> None:
        """Every token gets K different experts with the highest selection scores."""
        judge_selection(reading, tally)

    @requirement("ROUTE-03", run=RouterStep(), when=is_biased)
    def test_a_bias_selects_and_does_not_weigh(self, reading: Reading, tally: Tally) -> None:
        """The expert bias changes the selection, and no weight of a selected expert."""
        judge_bias(reading, tally)

    @requirement("ROUTE-03", run=RouterStep(), when=is_biased_alone)
    def test_a_bias_is_not_rounded(self, reading: Reading, tally: Tally) -> None:
        """Biases that differ by less than a step of the tokens' dtype decide between equal scores."""
        judge_near_biases(reading, tally)

    @requirement("ROUTE-04", run=RouterStep(), when=lambda workload: workload.config.routing.groups is not None)
    def test_groups_limit_the_choice(self, reading: Reading, tally: Tally) -> None:
        """Experts come from the best groups only."""
        judge_group_limit(reading, tally)

    @requirement("ROUTE-09", run=RouterStep())
    def test_the_reported_load_is_true(self, reading: Reading, tally: Tally) -> None:
        """The load that a router reports is the number of tokens that selected each expert."""
        judge_load(reading, tally)


class TestTwins:
    @requirement("ROUTE-12", run=RouterStep(), when=likened)
    def test_copies_are_routed_alike(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Ranks that hold the same tokens select the same experts for them with the same weights, ties included."""
        judge_same_routes(reading, twins(laws.shared(reading.outcome.workload)), tally, to_the_bit=True)

    @requirement("ROUTE-13", run=RouterStep(), when=likened)
    def test_other_tokens_do_not_matter(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """A token is routed alike at another place of another batch, and alone."""
        judge_same_routes(reading, twins(laws.recut(reading.outcome.workload)), tally, to_the_bit=False)


class TestCopies:
    @requirement("ROUTE-12", run=RouterStep(forced="draws"), when=holds_copies)
    def test_copies_are_forced_alike(self, reading: Reading, tally: Tally) -> None:
        """Ranks that hold the same tokens route them alike with forced routing too, of logits or of ids."""
        judge_copies(reading, tally)


class TestExtremes:
    @requirement("ROUTE-14", run=RouterStep(logits="extreme"), when=lambda workload: len(workload.batches) == 1)
    def test_logits_of_any_size_have_a_route(self, reading: Reading, tally: Tally) -> None:
        """Huge logits, equal ones and masks of -inf give K different experts, and finite weights and gradients."""
        judge_extreme(reading, tally)

    @requirement("ROUTE-01", run=RouterStep(logits="extreme"), when=lambda workload: len(workload.batches) == 1)
    def test_the_best_of_extreme_logits_are_chosen(self, reading: Reading, tally: Tally) -> None:
        """Huge logits, equal ones and masks of -inf give every token K different experts with the highest scores."""
        judge_extreme_choice(reading, tally)

    @requirement("ROUTE-02", run=RouterStep(logits="extreme"), when=lambda workload: len(workload.batches) == 1)
    def test_weights_are_the_scores_of_extreme_logits(self, reading: Reading, tally: Tally) -> None:
        """Huge logits, equal ones and masks of -inf give every selected expert the weight of its score."""
        judge_extreme_weights(reading, tally)

    @requirement("ROUTE-07", run=RouterStep(logits="extreme"), when=lambda workload: "B0" in workload.schedule)
    def test_tokens_beside_extreme_ones_keep_their_gradients(self, reading: Reading, tally: Tally) -> None:
        """Every token receives the gradient of its weights, whatever the logits of the others are."""
        judge_extreme_dx(reading, tally)

    @requirement("ROUTE-15", run=RouterStep(logits="extreme"), when=lambda workload: len(workload.batches) > 1)
    def test_a_spoilt_token_harms_no_other(self, outcome: Outcome, tally: Tally) -> None:
        """A NaN logit raises, or ids stay within range and the other tokens keep their routes."""
        judge_spoilt_routes(outcome, tally)


class TestWeights:
    @requirement("ROUTE-02", run=RouterStep())
    def test_weights_are_the_scores_of_the_chosen(self, reading: Reading, tally: Tally) -> None:
        """Every weight is the configured score of its expert."""
        judge_router_weights(reading, tally)

    @requirement("ROUTE-05", run=RouterStep(), when=lambda workload: workload.config.routing.normalise)
    def test_normalised_weights_are_divided_by_their_sum(self, reading: Reading, tally: Tally) -> None:
        """With normalisation weights are divided by their sum over the selected experts, without the expert bias."""
        judge_router_weights(reading, tally)

    @requirement("ROUTE-06", run=RouterStep(), when=lambda workload: workload.config.routing.scale != 1)
    def test_the_scale_multiplies_once(self, reading: Reading, tally: Tally) -> None:
        """The routing scale multiplies every weight once, normalised or not."""
        judge_router_weights(reading, tally)


def has_gate_bias(workload: Workload) -> bool:
    """Whether the router's logits have a bias."""
    return workload.config.gate_bias


class TestGateBias:
    @requirement("ROUTE-10", run=RouterStep(), when=has_gate_bias)
    def test_the_gate_bias_is_in_the_logits(self, reading: Reading, tally: Tally) -> None:
        """Experts are selected and weighed by logits with the gate bias, which gets its gradient over all ranks."""
        judge_gate_bias(reading, tally)


def is_wide(workload: Workload) -> bool:
    """Whether the router is asked to compute in a dtype of its own."""
    return workload.config.router_dtype is not None


class TestWideRouters:
    @requirement("ROUTE-11", run=RouterStep(), when=is_wide)
    def test_values_have_the_errors_of_the_wider_dtype(self, reading: Reading, tally: Tally) -> None:
        """Logits, choices and weights are those of the stored tokens and weight within the errors of that dtype."""
        judge_wide(reading, tally)

    @requirement("ROUTE-11", run=LayerStep(), when=is_wide)
    def test_a_layer_keeps_the_dtype_of_its_tokens(self, reading: Reading, tally: Tally) -> None:
        """The output of a layer has the dtype of its tokens, whatever that of its router is."""
        judge_layer_dtype(reading, tally)


def is_undecided(workload: Workload) -> bool:
    """Whether the router's weight is zero, so that no factor changes a logit."""
    return not bool(workload.parameters["router", None].any())


class TestRecomputation:
    @requirement("ROUTE-20", run=RouterStep(noise=True))
    def test_random_routes_are_recomputed(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With recomputation random routes and their gradients have the bits that they have without, from one seed."""
        judge_recomputed(twins(recomputed_noise(reading.outcome.workload)), tally)

    @requirement("ROUTE-20", run=LayerStep(noise=True), when=lambda workload: not is_undecided(workload))
    def test_layers_recompute_their_routes(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With recomputation a layer whose router has jitter gives the bits that it gives without, from one seed."""
        judge_recomputed(twins(recomputed_noise(reading.outcome.workload)), tally)


class TestNoise:
    @requirement("ROUTE-18", run=Script("router"))
    def test_the_input_of_the_gate_is_multiplied(self, outcome: Outcome, tally: Tally) -> None:
        """Logits in training are those of the input times independent factors in bounds, and so are gradients."""
        judge_jitter(outcome, tally)

    @requirement("ROUTE-18", run=LayerStep(noise=True), when=is_undecided)
    def test_experts_receive_the_input_itself(self, reading: Reading, tally: Tally) -> None:
        """Where jitter changes no weight it changes no output, no dtype and no gradient of a token."""
        judge_layer_outputs(reading, tally)
        judge_layer_dx(reading, tally)

    @requirement("ROUTE-19", run=Script("router"))
    def test_evaluation_has_no_noise(self, outcome: Outcome, tally: Tally) -> None:
        """In evaluation mode a router with jitter routes as one without, twice in the same way."""
        judge_evaluation(outcome, tally)


class TestInitialParameters:
    @requirement("ROUTE-23", run=ON_INITIAL_ROUTER)
    def test_all_ranks_begin_with_the_same_router(self, outcome: Outcome, tally: Tally) -> None:
        """The parameters of a new router are finite, tell experts apart, and are the same on all of its ranks."""
        judge_initial(outcome, tally)


def lacks(workload: Workload) -> bool:
    """Whether records are missing."""
    return workload.name == "replay-lacking"


class TestReplay:
    @requirement("ROUTE-16", run=ON_REPLAY_ROUTERS, when=lambda workload: not lacks(workload))
    def test_recorded_experts_are_weighed_by_present_logits(self, outcome: Outcome, tally: Tally) -> None:
        """Replay selects the recorded experts, with the weights and gradients that the present logits give them."""
        judge_replayed_weights(outcome, tally)

    @requirement("ROUTE-17", run=ON_REPLAY_ROUTERS, when=lambda workload: not lacks(workload))
    def test_records_return_to_their_place(self, outcome: Outcome, tally: Tally) -> None:
        """Every layer gets in every microbatch what it recorded there, in any order of passes."""
        judge_places(outcome, tally)

    @requirement("ROUTE-17", run=ON_REPLAY_ROUTERS, when=lacks)
    def test_a_record_that_is_missing_is_refused(self, outcome: Outcome, tally: Tally) -> None:
        """Without a record of its place, its tokens and its slots a router raises."""
        judge_lacking(outcome, tally)


class TestGradients:
    @requirement("ROUTE-07", run=RouterStep())
    def test_the_input_gets_the_gradient_of_the_weights(self, reading: Reading, tally: Tally) -> None:
        """The gradient of the weights reaches the tokens through scores and normalisation."""
        judge_router_dx(reading, tally)

    @requirement("ROUTE-08", run=RouterStep())
    def test_the_router_gets_the_gradient_of_all_ranks(self, reading: Reading, tally: Tally) -> None:
        """Every rank ends with the router gradient of the whole batch, in the declared convention."""
        judge_router_gradient(reading, tally)
