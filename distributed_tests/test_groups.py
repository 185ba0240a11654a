"""GROUP: which ranks belong together. The backend is asked; no group is built."""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.judging.groups import judge_groups
from moe_conformance.judging.verdict import Tally
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
