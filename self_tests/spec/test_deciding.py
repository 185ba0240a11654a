"""What is stored of oracles that decide: it names what there is, and is seen again; and how a decision is seen."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch

from moe_conformance import spec
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.reference.capacity.drops import legal_drops_by_rank
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.config_rules.rules import Settings, broken
from moe_conformance.reference.exchange.deliveries import Pair
from moe_conformance.spec import deciding
from moe_conformance.spec.checks import Check
from moe_conformance.spec.places import checked
from moe_conformance.workloads.records.runs import ExchangeStep
from self_tests.spec import deciding as judged_again
from self_tests.spec import deciding_cases
from self_tests.spec.changed_results import WAYS, changed, example
from self_tests.spec.deciding import Judgement, oracles

STORED = deciding.read()
SHARES = 60  # of the requirements, one is seen again each day


def of_today() -> list[str]:
    """Return the requirements that are seen again today."""
    return sorted(STORED)[datetime.now(UTC).toordinal() % SHARES :: SHARES]


class TestStored:
    def test_it_names_oracles_and_cases_that_exist(self) -> None:
        """Each oracle by its name in reference/, each case by that of native or of a planted bug."""
        assert set() == {oracle for stored in STORED.values() for oracle in stored} - oracles().keys()
        for id, stored in STORED.items():
            assert set() == set(stored.values()) - deciding_cases.cases()[id].keys()

    def test_every_requirement_with_a_check_is_in_it(self) -> None:
        """Or the spec says why there is no right answer to compute."""
        without = {id for id in checked() if spec.load()[id].without_oracle}
        assert checked() - without == STORED.keys()

    def test_a_verdict_is_not_lost_for_want_of_an_explanation(self, bench: deciding_cases.Bench) -> None:
        """Slots that the oracle calls illegal fail, also where the judge finds none that is overtaken by another."""
        case = deciding_cases.cases()["DROP-05"]["native alltoall ep2 capacity-tight"]
        judgements = bench.judgements(case, ["DROP-05"])["DROP-05"]
        legal = "capacity.drops:legal_drops_by_rank"
        assert {legal: True} == deciding_cases.seen(judgements, [legal])

    @pytest.mark.parametrize("id", of_today())
    def test_its_oracles_are_seen_to_decide(self, bench: deciding_cases.Bench, id: str) -> None:
        """A change of the result of each changes the verdict of a check on the case that is stored."""
        by_case: dict[str, set[str]] = {}
        for oracle, case in STORED[id].items():
            by_case.setdefault(case, set()).add(oracle)
        for case, named in by_case.items():
            judgements = bench.judgements(deciding_cases.cases()[id][case], [id])[id]
            assert dict.fromkeys(named, True) == deciding_cases.seen(judgements, named), case


@pytest.fixture(scope="module")
def bench() -> Iterator[deciding_cases.Bench]:
    """Ranks for all tests of this module."""
    opened = deciding_cases.Bench()
    yield opened
    opened.close()


IDS = torch.tensor([[0, 1], [1, 2]])
LOADS, CAPACITIES = "capacity.limits:loads", "capacity.limits:capacities"


def judgement(compare: Callable[[], bool]) -> Judgement:
    """Return a judgement that compares one pair, and fails where a comparison does not hold."""

    def check(tally: Tally) -> None:
        tally.add(pairs=1)
        if not compare():
            raise Mismatch("route", "it is something else")

    return Judgement(Check("test_it", "test_it", check, (), ExchangeStep(), None), pickle.dumps({}))


class TestDecidedBy:
    def test_a_result_that_is_compared(self) -> None:
        """A run that passes fails, and one that fails passes."""
        passing = judgement(lambda: loads(IDS, 3).tolist() == [1, 2, 1])
        failing = judgement(lambda: int(loads(IDS[:1], 3).max()) == 2)
        assert (True, True) == (passing.decided_by(LOADS), failing.decided_by(LOADS))
        assert isinstance(passing.verdict(), Tally)
        assert isinstance(failing.verdict(), Mismatch)

    def test_a_result_that_is_only_computed(self) -> None:
        """It is called, and decides nothing; nor does what is not called."""
        ignored = judgement(lambda: len(loads(IDS, 3)) == 3)
        assert {LOADS} == ignored.called([LOADS, CAPACITIES])
        assert not ignored.decided_by(LOADS)
        assert not ignored.decided_by(CAPACITIES)

    def test_a_result_without_which_nothing_can_be_judged(self) -> None:
        """An error that is no mismatch says nothing."""
        assert not judgement(lambda: [True, True, True][int(loads(IDS, 3)[1])]).decided_by(LOADS)

    def test_a_refusal_that_a_judge_makes_a_verdict_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An oracle whose errors a judge makes a verdict of decides, though its result is not compared."""
        monkeypatch.setattr(judged_again, "_REFUSING", {LOADS})

        def accepted() -> bool:
            try:
                loads(IDS, 3)
            except ValueError:
                return False
            return True

        assert judgement(accepted).decided_by(LOADS)

    def test_a_result_on_both_sides(self) -> None:
        """It is compared with that of another call."""
        assert judgement(lambda: torch.equal(loads(IDS, 3), loads(IDS.flip(0), 3))).decided_by(LOADS)

    def test_a_result_that_another_oracle_uses(self) -> None:
        """What that makes of it is compared."""
        ids, kept = torch.tensor([[0], [0], [0], [1]]), torch.tensor([[True], [True], [False], [True]])
        legal = judgement(lambda: legal_drops_by_rank([kept], [ids], 2, factor=1.0, policy="position") == (True,))
        assert legal.decided_by(CAPACITIES)

    def test_a_row_of_a_table(self) -> None:
        """Its function is held by the table alone, and has variables of the function that made it."""
        overlapping = judgement(lambda: broken(Settings(overlap=True, ep=1, experts=4)) == ("RULE-06",))
        found = [
            number for number in range(6, 28) if overlapping.decided_by(f"config_rules.rules:RULES[RULE-{number:02}]")
        ]
        assert list(range(6, 28)) == found

    def test_an_oracle_is_as_before(self) -> None:
        """What holds it under another name had the changed result as well."""
        other, expected = loads, loads(IDS, 3).tolist()
        assert judgement(lambda: other(IDS, 3).tolist() == expected).decided_by(LOADS)
        assert expected == loads(IDS, 3).tolist()


class TestChanged:
    @pytest.mark.parametrize(
        ("value", "larger", "smaller", "turned", "none", "hollow"),
        [
            (3, 5, 2, 2, 0, 2),
            (True, False, False, False, False, False),
            (-1.5, 1998.5, -4.0, -4.0, 0.0, -4.0),
            (Fraction(1, 2), Fraction(4001, 2), -1, -1, 0, -1),
            ((1, 2), (3, 4), (0, 1), (2, 1), (), (0, 0)),
            (((1, 2), ()), ((3, 4), ()), ((0, 1), ()), ((), (1, 2)), (), ((), ())),
            ({"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 0, "b": 1}, {"a": 2, "b": 1}, {}, {"a": 0, "b": 0}),
            (torch.tensor([2, 0]), [4, 2], [1, 0], [0, 2], [0, 0], [1, 0]),
            (
                torch.tensor([[2.0, -1.0]]),
                [[2002.0, 3999.0]],
                [[-1.0, -3.0]],
                [[-1.0, 2.0]],
                [[0.0, 0.0]],
                [[-1.0, -3.0]],
            ),
            (torch.tensor([True, False]), *[[False, True]] * 3, [False, False], [False, True]),
            ("3 of 4", "5 of 6, changed", *["3 of 4, changed"] * 4),
            (
                Pair(0, 1, 2, 3, 4),
                Pair(2, 3, 4, 5, 6),
                *[Pair(0, 0, 1, 2, 3)] * 2,
                Pair(0, 0, 0, 0, 0),
                Pair(0, 0, 1, 2, 3),
            ),
        ],
        ids=str,
    )
    def test_every_part_is_another(
        self, value: Any, larger: Any, smaller: Any, turned: Any, none: Any, hollow: Any
    ) -> None:
        """Of numbers, tensors, collections and records, in five ways."""
        expected = {"larger": larger, "smaller": smaller, "turned": turned, "none": none, "hollow": hollow}
        found = {way: changed(value, way, by=2) for way in WAYS}
        assert expected == {
            way: each.tolist() if isinstance(each, torch.Tensor) else each for way, each in found.items()
        }

    def test_names_of_a_type_that_lists_them(self) -> None:
        """One becomes another, a set those that it lacks; free text is marked."""
        names, hint = Literal["a", "b", "c"], frozenset[Literal["a", "b", "c"]]
        assert ("b", "a, changed") == (changed("a", "larger", names), changed("a", "larger", str))
        assert frozenset({"b", "c"}) == changed(frozenset({"a"}), "turned", hint)

    def test_nothing_becomes_an_example(self) -> None:
        """Of the type that the oracle returns."""
        assert ("changed", (0,)) == (changed(None, "larger", str | None), changed((), "larger", tuple[int, ...]))
        assert () == changed((), "none", tuple[int, ...])
        assert {"changed": (0, 0.0)} == example(dict[str, tuple[int, float]])
        assert Pair(0, 0, 0, 0, 0) == example(Pair | None)

    def test_a_function_returns_changed_results(self) -> None:
        """As that of an oracle which makes experts."""
        assert 5 == changed(lambda x: x + 1, "larger", by=2)(2)
