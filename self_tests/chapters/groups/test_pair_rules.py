"""Which sizes divide, which groups have several stages and which are local, worked out twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.groups import members as first_groups
from moe_conformance.reference.groups import rules as first
from self_tests.chapters.groups.second import rules as second
from self_tests.oracles.asked_twice import assert_agree, assert_refused

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class TestDivision:
    @settings(pairs_agree, max_examples=300)
    @given(st.integers(-2, 12), st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
    def test_verdicts_agree(self, experts: int, width: int, ep: int, etp: int) -> None:
        """Both refuse the same numbers, and the reason names the two that do not fit."""
        reason = first.indivisible(experts, width, ep, etp)
        assert second.divisible(experts, width, ep, etp) is (reason is None)
        if reason is not None:
            named = (experts, ep) if experts < ep or experts % ep else (width, etp)
            assert all(str(number) in reason for number in named)

    @pytest.mark.parametrize(
        ("sizes", "named"),
        [
            ((64, 96, 8, 4), None),
            ((8, 4, 8, 4), None),  # one each
            ((7, 5, 1, 1), None),
            ((60, 96, 8, 4), ("60", "8")),
            ((4, 96, 8, 4), ("4", "8")),
            ((0, 96, 1, 4), ("0", "1")),
            ((0, 96, 8, 4), ("0", "8")),
            ((-8, 96, 8, 4), ("-8", "8")),
            ((64, 98, 8, 4), ("98", "4")),
            ((64, 3, 8, 4), ("3", "4")),
        ],
    )
    def test_by_hand(self, sizes: tuple[int, int, int, int], named: tuple[str, str] | None) -> None:
        """E, F, ep, etp, and the numbers that the reason names."""
        reason = first.indivisible(*sizes)
        assert second.divisible(*sizes) is (named is None)
        assert (reason is None) is (named is None)
        assert named is None or all(number in str(reason) for number in named)

    @pytest.mark.parametrize("sizes", [(8, 0, 2, 2), (8, 8, 0, 2), (8, 8, 2, 0), (8, 8, -2, 2)])
    def test_refused(self, sizes: tuple[int, int, int, int]) -> None:
        """Sizes that make no layout are no question of this."""
        assert_refused(first.indivisible, second.divisible, *sizes)


class TestStages:
    @pytest.mark.parametrize("sizes", [(8, 2, 1, 2, 2, 2), (24, 2, 3, 2, 2, 3), (12, 1, 1, 3, 4, 1)])
    def test_groups_of_a_layout_have_one_stage(self, sizes: tuple[int, ...]) -> None:
        """All but those along pp, which have every stage."""
        world, tp, cp, pp, ep, etp = sizes
        made = first_groups.groups(world, tp, cp, pp, ep, etp)
        stages = [0] * world
        for group in made["pp"]:
            for stage, rank in enumerate(group):
                stages[rank] = stage
        for name in ("ep", "etp", "ep_etp", "edp", "tp", "dp_cp"):
            assert [] == assert_agree(first.mixed_groups, second.mixed_groups, made[name], stages)
        assert list(map(list, made["pp"])) == assert_agree(first.mixed_groups, second.mixed_groups, made["pp"], stages)

    @pairs_agree
    @given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
    def test_verdicts_agree(self, stages: list[int], data: st.DataObject) -> None:
        """Both name the same groups, of any ranks in any stages."""
        ranks = st.lists(st.integers(0, len(stages) - 1), min_size=1, max_size=4, unique=True)
        groups = data.draw(st.lists(ranks, max_size=4))
        assert_agree(first.mixed_groups, second.mixed_groups, groups, stages)

    def test_mixed_groups(self) -> None:
        """As given, in order; the last rank may be the odd one."""
        groups = [[5, 0], [0, 1], [2, 3], [0, 2, 4], [1, 3, 0], [4]]
        found = assert_agree(first.mixed_groups, second.mixed_groups, groups, [0, 0, 0, 1, 0, 1])
        assert [[5, 0], [2, 3], [1, 3, 0]] == found
        assert [] == assert_agree(first.mixed_groups, second.mixed_groups, groups, [7] * 6)


class TestLocality:
    @pytest.mark.parametrize(
        ("group", "domains", "expected"),
        [
            ([0, 8], ["a"] * 8 + ["b"] * 8, False),  # two ranks on two hosts
            ([0, 1], ["a"] * 8 + ["b"] * 8, True),
            ([7, 8], ["a"] * 8 + ["b"] * 8, False),
            (list(range(16)), ["rack"] * 16, True),  # sixteen ranks in one domain
            ([0, 2], ["a", "b", "a"], True),  # by identity, not by number
            ([0, 1], ["a", "b", "a"], False),
            ([2, 0, 1], ["a", "b", "a"], False),
            ([2], ["a", "b", "c"], True),
            ([2, 3, 4], ["a", "a", "b", "b", "b"], True),  # hosts of unequal size
            ([1, 2], [("host", 0), ("host", 1), ("host", 1)], True),
            ([0, 0], ["a", "b"], True),
        ],
    )
    def test_by_hand(self, group: list[int], domains: list[Any], expected: bool) -> None:
        """The domains of the members decide."""
        assert expected is second.is_local(group, domains)
        assert expected is first.is_local(group, domains)

    @pairs_agree
    @given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
    def test_verdicts_agree(self, domains: list[str], data: st.DataObject) -> None:
        """Both see a group as local whose members share a domain, in any order of members."""
        group = data.draw(st.lists(st.integers(0, len(domains) - 1), min_size=1, max_size=4))
        local = assert_agree(first.is_local, second.is_local, group, domains)
        assert local is first.is_local(frozenset(group), domains)

    @pytest.mark.parametrize("group", [[], [3], [0, -1], [1, 3]])
    def test_refused(self, group: list[int]) -> None:
        """Nobody, and ranks without a domain."""
        assert_refused(first.is_local, second.is_local, group, ["a", "b", "a"])
