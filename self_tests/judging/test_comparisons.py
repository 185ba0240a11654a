"""Tests of the driver of judges: what it counts, whom it blames, what it says."""

from __future__ import annotations

import inspect

import pytest

from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.verdict import Costly, Tally


@judge(Costly, "run")
def judge_below(numbers: list[int], limit: int) -> Comparisons:
    """Decide whether every number is below a limit."""
    for rank, number in enumerate(numbers):
        yield Comparison(rank, f"rank {rank} has {number}" if number >= limit else "", pairs=1, elements=2, worst=0.5)
    yield Note("; the limit is a note")


@judge(Costly, "run")
def judge_explained(faults: list[list[str]]) -> Comparisons:
    """Decide whether there are no faults, each with the kinds of its explanations."""
    for rank, kinds in enumerate(faults):
        yield Comparison(None, [Finding(kind, f"{kind} on rank {rank}", (rank,)) for kind in kinds])


class TestJudge:
    def test_what_is_right_is_counted(self) -> None:
        """Elements, pairs, ranks and the worst ratio of right comparisons are in the tally."""
        tally = Tally()
        judge_below([1, 2], tally, 3)
        assert (4, 2, {0, 1}, 0.5) == (tally.elements, tally.pairs, tally.ranks, tally.worst)

    def test_what_is_wrong_fails_with_ranks_and_note(self) -> None:
        """All wrong comparisons are in one message, behind them the note; their ranks are blamed and not counted."""
        tally = Tally()
        with pytest.raises(Costly) as caught:
            judge_below([3, 1, 4], tally, 3)
        assert "run: rank 0 has 3, rank 2 has 4; the limit is a note" == str(caught.value)
        assert (0, 2) == caught.value.ranks
        assert {1} == tally.ranks

    def test_the_explanation_of_most_faults_is_chosen(self) -> None:
        """Of several explanations of each fault the one is told that explains the most faults."""
        with pytest.raises(Costly) as caught:
            judge_explained([["twice", "swapped"], [], ["swapped"]], Tally())
        assert "run: swapped on rank 0; 1 more of the same kind" == str(caught.value)

    def test_a_judge_takes_the_tally_as_its_second_argument(self) -> None:
        """The signature that rows read has the tally behind what is judged."""
        assert ["numbers", "tally", "limit"] == list(inspect.signature(judge_below).parameters)
