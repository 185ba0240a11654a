"""GROUP and EXPT: process groups, which rank holds which experts, and a model that is divided over them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.chapters.groups.judge.divisibility import judge_indivisible
from moe_conformance.chapters.groups.judge.groups import judge_groups, judge_source_groups
from moe_conformance.chapters.groups.judge.leftovers import judge_built_again
from moe_conformance.chapters.groups.judge.proxy_model import judge_proxy_gradients, judge_proxy_tokens
from moe_conformance.chapters.groups.judge.sizes import judge_sizes, judge_stages
from moe_conformance.chapters.groups.workloads.proxy_model import ProxyModelStep
from moe_conformance.contract.topology import Layout, RankLists
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.dispatch_layout import judge_transport
from moe_conformance.judging.shared.exchange.expert_placement import judge_placement
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.experts.experts import judge_expert_gradients, judge_replicas
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import GroupAnswer
from moe_conformance.spec import requirement
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import shows
from moe_conformance.workloads.records.runs import ON_SESSION, ExchangeStep, ExpertsStep, GroupAnswers, Script
from moe_conformance.workloads.records.workload import Wish, Workload


class TestFolding:
    @requirement("GROUP-01", run=GroupAnswers())
    def test_groups_fold_as_declared(self, group_lists: Mapping[Layout, Mapping[str, RankLists]], tally: Tally) -> None:
        """For every valid layout of a world, the backend's dense and expert groups are those of the declared order."""
        for layout, built in group_lists.items():
            judge_groups(built, tally, layout)

    @requirement("GROUP-02", run=GroupAnswers())
    def test_sizes_are_taken_if_and_only_if_they_make_a_layout(
        self, size_answers: Mapping[Wish, GroupAnswer], tally: Tally
    ) -> None:
        """Every layout of a world has groups or a documented refusal, and invalid sizes are refused."""
        judge_sizes(size_answers, tally)

    @requirement("GROUP-04", run=GroupAnswers())
    def test_no_group_has_ranks_of_two_stages(self, group_answers: Mapping[Wish, GroupAnswer], tally: Tally) -> None:
        """In every order of axes, dense groups and expert groups put every rank into the same pipeline stage."""
        judge_stages(group_answers, tally)


class TestDivision:
    test_what_does_not_divide_is_refused = Row(
        "GROUP-03", ON_SESSION, judge_indivisible, when=shows("sizes that do not divide")
    )
    """Experts or widths that the layout cannot divide are refused on every rank, with both numbers."""


class TestLeftovers:
    test_no_group_is_left_for_each_exchange = Row("GROUP-08", ON_SESSION, judge_built_again, when=shows("built again"))
    """Building one exchange again and again makes no further process groups."""


AT_SIZE = shows("many ranks")  # which are virtual


def at_size_with_replicas(workload: Workload) -> bool:
    """Whether several of many ranks hold the same part of an expert."""
    return AT_SIZE(workload) and workload.layout.edp > 1


class TestManyRanks:
    test_exchanges_follow_their_groups = Row(
        "GROUP-06",
        ExchangeStep(),
        (judge_source_groups, judge_deliveries, judge_outputs, judge_agreement),
        when=AT_SIZE,
    )
    """Every pair is delivered in its own exchange group and combined, and the collectives of the ranks match."""

    test_gradients_follow_their_groups = Row("GROUP-06", ExpertsStep(), judge_expert_gradients, when=AT_SIZE)
    """Every owner of an expert ends with the gradient of all tokens of its pipeline stage."""

    test_replicas_agree_at_size = Row("GROUP-06", ExpertsStep(), judge_replicas, when=at_size_with_replicas)
    """All replicas of an expert end with the same gradient, bit for bit, however many there are."""


class TestTransport:
    test_domains_of_the_members_decide = Row("GROUP-05", Script("transport"), judge_transport)
    """A group is local if and only if all its members are in one domain, whatever its size."""


class TestPlacement:
    test_experts_are_spread_over_ep_and_named_alike_by_shards_and_replicas = Row(
        "EXPT-04", ExchangeStep(), judge_placement
    )
    """Every expert is on one ep coordinate, and shards and replicas hold the same experts in the same order."""


class TestModel:
    test_a_divided_model_is_the_model = Row("GROUP-07", ProxyModelStep(), (judge_proxy_tokens, judge_proxy_gradients))
    """Outputs and all gradients are those of the same model on one device."""
