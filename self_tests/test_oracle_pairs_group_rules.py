"""Which sizes divide, which stages agree and which groups are local, worked out twice."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance import topology
from reference import group_rules as first
from reference import groups as first_groups
from self_tests.asked_twice import assert_agree, assert_refused
from self_tests.oracles import group_rules as second
from self_tests.oracles import groups as second_groups

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Fold = list[tuple[str, int]]


class TestLayouts:
    @pytest.mark.parametrize("worlds", [range(1, 17), range(17, 31)], ids=str)
    def test_layouts_agree(self, worlds: range) -> None:
        """Both list the same layouts in the same order, and they are those that the topology knows."""
        for world in worlds:
            found = list(second.layouts(world))
            assert found == list(first.layouts(world))
            known = {(each.tp, each.cp, each.pp, each.ep, each.etp) for each in topology.layouts(world)}
            assert known == {tuple(sizes.values()) for sizes in found}
            assert len(known) == len(found)

    def test_by_hand(self) -> None:
        """A prime world has every axis whole or not at all; the folds share pp alone."""
        # pp = 3: all else 1. pp = 1: dense 1, tp or cp; expert 1, ep or etp: nine.
        assert 10 == len(first.layouts(3))
        names = ("tp", "cp", "pp", "ep", "etp")
        assert [dict.fromkeys(names, 1)] == list(first.layouts(1)) == list(second.layouts(1))
        assert dict.fromkeys(names, 2) in first.layouts(8)
        assert dict.fromkeys(names, 2) in first.layouts(24)
        assert dict.fromkeys(names, 2) not in first.layouts(12)
        assert {"tp": 2, "cp": 1, "pp": 1, "ep": 4, "etp": 1} in first.layouts(4)  # ep does not divide dp = 2
        assert list(names) == list(first.layouts(4)[0])

    @pytest.mark.parametrize("world", [0, -4])
    def test_no_world(self, world: int) -> None:
        """Both refuse a world of nobody."""
        assert_refused(first.layouts, lambda ranks: list(second.layouts(ranks)), world)


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


def folds(sizes: dict[str, int]) -> list[Fold]:
    """The axes in every order."""
    return [list(order) for order in permutations(sizes.items())]


class TestStages:
    @pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 3, "pp": 2}, {"pp": 4}, {"a": 1, "pp": 3, "b": 2}])
    def test_stages_agree(self, sizes: dict[str, int]) -> None:
        """Both count ranks with the first axis fastest, in every order of axes."""
        for fold in folds(sizes):
            assert_agree(first.stages, second.stages, fold)
            groups = assert_agree(first.stage_groups, second.stage_groups, fold)
            assert sorted(rank for group in groups for rank in group) == list(range(len(second.stages(fold))))

    @pytest.mark.parametrize(
        ("fold", "stages", "groups"),
        [
            ([("tp", 2), ("pp", 2)], [0, 0, 1, 1], [[0, 2], [1, 3]]),
            ([("pp", 2), ("tp", 2)], [0, 1, 0, 1], [[0, 1], [2, 3]]),
            ([("tp", 2), ("pp", 2), ("dp", 2)], [0, 0, 1, 1, 0, 0, 1, 1], [[0, 2], [1, 3], [4, 6], [5, 7]]),
            ([("tp", 3), ("pp", 1)], [0, 0, 0], [[0], [1], [2]]),
            ([("pp", 3)], [0, 1, 2], [[0, 1, 2]]),
        ],
    )
    def test_by_hand(self, fold: Fold, stages: list[int], groups: list[list[int]]) -> None:
        """The stride of pp is the product of the sizes before it."""
        assert stages == assert_agree(first.stages, second.stages, fold)
        assert groups == assert_agree(first.stage_groups, second.stage_groups, fold)

    @pytest.mark.parametrize("sizes", [(8, 2, 1, 2, 2, 2), (24, 2, 3, 2, 2, 3), (12, 1, 1, 3, 4, 1)])
    def test_with_pp_last_the_groups_are_those_of_the_layout(self, sizes: tuple[int, ...]) -> None:
        """Both folds of a valid layout agree, and no group of experts has two stages."""
        world, tp, cp, pp, ep, etp = sizes
        dense = [("tp", tp), ("cp", cp), ("dp", world // (tp * cp * pp)), ("pp", pp)]
        expert = [("etp", etp), ("ep", ep), ("edp", world // (etp * ep * pp)), ("pp", pp)]
        assert assert_agree(first.stages_agree, second.stages_agree, dense, expert)
        made = first_groups.groups(world, tp, cp, pp, ep, etp)
        assert made == second_groups.groups(second_groups.Sizes(*sizes))
        assert made["pp"] == first.stage_groups(dense)
        for name in ("ep", "etp", "ep_etp", "edp", "tp", "dp_cp"):
            assert () == first.mixed_groups(made[name], first.stages(dense))
        assert list(made["pp"]) == [tuple(group) for group in second.mixed_groups(made["pp"], second.stages(expert))]

    @pytest.mark.parametrize(
        ("dense", "expert", "expected"),
        [
            # pp before dp: its stride is tp cp = 2 and etp ep = 2, or 4.
            ([("tp", 2), ("pp", 2), ("dp", 2)], [("etp", 1), ("ep", 2), ("pp", 2), ("edp", 2)], True),
            ([("tp", 2), ("pp", 2), ("dp", 2)], [("etp", 1), ("ep", 4), ("pp", 2), ("edp", 1)], False),
            ([("tp", 2), ("dp", 2), ("pp", 2)], [("etp", 1), ("ep", 4), ("edp", 1), ("pp", 2)], True),
            ([("tp", 2), ("dp", 2), ("pp", 2)], [("pp", 2), ("ep", 4)], False),
            ([("tp", 4), ("pp", 1)], [("pp", 1), ("ep", 4)], True),
            ([("pp", 4), ("tp", 2)], [("pp", 2), ("ep", 4)], False),  # other stages
            ([("tp", 2), ("pp", 2)], [("ep", 2), ("pp", 2)], True),
        ],
    )
    def test_agreement_by_hand(self, dense: Fold, expert: Fold, expected: bool) -> None:
        """Where strides of pp differ, so do stages."""
        assert expected is assert_agree(first.stages_agree, second.stages_agree, dense, expert)
        assert expected is assert_agree(first.stages_agree, second.stages_agree, expert, dense)

    @pairs_agree
    @given(st.data())
    def test_agreement_in_every_order(self, data: st.DataObject) -> None:
        """Both judge any two orders of axes alike; where they agree, no group of the other fold has two stages."""
        pp, dp, ep = (data.draw(st.sampled_from(each)) for each in ([1, 2, 3], [2, 4], [1, 2, 4]))
        dense = data.draw(st.permutations([("tp", 2), ("dp", dp), ("pp", pp)]))
        expert = data.draw(st.permutations([("ep", ep), ("edp", 2 * dp // ep), ("pp", pp)]))
        agree = assert_agree(first.stages_agree, second.stages_agree, dense, expert)
        groups: list[Any] = []
        for axis in ("ep", "edp"):  # a group along an axis: pp of a fold that calls this axis so
            groups += second.stage_groups([("pp" if name == axis else f"old {name}", n) for name, n in expert])
        mixed = assert_agree(first.mixed_groups, second.mixed_groups, groups, second.stages(dense))
        assert not (agree and mixed)

    @pytest.mark.parametrize("fold", [[("tp", 2)], [], [("pp", 2), ("pp", 2)], [("tp", 0), ("pp", 2)], [("pp", -1)]])
    def test_no_fold(self, fold: Fold) -> None:
        """Without pp, with an axis twice, of sizes below one."""
        assert_refused(first.stages, second.stages, fold)
        assert_refused(first.stage_groups, second.stage_groups, fold)
        assert_refused(first.stages_agree, second.stages_agree, fold, fold)

    def test_folds_of_different_worlds(self) -> None:
        """They have no rank in common to compare."""
        question = [("tp", 2), ("pp", 2)], [("ep", 3), ("pp", 2)]
        assert_refused(first.stages_agree, second.stages_agree, *question)

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
