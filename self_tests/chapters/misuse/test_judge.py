"""Refusals of wrong use: on all ranks, meant as such, and right answers behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_conformance.chapters.token_padding import workloads as token_padding
from moe_conformance.chapters.tp_duplicated_tokens import workloads as tp_duplicated_tokens
from moe_conformance.contract import Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.probe_expected import expect
from moe_conformance.judging.shared.exchange.misuse import judge_wrong_answers, judge_wrong_input, wrong_answers
from moe_conformance.judging.verdict import Mismatch, Raised, Tally, Unrefused, WrongOutput
from moe_conformance.scenarios.outcome import Answer, Outcome, RankOutcome
from moe_conformance.workloads import misuse
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Call, Workload

EP2 = Layout(2, ep=2)
REFUSED = Answer(error="expert id 8 among 8 experts", error_type="builtins.ValueError")
TWICE = f"misuse-{misuse.TWICE}"
ANSWERS = (*(f"misuse-{name}" for name in misuse.ANSWERS), TWICE)
OF_ANSWERS = sorted(name for name in misuse.NAMES if name.startswith(ANSWERS))
Judge = Callable[[Outcome, Tally], None]


def drawn(name: str) -> Workload:
    """Return a script of two ranks; rank 1 makes the mistake."""
    return next(each for each in misuse.draw("alltoall", EP2, "quick") if each.name == name)


def run(name: str) -> Outcome:
    """Return what a faultless exchange answers: it refuses what may raise, everywhere."""
    workload = drawn(name)
    y = expect(workload, [1.0]).y
    ranks = tuple(
        RankOutcome(
            rank=rank,
            status="ok",
            answers=tuple(_answer(workload, y, call, n, rank) for n, call in enumerate(workload.calls)),
        )
        for rank in range(2)
    )
    return Outcome("faultless", workload, ranks, 0.0)


def _answer(workload: Workload, y: object, call: Call, number: int, rank: int) -> Answer:
    if call.may_raise:
        return REFUSED
    if call.method == "dispatch":
        rows = 4 + 8 * number + rank  # no two dispatches hand over as many
        return Answer(values={"delivery": {"rows_RD": torch.zeros(rows, workload.config.hidden)}})
    microbatch = call.given[rank]["answers_of"].call if call.method == "combine" else 0
    return Answer(values={"": y[microbatch][rank].float()})  # type: ignore[index]


def edit(outcome: Outcome, number: int, rank: int, answer: Answer) -> Outcome:
    """Let a rank answer something else to a call."""
    ranks = list(outcome.ranks)
    answers = list(ranks[rank].answers)
    answers[number] = answer
    ranks[rank] = replace(ranks[rank], answers=tuple(answers))
    return replace(outcome, ranks=tuple(ranks))


def caught(judge: Judge, outcome: Outcome) -> Mismatch:
    """Return what a judge complains of."""
    with pytest.raises(Mismatch) as error:
        judge(outcome, Tally())
    return error.value


class TestWrongInput:
    @pytest.mark.parametrize("what", sorted(misuse.INPUTS))
    def test_refusals_of_all_ranks_pass(self, what: str) -> None:
        """Every rank refuses, the next step is right, and both ranks are counted."""
        tally = Tally()
        judge_wrong_input(run(f"misuse-{what}"), tally)
        assert {0, 1} == tally.ranks

    def test_a_rank_that_answers_is_named(self) -> None:
        """A rank whose input is right and that answers is one that did not refuse."""
        outcome = edit(run("misuse-id-too-high"), 1, 1, Answer(values={"": torch.zeros(8, 32)}))
        error = caught(judge_wrong_input, outcome)
        assert isinstance(error, Unrefused)
        assert "an id of E on rank 0 on rank 1; expected: an error on every rank" in str(error)

    @pytest.mark.parametrize("slip", ["AttributeError", "NameError", "UnboundLocalError", "TypeError", "ImportError"])
    def test_a_slip_is_no_refusal(self, slip: str) -> None:
        """An exception that code raises by mistake is not taken for one that was meant."""
        answer = Answer(error="'NoneType' object is not subscriptable", error_type=f"builtins.{slip}")
        error = caught(judge_wrong_input, edit(run("misuse-narrow-tokens"), 1, 1, answer))
        assert isinstance(error, Raised)
        assert f"on rank 1 raised an internal error instead of refusing the input: builtins.{slip}" in str(error)

    def test_a_type_may_be_refused_as_a_type(self) -> None:
        """Ids in float are of a wrong type, and a `TypeError` says so."""
        answer = Answer(error="ids must be integers", error_type="builtins.TypeError")
        judge_wrong_input(edit(run("misuse-ids-in-float"), 1, 1, answer), Tally())

    @pytest.mark.parametrize(("number", "where"), [(0, "before"), (2, "after")])
    def test_a_wrong_answer_beside_it_is_told(self, number: int, where: str) -> None:
        """The right steps before and behind the refusal are judged, exactly."""
        outcome = run("misuse-id-too-low")
        y_TD = outcome.ranks[1].answers[number].values[""].clone()
        y_TD[3, 2] += 1
        error = caught(judge_wrong_input, edit(outcome, number, 1, Answer(values={"": y_TD})))
        assert isinstance(error, WrongOutput)
        assert f"y of rank 1 in the valid call {where} the invalid one is wrong at token 3" in str(error)


class TestWrongAnswers:
    @pytest.mark.parametrize("name", OF_ANSWERS)
    def test_refusals_pass(self, name: str) -> None:
        """Ranks whose answers do not fit refuse them, and later calls are right."""
        tally = Tally()
        judge_wrong_answers(run(name), tally)
        assert tally.ranks

    def test_a_rank_that_answers_is_named(self) -> None:
        """A rank that combines answers of half the width did not refuse them."""
        outcome = run("misuse-narrow-answers")
        number = next(n for n, call in enumerate(outcome.workload.calls) if call.may_raise)
        error = caught(judge_wrong_answers, edit(outcome, number, 1, Answer(values={"": torch.zeros(8, 32)})))
        assert isinstance(error, Unrefused)
        assert "on rank 1; expected: an error" in str(error)

    def test_a_slip_is_no_refusal(self) -> None:
        """Nor here is an attribute that is not there."""
        outcome = run(TWICE)
        number = next(n for n, call in enumerate(outcome.workload.calls) if call.may_raise)
        answer = Answer(error="no attribute 'rows'", error_type="builtins.AttributeError")
        assert isinstance(caught(judge_wrong_answers, edit(outcome, number, 0, answer)), Raised)

    def test_a_second_combine_is_for_all_or_none(self) -> None:
        """A handle that is combined twice is refused by all ranks, or by none."""
        outcome = run(TWICE)
        number = next(n for n, call in enumerate(outcome.workload.calls) if call.may_raise)
        again = outcome.ranks[0].answers[number - 1]
        half = edit(outcome, number, 0, again)
        assert isinstance(caught(judge_wrong_answers, half), Unrefused)
        judge_wrong_answers(edit(half, number, 1, outcome.ranks[1].answers[number - 1]), Tally())


class TestLimit:
    def test_wrong_use_is_what_no_exchange_can_be_made_of(self) -> None:
        """A limit on it leaves out wrong input and answers, and nothing that a setting promises or that is answered."""
        limits = (Limit("wrong_use", (False,), "nothing is checked", proof="undefined"),)
        layout = Layout(4, tp=2, ep=2)
        drawn = [*misuse.draw("alltoall", layout, "quick"), *tp_duplicated_tokens.draw("alltoall", layout, "quick")]
        drawn += token_padding.token_counts("alltoall", layout, "quick")
        asked = {each.name for each in drawn if broken(limits, each, "cpu") is None}
        of_input = {each.name for each in drawn if misuse.input_of(each)}
        assert len(misuse.IN_SETTINGS) * len(misuse.SETTINGS) < len(of_input)
        assert not of_input & asked
        of_answers = {each.name for each in drawn if wrong_answers(each)}
        assert {TWICE} == of_answers & asked
        assert {"bound-broken", *tp_duplicated_tokens.MISMATCHES} <= asked
