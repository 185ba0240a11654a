"""FORCE: routers with forced routing, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.chapters.forcing.judge.forced_bias_spread import judge_spread
from moe_conformance.chapters.forcing.judge.forced_draws import (
    judge_bias_draws,
    judge_bias_in_turn,
    judge_bias_on_ranks,
    judge_random,
)
from moe_conformance.chapters.forcing.judge.forced_hot import (
    judge_alternating,
    judge_hot_expert,
    judge_hot_node,
    judge_hot_rank,
    judge_ratio,
    judge_strategies_refused,
)
from moe_conformance.chapters.forcing.judge.forced_report import (
    judge_nothing_reported,
    judge_reported,
    judge_strategy_in_force,
)
from moe_conformance.chapters.forcing.judge.forced_routes import judge_reported_routes
from moe_conformance.chapters.forcing.judge.forced_routing import (
    judge_forced_groups,
    judge_forced_loads,
    judge_forced_weights,
    judge_loads_over_ranks,
    judge_masked_weights,
    judge_straight_through,
)
from moe_conformance.chapters.forcing.workloads.forcing import (
    beside_forced,
    beside_others,
    bias_decides_alone,
    biased,
    draws_at_random,
    forces_ids,
    forces_logits,
    several_sources,
    with_deviations,
)
from moe_conformance.chapters.forcing.workloads.hot import REFUSED
from moe_conformance.judging.observed.aliasing import judge_state
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.routes import (
    judge_choices_behind_draws,
    judge_same_bits,
    judge_same_choices,
)
from moe_conformance.judging.shared.equivalence.runs import RunTwins
from moe_conformance.judging.shared.router.capacity import judge_fit
from moe_conformance.judging.shared.router.routers import judge_load
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ON_SESSION, ExchangeStep, RouterStep
from moe_conformance.workloads.records.workload import Workload


class TestRoutes:
    @requirement("FORCE-02", run=RouterStep(forced="routes"))
    def test_the_reported_load_is_that_of_the_forced_ids(self, reading: Reading, tally: Tally) -> None:
        """With forced routing tokens have K different experts, and the router reports the load of each."""
        judge_load(reading, tally)

    @requirement("FORCE-03", run=RouterStep(forced="routes"), when=forces_ids)
    def test_round_robin_balances_every_rank(self, reading: Reading, tally: Tally) -> None:
        """With round robin the loads of experts differ by at most one."""
        judge_forced_loads(reading, tally)

    @requirement("FORCE-03", run=RouterStep(forced="routes"), when=forces_ids)
    def test_round_robin_draws_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Round robin gives the same routes whatever the random state."""
        judge_same_choices(reading, twins(determinism.seeded(reading.outcome.workload)), tally)

    @requirement("FORCE-03", run=RouterStep(forced="draws"), when=forces_ids)
    def test_round_robin_balances_copies(self, reading: Reading, tally: Tally) -> None:
        """With round robin the loads of tokens held by all tp ranks differ by at most one on every rank."""
        judge_forced_loads(reading, tally)

    @requirement("FORCE-04", run=RouterStep(forced="routes"), when=several_sources)
    def test_round_robin_balances_all_ranks(self, reading: Reading, tally: Tally) -> None:
        """With round robin the loads of experts also differ by at most one over ranks of equally many tokens."""
        judge_loads_over_ranks(reading, tally)

    @requirement(
        "FORCE-18", run=RouterStep(forced="routes"), when=lambda workload: workload.config.routing.groups is not None
    )
    def test_groups_limit_forced_logits_and_no_forced_ids(self, reading: Reading, tally: Tally) -> None:
        """Forced logits select within the best groups of their own; forced ids ignore the group limit."""
        judge_forced_groups(reading, tally)


def by(*strategies: str) -> Callable[[Workload], bool]:
    """Return whether one of these strategies forces a router."""
    return lambda workload: workload.config.routing.forced[0][0] in strategies


class TestHot:
    @requirement("FORCE-09", run=RouterStep(forced="hot"), when=by("worst_rank"))
    def test_one_rank_gets_all_it_can(self, reading: Reading, tally: Tally) -> None:
        """With the worst-rank strategy all source ranks send one rank as many slots of each token as it has experts."""
        judge_hot_rank(reading, tally)

    @requirement("FORCE-13", run=RouterStep(forced="hot"), when=by("one_expert"))
    def test_one_expert_gets_every_token(self, reading: Reading, tally: Tally) -> None:
        """With the one-expert strategy an expert gets every token, and the others get equally many."""
        judge_hot_expert(reading, tally)

    @requirement("FORCE-14", run=RouterStep(forced="hot"), when=by("one_node"))
    def test_one_node_gets_all_it_can(self, reading: Reading, tally: Tally) -> None:
        """With the one-node strategy the experts of a node get as many slots of each token as possible, evenly."""
        judge_hot_node(reading, tally)

    @requirement("FORCE-15", run=RouterStep(forced="hot"), when=by("alternating"))
    def test_the_hot_rank_goes_round(self, reading: Reading, tally: Tally) -> None:
        """With the alternating strategy the hot rank is the next one in each forward, on all source ranks."""
        judge_alternating(reading, tally)

    @requirement("FORCE-21", run=RouterStep(forced="hot"), when=by("ratio"))
    def test_one_rank_gets_a_multiple_of_the_others(self, reading: Reading, tally: Tally) -> None:
        """With the ratio strategy one rank gets so many times the load of each other rank, which get equally many."""
        judge_ratio(reading, tally)

    @requirement("FORCE-02", run=RouterStep(forced="hot"))
    def test_the_reported_load_is_that_of_hot_ids(self, reading: Reading, tally: Tally) -> None:
        """With hot ranks tokens have K different experts, and the router reports the load of each."""
        judge_load(reading, tally)

    @requirement("FORCE-05", run=RouterStep(forced="hot"))
    def test_hot_experts_weigh_their_own_scores(self, reading: Reading, tally: Tally) -> None:
        """The weights of hot experts are their scores, normalised, with their gradients."""
        judge_forced_weights(reading, tally)


class TestDrops:
    @requirement("FORCE-19", run=RouterStep(forced="hot", capacity=True))
    def test_experts_keep_as_many_forced_tokens_as_fit(self, reading: Reading, tally: Tally) -> None:
        """A forced slot is dropped only where its expert is at capacity, as any other."""
        judge_fit(reading, tally)


class TestRefused:
    @requirement("FORCE-17", run=ON_SESSION, when=lambda workload: workload.name in REFUSED)
    def test_one_strategy_at_a_time(self, outcome: Outcome, tally: Tally) -> None:
        """A router with two strategies, or without the parameter of one, is refused on every rank."""
        judge_strategies_refused(outcome, tally)


class TestDraws:
    @requirement("FORCE-06", run=RouterStep(forced="draws"), when=draws_at_random)
    def test_random_logits_route_at_random(self, reading: Reading, tally: Tally) -> None:
        """Random logits load experts evenly up to chance, and differ between forwards and between tokens."""
        judge_random(reading, tally)

    @requirement("DET-03", run=RouterStep(forced="routes"), when=forces_logits)
    def test_draws_leave_other_generators_alone(self, reading: Reading, tally: Tally) -> None:
        """The generators of the process are where they would be without random logits."""
        judge_state(reading, tally)

    @requirement("DET-03", run=RouterStep(forced="draws"))
    def test_draws_and_those_of_others_do_not_meet(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """So are they after many draws, and the draws do not depend on their state."""
        judge_state(reading, tally)
        judge_choices_behind_draws(twins(determinism.behind_draws(reading.outcome.workload)), tally)

    @requirement("FORCE-08", run=RouterStep(forced="draws"), when=biased)
    def test_a_bias_has_the_deviation_that_was_asked_for(self, reading: Reading, tally: Tally) -> None:
        """Every expert has one bias for all tokens, of that deviation."""
        judge_bias_draws(reading, tally)

    @requirement("FORCE-10", run=RouterStep(forced="draws"), when=bias_decides_alone)
    def test_a_bias_is_drawn_anew_or_kept(self, reading: Reading, tally: Tally) -> None:
        """A positive deviation draws a bias in every forward, and a negative one draws one of every layer."""
        judge_bias_in_turn(reading, tally)

    @requirement("FORCE-11", run=RouterStep(forced="draws"), when=bias_decides_alone)
    def test_all_ranks_draw_the_same_bias(self, reading: Reading, tally: Tally) -> None:
        """The bias is the same on all ranks of a pipeline stage, also after a forward without tokens."""
        judge_bias_on_ranks(reading, tally)


class TestSpread:
    @requirement("FORCE-22", run=RouterStep(forced="spread"))
    def test_a_larger_bias_is_more_uneven(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """The most loaded of eight ranks has more with a larger deviation of the bias."""
        judge_spread(reading, twins(with_deviations(reading.outcome.workload)), tally)


class TestOthers:
    @requirement("FORCE-01", run=RouterStep(), when=lambda workload: workload.name == "route-groups-top2-softmax")
    def test_forced_routers_beside_change_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """A router without forced routing gives the same bits, whatever forces the routers beside it."""
        judge_same_bits(reading, twins(beside_forced(reading.outcome.workload)), tally)

    @requirement("FORCE-12", run=RouterStep(forced="draws"), when=beside_others)
    def test_a_kept_bias_belongs_to_its_router(self, reading: Reading, tally: Tally) -> None:
        """A kept bias has its own deviation and experts, whatever other routers of the process keep."""
        judge_bias_draws(reading, tally)


class TestWeights:
    @requirement("FORCE-05", run=RouterStep(forced="masked"))
    def test_forced_experts_that_are_masked_weigh_nothing(self, reading: Reading, tally: Tally) -> None:
        """A forced expert at -inf has the weight 0, and weights are finite where all of them are."""
        judge_masked_weights(reading, tally)

    @requirement("FORCE-05", run=RouterStep(forced="routes"), when=forces_ids)
    def test_forced_experts_weigh_their_own_scores(self, reading: Reading, tally: Tally) -> None:
        """The weights of forced experts are their scores, normalised, scaled and differentiated as usual."""
        judge_forced_weights(reading, tally)

    @requirement("FORCE-07", run=RouterStep(forced="routes"), when=forces_logits)
    def test_gradients_go_straight_through_forced_logits(self, reading: Reading, tally: Tally) -> None:
        """Tokens and parameters receive the gradient of forced logits, as for the router's own logits."""
        judge_straight_through(reading, tally)


class TestDelivered:
    @requirement("FORCE-20", run=ExchangeStep(routed="both forced"))
    def test_what_a_forced_router_reports_is_delivered(self, reading: Reading, tally: Tally) -> None:
        """Where router and exchange are forced, rows, outputs and gradients are those of the reported ids."""
        judge_reported_routes(reading, tally)

    @requirement("FORCE-20", run=ExchangeStep(routed="router forced"))
    def test_an_exchange_need_not_know_that_ids_are_forced(self, reading: Reading, tally: Tally) -> None:
        """So they are where forcing is asked of the router alone."""
        judge_reported_routes(reading, tally)

    @requirement("FORCE-20", run=ExchangeStep(routed="exchange forced"))
    def test_an_exchange_does_not_assume_that_ids_are_forced(self, reading: Reading, tally: Tally) -> None:
        """So they are where it is asked of the exchange alone, and the router selects by its scores."""
        judge_reported_routes(reading, tally)


class TestReport:
    @requirement("FORCE-20", run=RouterStep(forced="routes"))
    def test_the_reported_strategy_is_in_force(self, reading: Reading, tally: Tally) -> None:
        """The strategy that a router reports is the one that was asked for, and its scores do not decide."""
        judge_strategy_in_force(reading, tally)

    @requirement("FORCE-23", run=RouterStep(forced="routes"))
    def test_forcing_is_reported(self, reading: Reading, tally: Tally) -> None:
        """A router reports its strategy and the deviation of its bias, resolved or in a warning."""
        judge_reported(reading, tally)

    @requirement("FORCE-23", run=RouterStep(forced="hot"))
    def test_hot_ranks_are_reported(self, reading: Reading, tally: Tally) -> None:
        """So it does with hot ranks, nodes and experts."""
        judge_reported(reading, tally)

    @requirement("FORCE-23", run=RouterStep(), when=lambda workload: workload.name == "route-groups-top2-softmax")
    def test_where_nothing_is_forced_nothing_is_reported(self, reading: Reading, tally: Tally) -> None:
        """A router without forced routing reports no strategy."""
        judge_nothing_reported(reading, tally)
