"""The ranks run the next case while the driver judges this one, and nobody can tell from the verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.plugin import agenda
from moe_conformance.plugin.case_items import CaseFunction
from moe_conformance.plugin.case_run import CaseRun
from moe_conformance.plugin.foreseeing import foreseen
from moe_conformance.plugin.options import Options
from moe_conformance.plugin.outcomes import Outcomes
from moe_conformance.plugin.run import prepare
from moe_conformance.workloads import laws
from moe_conformance.workloads.plan import Case, Plan
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY
from tools.select_cases import place_of

RUN = prepare(Options(ranks=2))
ALL = [case for case in Plan(RUN.backend, "cpu", "quick").cases if case.cell.layout.name == "ep2"]
CASES = ALL[:4]
SINGLE = [case for case in Plan(RUN.backend, "cpu", "quick").cases if case.cell.layout.name == "single"]


@dataclass
class Item:
    """As much of an item as the agenda reads."""

    nodeid: str
    case: Case | None = None
    fixturenames: tuple[str, ...] = ("outcome", "tally")

    @property
    def name(self) -> str:
        """The end of the id."""
        return self.nodeid


class TestFollowers:
    def followers(self, *items: Item, most: int = 2) -> dict[str, tuple[Case, ...]]:
        """Return what follows what; the last of the cases is never run."""
        return agenda.followers(items, lambda case: case is not CASES[3], most)  # type: ignore[arg-type]

    def test_the_next_cases_follow_all_items_of_a_case(self) -> None:
        """Items that need no rank, or whose case is not run, are looked past."""
        items = (
            Item("a1", CASES[0]),
            Item("light", CASES[1], ("tally",)),
            Item("never", CASES[3]),
            Item("a2", CASES[0]),
            Item("other", None, ()),
            Item("b", CASES[1]),
        )
        assert {"a1": (CASES[1],), "a2": (CASES[1],), "b": ()} == self.followers(*items)

    @pytest.mark.parametrize("argument", ["outcome", "reading"])
    def test_every_case_whose_run_is_read_follows(self, argument: str) -> None:
        """Whether its checks ask for the outcome or for the reading of it."""
        items = [Item(str(number), case, (argument, "tally")) for number, case in enumerate(CASES[:3])]
        assert {"0": (CASES[1], CASES[2]), "1": (CASES[2],), "2": ()} == self.followers(*items)

    def test_no_more_are_returned_than_may_be_begun(self) -> None:
        """The nearest ones are, in running order."""
        items = [Item(str(number), case) for number, case in enumerate([*CASES[:3], CASES[0]])]
        assert [CASES[1], CASES[2]] == list(self.followers(*items)["0"])
        assert [CASES[1]] == list(self.followers(*items, most=1)["0"])

    def test_cases_follow_over_an_item_that_draws(self) -> None:
        """A check that draws its own workloads does not keep later cases from being begun before it."""
        items = (Item("a", CASES[0]), Item("drawn", None, ("drive",)), Item("b", CASES[1]), Item("c", CASES[2]))
        assert {"a": (CASES[1], CASES[2]), "b": (CASES[2],), "c": ()} == self.followers(*items)

    def test_the_next_cases_of_every_number_of_ranks_follow(self) -> None:
        """Each number of ranks has as many as may be begun."""
        one, two = SINGLE[:3], CASES[:3]
        mixed = (one[0], one[1], two[0], one[2], two[1], two[2])
        items = [Item(str(number), case) for number, case in enumerate(mixed)]
        assert {case.id for case in (*one[1:], *two[:2])} == {case.id for case in self.followers(*items)["0"]}
        assert {one[1].id, two[0].id} == {case.id for case in self.followers(*items, most=1)["0"]}

    def test_a_case_may_come_twice(self) -> None:
        """Examples of waivers run first, and the other items of their cases later."""
        items = (Item("a1", CASES[0]), Item("b1", CASES[1]), Item("a2", CASES[0]))
        assert {"a1": (CASES[1], CASES[0]), "b1": (CASES[0],), "a2": ()} == self.followers(*items)


class TestInterrupts:
    def test_what_is_printed_of_an_interrupted_call_is_short(self) -> None:
        """Pytest prints the arguments of each call; of all cases, and those that follow each, that took minutes."""
        made = CaseRun(RUN, Outcomes(RUN), followers={case.id: tuple(ALL) for case in ALL})
        assert "<workload" in repr(ALL[0])
        assert "<workload" not in repr(made)


class TestOrder:
    def names(self, *cases: Case, examples: tuple[str, ...] = (), powerful: tuple[Case, ...] = ()) -> list[str]:
        """Return the names of items, two for each case, that come one behind the other where they are collected."""
        items = [Item(f"{check}[{case.id}]", case) for check in ("a", "b") for case in cases]
        power = {place_of(case): number for number, case in enumerate(powerful)}
        agenda.sort(items, examples, power)  # type: ignore[arg-type]
        return [item.name for item in items]

    def test_cases_of_each_number_of_ranks_are_spread_over_the_run(self) -> None:
        """Each in running order, with the items of a case together."""
        one, two = SINGLE[:2], CASES[:4]
        expected = [one[0], two[0], two[1], one[1], two[2], two[3]]
        names = [f"{check}[{case.id}]" for case in expected for check in ("a", "b")]
        assert names == self.names(*one, *two)

    def test_cases_of_waivers_come_first(self) -> None:
        """And of these the items that the waivers name."""
        name = f"b[{CASES[2].id}]"
        assert [name, f"a[{CASES[2].id}]"] == self.names(*SINGLE[:2], *CASES[:4], examples=(name,))[:2]

    def test_powerful_cases_come_before_all_but_those_of_waivers(self) -> None:
        """In the order of power, whatever their number of ranks; the others are spread over the rest."""
        one, two = SINGLE[:3], CASES[:4]
        waived, powerful = two[3], (two[1], one[2], two[3], two[0])
        expected = [two[3], two[1], one[2], two[0], one[0], two[2], one[1]]
        names = [f"{check}[{case.id}]" for case in expected for check in ("a", "b")]
        assert names == self.names(*one, *two, examples=(f"a[{waived.id}]",), powerful=powerful)


@pytest.fixture
def outcomes() -> Iterator[Outcomes]:
    """Ranks of native."""
    made = Outcomes(RUN)
    yield made
    made.close()


class TestOutcomes:
    def test_what_ran_ahead_is_taken(self, outcomes: Outcomes) -> None:
        """Each case gets its own outcome, once."""
        for number, case in enumerate(CASES):
            following = CASES[number + 1 :]
            assert not outcomes.holds(case)
            kept = outcomes.of(case, following)
            assert outcomes.holds(case)
            assert case.workload is kept.outcome.workload
            assert kept is outcomes.of(case, following)

    def test_cases_of_other_numbers_of_ranks_run_beside_them(self, outcomes: Outcomes) -> None:
        """Whatever order they come in, each gets its own outcome."""
        cases = [SINGLE[0], CASES[0], CASES[1], SINGLE[1], CASES[2], SINGLE[2], CASES[3]]
        for number, case in enumerate(cases):
            kept = outcomes.of(case, cases[number + 1 :])
            assert (case.workload, "ok") == (kept.outcome.workload, kept.outcome.ranks[0].status)

    def test_what_nobody_came_for_is_dropped(self, outcomes: Outcomes) -> None:
        """Another case, a drawn workload and the end of the run do without it."""
        outcomes.of(CASES[0], [CASES[1]])
        assert CASES[2].workload is outcomes.of(CASES[2], [CASES[3]]).outcome.workload
        assert CASES[1].workload is outcomes.step(CASES[1].workload).workload
        outcomes.of(CASES[3], [CASES[0]])

    def test_what_ran_ahead_outlives_a_repeat(self, outcomes: Outcomes) -> None:
        """New ranks for a repeat, or for a twin, take nothing from the cases that were begun."""
        first = outcomes.of(CASES[0], CASES[1:])
        assert CASES[0].workload is outcomes.again(CASES[0], first.outcome.workload).outcome.workload
        for case in CASES[1:]:
            outcomes.renew(2)
            assert ["ok", "ok"] == [rank.status for rank in outcomes.of(case, CASES).outcome.ranks]


LIKENED = next(case for case in ALL if case.workload.name == "even" and case.workload.likened)


def asking(*arguments: str) -> CaseFunction:
    """Return a check that asks for equivalent runs of two laws, under the arguments that it names."""

    def check(outcome: Any = None, reading: Any = None, twins: Any = None) -> None:
        workload = (outcome or reading.outcome).workload
        twins([*laws.reordered(workload), *laws.spread(workload), *determinism.behind_inference(workload)])

    return CaseFunction("check", check, None, arguments, pytest.mark.requirement("EXCH-13").mark)


def reads_more(reading: Any, twins: Any) -> None:
    """Ask for something that only a run tells."""
    twins(laws.reordered(reading.ranks[0]))


class TestForeseen:
    def test_what_a_check_will_ask_for_is_told_once(self) -> None:
        """Runs in new processes and on another number of ranks are not, nor what two checks ask for twice."""
        found = foreseen(RUN, LIKENED.workload, [asking("reading", "twins"), asking("outcome", "twins")])
        expected = ["with tokens and slots in another order", "with the tokens of the next rank on every rank"]
        assert [f"even, {how}" for how in expected] == [each.name for each in found]

    def test_what_cannot_be_told_before_a_run_is_left(self) -> None:
        """A check that has to see the outcome first, and one that compares with nothing, ask when they judge."""
        mark = pytest.mark.requirement("EXCH-13").mark
        unread = CaseFunction("reads_more", reads_more, None, ("reading", "twins"), mark)
        assert [] == foreseen(RUN, LIKENED.workload, [unread, asking("reading")])

    def test_they_run_with_their_case(self) -> None:
        """Each is taken once, with the bytes of a run of its own; what was not foreseen runs when it is asked for."""
        (twin,) = laws.reordered(LIKENED.workload)
        first = next(case for case in CASES if case is not LIKENED)
        made = Outcomes(RUN, lambda case: [twin.workload] if case is LIKENED else [])
        try:
            made.of(first, [LIKENED])
            kept = made.of(LIKENED, [])
            assert [twin.workload.name] == list(kept.begun)
            made.renew(2)  # as for a check that needs new processes, before one that asks for it
            once, again = (made.equivalent_runs(kept, [twin.workload])[0] for _ in range(2))
            assert {} == kept.begun
            assert ["ok", "ok"] == [rank.status for rank in once.ranks]
            for rank, other in zip(once.ranks, again.ranks, strict=True):
                assert torch.equal(rank.microbatches[0].y, other.microbatches[0].y)
        finally:
            made.close()


def judged(folder: Path, *arguments: str) -> list[Any]:
    """Return the status, the number of cases and all that was decided in a run of the toy."""
    asked = ("--moe-backend", TOY, "--moe-ranks", "2", "--moe-report", str(folder))
    done = plugin_runs.pytest_on("-q", *asked, *arguments, cwd=folder)
    report = plugin_runs.result(folder)
    return [done.status, report["cases"], plugin_runs.records(report)]


class TestRuns:
    def test_a_run_decides_the_same_with_and_without(self, tmp_path: Path) -> None:
        """Verdicts, words, blame, what was compared and how often ranks ran are the same."""
        asked = (str(PROJECT / "checks.py"), "-k", "not waits")
        alone = judged(tmp_path, *asked, "-p", "self_tests.plugin.project.one_at_a_time")
        assert 2 * 9 == alone[1]
        assert alone == judged(tmp_path, *asked)

    def test_a_run_that_stops_early_leaves_what_ran_ahead(self, tmp_path: Path) -> None:
        """With -x the first failure ends the run; nothing hangs and the case ahead is not counted."""
        status, cases, _ = judged(tmp_path, str(PROJECT / "checks.py"), "-x", "-k", "wrong or right or refuses")
        assert 1 == status
        assert 3 == cases  # what is right on each number of ranks, then what is wrong
