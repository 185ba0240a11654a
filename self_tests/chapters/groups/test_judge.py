"""Groups that a backend would build are held against the declared folding, name by name."""

from __future__ import annotations

import pytest

from moe_conformance.chapters.groups.judge.groups import judge_groups
from moe_conformance.contract.topology import Layout, RankLists
from moe_conformance.judging.verdict import Tally, WrongGroups

FOLDED = Layout(8, tp=2, ep=2, etp=2)  # dense: tp2 dp4; expert: etp2 ep2 edp2


def complaint(built: dict[str, RankLists], layout: Layout = FOLDED) -> WrongGroups:
    """Return what the judge complains of."""
    with pytest.raises(WrongGroups) as error:
        judge_groups(built, Tally(), layout)
    return error.value


class TestRightGroups:
    @pytest.mark.parametrize("layout", [FOLDED, Layout(1), Layout(8, tp=2, cp=2, pp=2, ep=2, etp=2)], ids=str)
    def test_every_name_is_counted(self, layout: Layout) -> None:
        """All names of a layout hold, and each rank is counted under each name."""
        tally = Tally()
        judge_groups(layout.groups(), tally, layout)
        assert (10 * layout.world, set(range(layout.world))) == (tally.elements, tally.ranks)

    def test_order_is_free(self) -> None:
        """Groups may be listed in any order, and so may the ranks of a group."""
        tally = Tally()
        turned = {name: tuple(group[::-1] for group in groups[::-1]) for name, groups in FOLDED.groups().items()}
        judge_groups(turned, tally, FOLDED)
        assert 80 == tally.elements

    def test_a_name_that_is_not_returned_is_not_judged(self) -> None:
        """Only what the backend returns is compared."""
        tally = Tally()
        judge_groups({"ep": FOLDED.groups()["ep"]}, tally, FOLDED)
        assert 8 == tally.elements

    def test_no_names_are_vacuous(self) -> None:
        """A backend that returns nothing has shown nothing."""
        tally = Tally()
        judge_groups({}, tally, FOLDED)
        assert tally.vacuous


class TestWrongGroups:
    def test_exchanged_axes_are_named(self) -> None:
        """Whose groups lie under another axis' name is said, with a rank, its group and the right one."""
        groups = FOLDED.groups()
        wrong = complaint({"ep": groups["etp"], "etp": groups["ep"]})
        assert "the ep group of rank 0 would be [0, 1] instead of [0, 2] in tp2-ep2-etp2-edp2" in wrong.sentence
        assert "the tp or etp groups were returned as ep" in wrong.sentence
        assert "the ep groups were returned as etp" in wrong.sentence
        assert ("groups", tuple(range(8))) == (wrong.stage, wrong.ranks)

    def test_only_wrong_ranks_are_blamed(self) -> None:
        """Where two groups exchange a rank, the ranks of these two are to blame and no others."""
        wrong = complaint({"tp": ((0, 1), (2, 3), (4, 6), (5, 7))})
        assert (4, 5, 6, 7) == wrong.ranks
        assert "the tp group of rank 4 would be [4, 6] instead of [4, 5]" in wrong.sentence

    def test_a_rank_without_a_group(self) -> None:
        """A rank that was left out is told."""
        assert (
            "rank 7 would be no group instead of [6, 7]" in complaint({"tp": ((0, 1), (2, 3), (4, 5), (6,))}).sentence
        )

    def test_a_rank_in_two_groups(self) -> None:
        """A rank that is in two groups is told both."""
        wrong = complaint({"tp": ((0, 1), (1, 2), (2, 3), (4, 5), (6, 7))})
        assert "rank 1 would be [0, 1] and [1, 2] instead of [0, 1]" in wrong.sentence

    def test_ranks_beyond_the_world(self) -> None:
        """A rank that the world does not have is told."""
        assert (
            "contain ranks [8, 9]; the world has 8"
            in complaint({"tp": ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))}).sentence
        )

    def test_unknown_names(self) -> None:
        """A misspelt axis is not passed over."""
        assert "unknown axis 'expert'; known: world" in complaint({"expert": FOLDED.groups()["ep"]}).sentence
