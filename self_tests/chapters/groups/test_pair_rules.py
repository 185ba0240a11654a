"""Which sizes divide, which groups have several stages and which are local, worked out twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.groups import members as first_groups
from moe_conformance.reference.groups import rules as first
from self_tests.chapters.groups.second import members as second
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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


class TestLocality:
    @pairs_agree
    @given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
    def test_verdicts_agree(self, domains: list[str], data: st.DataObject) -> None:
        """Both see a group as local whose members share a domain, in any order of members."""
        group = data.draw(st.lists(st.integers(0, len(domains) - 1), min_size=1, max_size=4))
        local = assert_agree(first.is_local, second.is_local, group, domains)
        assert local is first.is_local(frozenset(group), domains)


def first_reason(named: tuple[int, ...], *sizes: int) -> bool:
    """Whether these sizes divide; if not, the reason names the two that do not fit."""
    reason = first.indivisible(*sizes)
    assert reason is None or all(str(number) in reason for number in named), reason
    return reason is None


HOSTS, ABA = ["a"] * 8 + ["b"] * 8, ["a", "b", "a"]
STAGED = [[5, 0], [0, 1], [2, 3], [0, 2, 4], [1, 3, 0], [4]]

test_by_hand = by_hand(
    *rows(first_reason, lambda named, *sizes: second.divisible(*sizes),
        *(
            (f"E, F, ep, etp {sizes}", (named, *sizes), divisible)
            for sizes, named, divisible in [
                ((64, 96, 8, 4), (), True), ((8, 4, 8, 4), (), True), ((7, 5, 1, 1), (), True),
                ((60, 96, 8, 4), (60, 8), False), ((4, 96, 8, 4), (4, 8), False), ((0, 96, 1, 4), (0, 1), False),
                ((0, 96, 8, 4), (0, 8), False), ((-8, 96, 8, 4), (-8, 8), False), ((64, 98, 8, 4), (98, 4), False),
                ((64, 3, 8, 4), (3, 4), False), ((8, 0, 2, 2), (), REFUSED), ((8, 8, 0, 2), (), REFUSED),
                ((8, 8, 2, 0), (), REFUSED), ((8, 8, -2, 2), (), REFUSED),
            ]
        ),
    ),
    *rows(first.mixed_groups, second.mixed_groups,
        ("the last rank may be the odd one", (STAGED, [0, 0, 0, 1, 0, 1]), [[5, 0], [2, 3], [1, 3, 0]]),
        ("one stage", (STAGED, [7] * 6), []),
    ),
    # The domains of the members decide.
    *rows(first.is_local, second.is_local,
        *(
            (f"{group} of {domains}", (group, domains), local)
            for group, domains, local in [
                ([0, 8], HOSTS, False), ([0, 1], HOSTS, True), ([7, 8], HOSTS, False), ([0, 2], ABA, True),
                ([0, 1], ABA, False), ([2, 0, 1], ABA, False), ([2], ["a", "b", "c"], True),
                ([2, 3, 4], ["a", "a", "b", "b", "b"], True), ([1, 2], [("host", 0), ("host", 1), ("host", 1)], True),
                ([0, 0], ["a", "b"], True), ([], ABA, REFUSED), ([3], ABA, REFUSED), ([0, -1], ABA, REFUSED),
                ([1, 3], ABA, REFUSED),
            ]
        ),
        ("sixteen ranks in one domain", (list(range(16)), ["rack"] * 16), True),
    ),
)  # fmt: skip
