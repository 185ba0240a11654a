"""FORCE: routers with forced routing, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.chapters.forcing.judge.forced_bias_spread import judge_spread
from moe_conformance.chapters.forcing.judge.forced_draws import (
    judge_bias_draws,
    judge_bias_in_turn,
    judge_bias_on_ranks,
    judge_kept_apart,
    judge_random,
)
from moe_conformance.chapters.forcing.judge.forced_drops import judge_drawn_fit
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
from moe_conformance.judging.observed.aliasing import judge_state
from moe_conformance.judging.shared.equivalence.routes import (
    judge_choices_behind_draws,
    judge_same_bits,
    judge_same_choices,
)
from moe_conformance.judging.shared.router.capacity import judge_fit
from moe_conformance.judging.shared.router.routers import judge_load
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import shows
from moe_conformance.workloads.records.runs import ON_SESSION, ExchangeStep, RouterStep
from moe_conformance.workloads.records.workload import Workload


class TestRoutes:
    test_the_reported_load_is_that_of_the_forced_ids = Row("FORCE-02", RouterStep(forced="routes"), judge_load)
    """With forced routing tokens have K different experts, and the router reports the load of each."""

    test_round_robin_balances_every_rank = Row(
        "FORCE-03", RouterStep(forced="routes"), judge_forced_loads, when=forces_ids
    )
    """With round robin the loads of experts differ by at most one."""

    test_round_robin_draws_nothing = Row(
        "FORCE-03", RouterStep(forced="routes"), judge_same_choices, when=forces_ids, twins=determinism.seeded
    )
    """Round robin gives the same routes whatever the random state."""

    test_round_robin_balances_copies = Row("FORCE-03", RouterStep(forced="draws"), judge_forced_loads, when=forces_ids)
    """With round robin the loads of tokens held by all tp ranks differ by at most one on every rank."""

    test_round_robin_balances_all_ranks = Row(
        "FORCE-04", RouterStep(forced="routes"), judge_loads_over_ranks, when=several_sources
    )
    """With round robin the loads of experts also differ by at most one over ranks of equally many tokens."""

    test_groups_limit_forced_logits_and_no_forced_ids = Row(
        "FORCE-18",
        RouterStep(forced="routes"),
        judge_forced_groups,
        when=lambda workload: workload.config.routing.groups is not None,
    )
    """Forced logits select within the best groups of their own; forced ids ignore the group limit."""


def by(*strategies: str) -> Callable[[Workload], bool]:
    """Return whether one of these strategies forces a router."""
    return lambda workload: workload.config.routing.forced[0][0] in strategies


class TestHot:
    test_one_rank_gets_all_it_can = Row("FORCE-09", RouterStep(forced="hot"), judge_hot_rank, when=by("worst_rank"))
    """With the worst-rank strategy all source ranks send one rank as many slots of each token as it has experts."""

    test_one_expert_gets_every_token = Row(
        "FORCE-13", RouterStep(forced="hot"), judge_hot_expert, when=by("one_expert")
    )
    """With the one-expert strategy an expert gets every token, and the others get equally many."""

    test_one_node_gets_all_it_can = Row("FORCE-14", RouterStep(forced="hot"), judge_hot_node, when=by("one_node"))
    """With the one-node strategy the experts of a node get as many slots of each token as possible, evenly."""

    test_the_hot_rank_goes_round = Row("FORCE-15", RouterStep(forced="hot"), judge_alternating, when=by("alternating"))
    """With the alternating strategy the hot rank is the next one in each forward, on all source ranks."""

    test_one_rank_gets_a_multiple_of_the_others = Row(
        "FORCE-21", RouterStep(forced="hot"), judge_ratio, when=by("ratio")
    )
    """With the ratio strategy one rank gets so many times the load of each other rank, which get equally many."""

    test_the_reported_load_is_that_of_hot_ids = Row("FORCE-02", RouterStep(forced="hot"), judge_load)
    """With hot ranks tokens have K different experts, and the router reports the load of each."""

    test_hot_experts_weigh_their_own_scores = Row("FORCE-05", RouterStep(forced="hot"), judge_forced_weights)
    """The weights of hot experts are their scores, normalised, with their gradients."""


class TestDrops:
    test_experts_keep_as_many_forced_tokens_as_fit = Row("FORCE-19", RouterStep(forced="hot", capacity=True), judge_fit)
    """A forced slot is dropped only where its expert is at capacity, as any other."""

    test_experts_keep_as_many_drawn_tokens_as_fit = Row(
        "FORCE-19", RouterStep(forced="draws", capacity=True), judge_drawn_fit
    )
    """So is a slot that random or biased logits select."""


def builds_forced_routers(workload: Workload) -> bool:
    """Select scripts that build routers with forced routing."""
    return any(call.given[0]["config"].routing.forced for call in workload.calls)


class TestRefused:
    test_one_strategy_at_a_time = Row("FORCE-17", ON_SESSION, judge_strategies_refused, when=builds_forced_routers)
    """A router with two strategies, or without the parameter of one, is refused on every rank."""


class TestDraws:
    test_random_logits_route_at_random = Row("FORCE-06", RouterStep(forced="draws"), judge_random, when=draws_at_random)
    """Random logits load experts evenly up to chance, and differ between forwards and between tokens."""

    test_draws_leave_other_generators_alone = Row(
        "DET-03", RouterStep(forced="routes"), judge_state, when=forces_logits
    )
    """The generators of the process are where they would be without random logits."""

    test_draws_and_those_of_others_do_not_meet = Row(
        "DET-03", RouterStep(forced="draws"), (judge_state, judge_choices_behind_draws), twins=determinism.behind_draws
    )
    """So are they after many draws, and the draws do not depend on their state."""

    test_a_bias_has_the_deviation_that_was_asked_for = Row(
        "FORCE-08", RouterStep(forced="draws"), judge_bias_draws, when=biased
    )
    """Every expert has one bias for all tokens, of that deviation."""

    test_a_bias_is_drawn_anew_or_kept = Row(
        "FORCE-10", RouterStep(forced="draws"), judge_bias_in_turn, when=bias_decides_alone
    )
    """A positive deviation draws a bias in every forward, and a negative one draws one of every layer."""

    test_all_ranks_draw_the_same_bias = Row(
        "FORCE-11", RouterStep(forced="draws"), judge_bias_on_ranks, when=bias_decides_alone
    )
    """The bias is the same on all ranks of a pipeline stage, also after a forward without tokens."""


class TestSpread:
    test_a_larger_bias_is_more_uneven = Row(
        "FORCE-22", RouterStep(forced="spread"), judge_spread, twins=with_deviations
    )
    """The most loaded of eight ranks has more with a larger deviation of the bias."""


class TestOthers:
    test_forced_routers_beside_change_nothing = Row(
        "FORCE-01", RouterStep(), judge_same_bits, when=shows("no forced routing"), twins=beside_forced
    )
    """A router without forced routing gives the same bits, whatever forces the routers beside it."""

    test_a_kept_bias_belongs_to_its_router = Row(
        "FORCE-12", RouterStep(forced="draws"), (judge_bias_draws, judge_kept_apart), when=beside_others
    )
    """A kept bias has its own deviation and experts, whatever other routers keep; layers of equal settings keep two."""


class TestWeights:
    test_forced_experts_that_are_masked_weigh_nothing = Row(
        "FORCE-05", RouterStep(forced="masked"), judge_masked_weights
    )
    """A forced expert at -inf has the weight 0, and weights are finite where all of them are."""

    test_forced_experts_weigh_their_own_scores = Row(
        "FORCE-05", RouterStep(forced="routes"), judge_forced_weights, when=forces_ids
    )
    """The weights of forced experts are their scores, normalised, scaled and differentiated as usual."""

    test_gradients_go_straight_through_forced_logits = Row(
        "FORCE-07", RouterStep(forced="routes"), judge_straight_through, when=forces_logits
    )
    """Tokens and parameters receive the gradient of forced logits, as for the router's own logits."""


class TestDelivered:
    test_what_a_forced_router_reports_is_delivered = Row(
        "FORCE-20", ExchangeStep(routed="both forced"), judge_reported_routes
    )
    """Where router and exchange are forced, rows, outputs and gradients are those of the reported ids."""

    test_an_exchange_need_not_know_that_ids_are_forced = Row(
        "FORCE-20", ExchangeStep(routed="router forced"), judge_reported_routes
    )
    """So they are where forcing is asked of the router alone."""

    test_an_exchange_does_not_assume_that_ids_are_forced = Row(
        "FORCE-20", ExchangeStep(routed="exchange forced"), judge_reported_routes
    )
    """So they are where it is asked of the exchange alone, and the router selects by its scores."""


class TestReport:
    test_the_reported_strategy_is_in_force = Row("FORCE-20", RouterStep(forced="routes"), judge_strategy_in_force)
    """The strategy that a router reports is the one that was asked for, and its scores do not decide."""

    test_forcing_is_reported = Row("FORCE-23", RouterStep(forced="routes"), judge_reported)
    """A router reports its strategy and the deviation of its bias, resolved or in a warning."""

    test_hot_ranks_are_reported = Row("FORCE-23", RouterStep(forced="hot"), judge_reported)
    """So it does with hot ranks, nodes and experts."""

    test_where_nothing_is_forced_nothing_is_reported = Row(
        "FORCE-23", RouterStep(), judge_nothing_reported, when=shows("no forced routing")
    )
    """A router without forced routing reports no strategy."""
