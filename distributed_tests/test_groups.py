"""GROUP and EXPT: which ranks belong together, and which experts lie on which of them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.judging.dispatch_layout import judge_transport
from moe_conformance.judging.groups import judge_groups
from moe_conformance.judging.placement import judge_placement
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.topology import Layout, RankLists


class TestFolding:
    @requirement("GROUP-01", kind="groups")
    def test_groups_fold_as_declared(
        self, group_lists: Mapping[Layout, Mapping[str, RankLists]], tally: Tally
    ) -> None:
        """For every valid layout of a world, the backend's groups are those of the declared folding."""
        for layout, built in group_lists.items():
            judge_groups(built, layout, tally)


class TestTransport:
    @requirement("GROUP-05", kind="transport")
    def test_domains_of_the_members_decide(self, outcome: Outcome, tally: Tally) -> None:
        """A group is local if and only if all its members are in one domain, whatever its size."""
        judge_transport(outcome, tally)


class TestPlacement:
    @requirement("EXPT-04", kind="probe")
    def test_experts_are_spread_over_ep_and_named_alike_by_shards_and_replicas(
        self, outcome: Outcome, tally: Tally
    ) -> None:
        """Every expert is on one ep coordinate, and shards and replicas hold the same experts in the same order."""
        judge_placement(outcome, tally)
