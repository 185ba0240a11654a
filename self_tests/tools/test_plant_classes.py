"""`tools/plant_classes.py`: what is left of a sentence, and which planted bugs show what others show."""

from __future__ import annotations

from self_tests.planted_bugs import find
from tools.plant_classes import again, changed, words

KEPT, SAME = "keeps-graphs", "keeps-bytes"  # of one class of native


class TestWords:
    def test_numbers_and_repetitions_are_left_out(self) -> None:
        """Two sentences of one cause at other places and by other amounts are the same."""
        one = "y of rank 0 token 3 holds 1.5; likely cause: a padding row (3); 2 more of the same kind. Also: y is 2"
        other = "y of rank 1 token 12 holds -2e-05; likely cause: a padding row (7)"
        assert "y of rank # token # holds #; likely cause: a padding row (#)" == words(one)
        assert words(one) == words(other)

    def test_the_cause_and_the_type_stay(self) -> None:
        """A cause behind the number of repetitions is told, and so are dtypes and the type of an exception."""
        told = "y is 2 in bfloat16; 3 more of the same kind; likely cause: it was rounded"
        assert "y is # in bfloat16; likely cause: it was rounded" == words(told)
        assert "rank # raised in forward:#: ValueError" == words(
            "rank 1 raised in forward:0: ValueError: no room for 7"
        )


class TestAgain:
    def test_what_shows_the_same_is_listed(self) -> None:
        """Both of two plants are listed with the other one; neither is if their words differ."""
        assert changed(find(KEPT)) == changed(find(SAME))
        said = ("COST-07 test_cost:test", "run", "rank 0 leaves 8 bytes")
        same = {f"{KEPT} repeated-even": [said], f"{SAME} repeated-even": [(*said[:2], "rank 1 leaves 9 bytes")]}
        assert {KEPT: [SAME], SAME: [KEPT]} == {p.name: [each.name for each in others] for p, others in again(same)}
        assert [] == list(again({**same, f"{SAME} repeated-even": [(*said[:2], "rank 1 leaves a file")]}))

    def test_a_bug_of_a_real_library_is_not_listed(self) -> None:
        """Whatever others show: taken-without-the-padding is one."""
        said = ("DROP-12 test_capacity:test", "combine", "y of rank 0 holds 8")
        shown = {"taken-without-the-padding to-capacity-uneven": [said], "padding-answered to-capacity-even": [said]}
        assert ["padding-answered"] == [plant.name for plant, _ in again(shown)]
