"""Tests of the driver of judges: what it counts, whom it blames, what it says."""

from __future__ import annotations

import inspect

import pytest

from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, Start, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.verdict import Costly, NotOffered, Tally, WrongForm, WrongOutput


@judge(Costly, "run")
def judge_below(numbers: list[int], limit: int) -> Comparisons:
    """Decide whether every number is below a limit."""
    for rank, number in enumerate(numbers):
        yield Comparison(rank, f"rank {rank} has {number}" if number >= limit else "", pairs=1, elements=2, worst=0.5)
    yield Note("; the limit ")
    yield Note(lambda: f"{100 // (max(numbers) - 2)} is a note")


@judge(Costly, "run")
def judge_explained(faults: list[list[str]]) -> Comparisons:
    """Decide whether there are no faults, each with the kinds of its explanations."""
    for rank, kinds in enumerate(faults):
        yield Comparison(None, [Finding(kind, f"{kind} on rank {rank}", (rank,)) for kind in kinds])


@judge(Costly, "run")
def judge_found(ranks: list[int]) -> Comparisons:
    """Decide whether there are no ranks."""
    yield Start("in a new model, ")
    for rank in ranks:
        yield Finding("found", f"rank {rank} is there", (rank,))
    raise NotOffered("no ranks are offered")


@judge(WrongOutput, "run", shape=WrongForm)
def judge_within(errors: dict[str, float]) -> Comparisons:
    """Decide whether no error is above 1, each of some kind."""
    for kind, error in errors.items():
        yield Comparison(0, f"{kind} is off" if error > 1 else "", elements=1, worst=error, kind=kind)


class TestJudge:
    def test_what_is_right_is_counted(self) -> None:
        """Elements, pairs, ranks and the worst ratio of right comparisons are in the tally; no note is computed."""
        tally = Tally()
        judge_below([1, 2], tally, 3)
        assert (4, 2, {0, 1}, 0.5) == (tally.elements, tally.pairs, tally.ranks, tally.worst)
        assert 0.0 == tally.beyond

    def test_what_is_wrong_fails_with_ranks_and_note(self) -> None:
        """All wrong comparisons are in one message, behind them the notes; their ranks are blamed and not counted."""
        tally = Tally()
        with pytest.raises(Costly) as caught:
            judge_below([3, 1, 4], tally, 3)
        assert "run: rank 0 has 3, rank 2 has 4; the limit 50 is a note" == str(caught.value)
        assert (0, 2) == caught.value.ranks
        assert {1} == tally.ranks
        assert 0.5 == tally.beyond

    def test_the_explanation_of_most_faults_is_chosen(self) -> None:
        """Of several explanations of each fault the one is told that explains the most faults."""
        with pytest.raises(Costly) as caught:
            judge_explained([["twice", "swapped"], [], ["swapped"]], Tally())
        assert "run: swapped on rank 0; 1 more of the same kind" == str(caught.value)

    def test_a_finding_is_a_fault_behind_the_start(self) -> None:
        """A judge may yield a finding without a comparison; the message begins with the start."""
        with pytest.raises(Costly) as caught:
            judge_found([1, 3], Tally())
        assert "run: in a new model, rank 1 is there; 1 more of the same kind" == str(caught.value)
        assert (1, 3) == caught.value.ranks

    def test_what_is_not_offered_is_raised_if_nothing_is_wrong(self) -> None:
        """`NotOffered` after a wrong comparison is ignored, as in the test above."""
        with pytest.raises(NotOffered, match="no ranks are offered"):
            judge_found([], Tally())

    @pytest.mark.parametrize(
        ("kinds", "error"), [(["shape", "value"], WrongForm), (["value", "shape"], WrongOutput)], ids=["form", "output"]
    )
    def test_the_first_kind_chooses_the_error(self, kinds: list[str], error: type[Exception]) -> None:
        """The error is that of the kind of the first finding; findings of other kinds are in the message too."""
        with pytest.raises(error) as caught:
            judge_within(dict.fromkeys(kinds, 2.0), Tally())
        assert f"run: {kinds[0]} is off. Also: {kinds[1]} is off" == str(caught.value)

    def test_errors_out_of_bounds_are_counted_apart(self) -> None:
        """The largest ratio of what is right is in `worst`, that of what is wrong in `beyond`."""
        tally = Tally()
        with pytest.raises(WrongOutput):
            judge_within({"one": 0.5, "two": 3.0, "three": 2.0}, tally)
        assert (1, 0.5, 3.0) == (tally.elements, tally.worst, tally.beyond)

    def test_a_judge_takes_the_tally_as_its_second_argument(self) -> None:
        """The signature that rows read has the tally behind what is judged."""
        assert ["numbers", "tally", "limit"] == list(inspect.signature(judge_below).parameters)
