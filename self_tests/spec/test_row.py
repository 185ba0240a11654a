"""A row is a check: it has its names, asks for what its judge asks for, and calls it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import BadSpec
from moe_conformance.spec.places import ROOT, Places
from moe_conformance.spec.row import Row
from moe_conformance.spec.source_graph import SourceGraph, row_of
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload

STEP = ExchangeStep()
NOTED: list[tuple[Any, ...]] = []  # by judges of several


def judge_one(reading: Any, which: str, tally: Tally, *names: str, exact: bool = False) -> None:
    """Raise what it was called with."""
    raise AssertionError((reading, which, tally, names, exact))


def judge_ran(ran: Sequence[Any], tally: Tally) -> None:
    """Raise what it was called with."""
    raise AssertionError((ran, tally))


def judge_named(reading: Any, *, which: str) -> None:
    """Note what it was called with."""
    NOTED.append((which, reading))


def judge_two(outcome: Any, reading: Any) -> None:
    """Note what it was called with."""
    NOTED.append(("two", outcome, reading))


def judge_three(reading: Any, ran: Sequence[Any]) -> None:
    """Note what it was called with."""
    NOTED.append(("three", reading, *ran))


def twins_of(workload: Workload) -> list[Any]:
    """Return two names."""
    return [f"{workload} first", f"{workload} second"]


class Rows:
    """Where rows stand."""

    test_one = Row("EXCH-01", STEP, judge_one, "first", "a", "b", exact=True, when=lambda workload: False)
    test_ran = Row(("GRAD-02", "GRAD-03"), STEP, judge_ran, twins=twins_of)
    test_some = Row("EXCH-01", STEP, (partial(judge_named, which="first"), judge_two, judge_one), "last", exact=True)
    test_some_ran = Row("GRAD-02", STEP, (judge_two, judge_three, judge_ran), twins=twins_of)


class TestRow:
    def test_it_has_the_names_and_the_mark_of_a_method(self) -> None:
        """The plug-in, scripts and tools know a check by them."""
        (mark,) = Rows.test_ran.pytestmark
        assert ("requirement", ("GRAD-02", "GRAD-03"), STEP, None) == (mark.name, mark.args, *mark.kwargs.values())
        assert ("test_ran", "Rows.test_ran") == (Rows.test_ran.__name__, Rows.test_ran.__qualname__)
        assert __name__ == Rows.test_ran.__module__
        first = Path(__file__).read_text(encoding="utf-8").splitlines()[Rows.test_ran.line - 1]
        assert first.strip().startswith("test_ran = Row(")

    def test_it_asks_for_what_its_judge_asks_for(self) -> None:
        """With equivalent runs for those, and for the case, which must have finished."""
        assert ["reading", "tally"] == list(inspect.signature(Rows.test_one).parameters)
        assert ["reading", "twins", "tally"] == list(inspect.signature(Rows.test_ran).parameters)

    def test_the_judge_is_called_with_what_it_names_and_what_is_given(self) -> None:
        """Arguments are offered by name; what is given stands for the other parameters, in their order."""
        tally = Tally()
        with pytest.raises(AssertionError) as raised:
            Rows.test_one(reading="R", tally=tally)
        assert (("R", "first", tally, ("a", "b"), True),) == raised.value.args

    def test_the_judge_takes_what_equivalent_runs_returned(self) -> None:
        """They are those of the case's workload."""
        tally, reading = Tally(), SimpleNamespace(outcome=SimpleNamespace(workload="even"))
        with pytest.raises(AssertionError) as raised:
            Rows.test_ran(reading=reading, twins=lambda asked: [f"{each} ran" for each in asked], tally=tally)
        assert ((["even first ran", "even second ran"], tally),) == raised.value.args

    def test_several_judges_ask_for_what_some_of_them_does(self) -> None:
        """An argument that two of them name is one, and those with equivalent runs ask for the finished case."""
        assert ["reading", "outcome", "tally"] == list(inspect.signature(Rows.test_some).parameters)
        assert ["reading", "twins", "outcome", "tally"] == list(inspect.signature(Rows.test_some_ran).parameters)

    def test_several_judges_are_called_in_turn(self) -> None:
        """What is given is for the last; another takes more than it names as a partial."""
        tally = Tally()
        NOTED.clear()
        with pytest.raises(AssertionError) as raised:
            Rows.test_some(outcome="O", reading="R", tally=tally)
        assert [("first", "R"), ("two", "O", "R")] == NOTED
        assert (("R", "last", tally, (), True),) == raised.value.args

    def test_equivalent_runs_run_once_for_the_first_judge_that_takes_them(self) -> None:
        """A judge before it may find something wrong without them."""
        tally, reading = Tally(), SimpleNamespace(outcome=SimpleNamespace(workload="even"))
        NOTED.clear()

        def run(names: Sequence[str]) -> Sequence[str]:
            NOTED.append(("run", *names))
            return names

        with pytest.raises(AssertionError) as raised:
            Rows.test_some_ran(outcome="O", reading=reading, twins=run, tally=tally)
        names = ["even first", "even second"]
        assert [("two", "O", reading), ("run", *names), ("three", reading, *names)] == NOTED
        assert ((names, tally),) == raised.value.args

    def test_what_no_row_can_be_is_refused(self) -> None:
        """An unknown id, a judge that lacks something or is given too much, and judges that compare no runs."""
        with pytest.raises(BadSpec, match="no requirement EXCH-99"):
            Row("EXCH-99", STEP, judge_ran, twins=twins_of)
        with pytest.raises(BadSpec, match="judge_one cannot be called by a row: missing a required argument: 'which'"):
            Row("EXCH-01", STEP, judge_one)
        with pytest.raises(BadSpec, match="judge_ran cannot be called by a row: missing a required argument: 'ran'"):
            Row("EXCH-01", STEP, judge_ran)
        with pytest.raises(BadSpec, match="judge_ran cannot be called by a row: too many positional arguments"):
            Row("EXCH-01", STEP, judge_ran, "more", twins=twins_of)
        with pytest.raises(BadSpec, match="no judge takes what equivalent runs returned"):
            Row("EXCH-01", STEP, (judge_two, judge_one), "first", twins=twins_of)
        with pytest.raises(BadSpec, match="judge_one cannot be called by a row: missing a required argument: 'which'"):
            Row("EXCH-01", STEP, (judge_one, judge_one), "last")
        with pytest.raises(BadSpec, match=r"functools.partial\(.* cannot be called by a row: missing"):
            Row("EXCH-01", STEP, partial(judge_one, exact=True))

    def test_a_name_that_pytest_does_not_find_is_refused(self) -> None:
        """Such a row would never be called."""
        with pytest.raises(BadSpec, match="the name of a row begins with test_"):
            Rows.test_one.__set_name__(Rows, "check_one")


class TestSource:
    def test_every_row_stands_in_a_class_and_has_its_sentence(self) -> None:
        """The string below it, on which lint of docstrings does not look: one sentence on one line that ends there."""
        symbols = SourceGraph(ROOT, ("moe_conformance/distributed_tests",)).symbols.values()
        rows = [each for each in symbols if row_of(each.node) is not None]
        assert len(rows) > 400
        assert [] == [each.id for each in rows if "." not in each.name]
        assert [] == [each.id for each in rows if not each.docstring.partition("\n")[0].endswith(".")]

    def test_a_row_is_a_place(self) -> None:
        """It is found by each of its ids, with its line and its sentence."""
        found = {place.name: place for id in ("GRAD-02", "GRAD-03") for place in Places().checks(id)}
        place = found["TestPermutation.test_gradients_are_those_of_the_sum"]
        text = (ROOT / place.path).read_text(encoding="utf-8").splitlines()
        assert text[place.line - 1].strip().startswith("test_gradients_are_those_of_the_sum = Row(")
        assert "Gradients of tokens, rows and weights are those of their own pairs." == place.text
