"""Waivers: what they match, and which failures they excuse."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.compare.bounded import compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.verdict import Raised, Tally, WrongCount, WrongForm, WrongOutput, in_turn
from moe_conformance.plugin.trial import Trial, ending, further
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from moe_conformance.waiving import Fault, Item, Names, Waivers, load, proposal
from moe_conformance.workloads.recipes import corpus

TODAY = date(2026, 5, 1)
WORKLOAD = next(iter(corpus("alltoall", Layout(2, ep=2), "quick")))
NAMES = Names(
    requirements=frozenset({"EXCH-05", "EXCH-06", "GRAD-01"}),
    variants=frozenset({"alltoall", "allgather"}),
    layouts=frozenset({"ep2", "ep4", "ep2-etp2"}),
    workloads=frozenset({"even", "uneven", "dropped-even", "drawn with ties"}),
    versions={"some-library": "1.4.2", "torch": "2.13.0+cpu"},
)
GOOD = """
[[waiver]]
id = "W-1"
requirements = ["EXCH-05"]
variants = ["alltoall"]
layouts = ["ep*"]
workloads = ["even"]
reason = "it does something else"
evidence = "line 7"
owner = "a person"
expires = 2026-12-31
versions = ["some_library>=1.4,<2"]
example = "test_outputs[alltoall-ep2-even]"

[[waiver.failure]]
kind = "WrongOutput"
stage = "combine"
words = ["instead of", "y of rank"]
at_most = 100
"""
FAULT = Fault("WrongOutput", "combine", "combine: y of rank 0 token 1 is 2 instead of 1", 40.0)
ITEM = Item("test_outputs[alltoall-ep2-even]", ("EXCH-05",), "alltoall", "ep2", "even")


def loaded(folder: Path, text: str) -> Waivers:
    """Return the waivers of a file with that text."""
    path = folder / "some.toml"
    path.write_text(text)
    return load(path, NAMES, TODAY)


KINDS = ("", "-layouts", "-not-dividing", "-below-one", "-other")


def of_groups(workload: str, place: str) -> str:
    """Return a file whose waiver is for groups."""
    before, _, after = GOOD.partition("variants = ")
    places = f'variants = ["any"]\nlayouts = ["any"]\nworkloads = ["{workload}"]\n'
    return before + places + after.partition('["even"]\n')[2].replace("alltoall-ep2-even", place)


class TestMatch:
    def test_names_and_patterns(self, tmp_path: Path) -> None:
        """Every field must match; a pattern does so for each name that it fits."""
        waivers = loaded(tmp_path, GOOD)
        assert () == waivers.problems
        assert {ITEM.name} == waivers.examples
        matched = waivers.match(ITEM)
        assert matched is not None
        assert "W-1" == matched.id
        others = [
            Item("", ("EXCH-06",), "alltoall", "ep2", "even"),
            Item("", ("EXCH-05", "EXCH-06"), "alltoall", "ep2", "even"),
            Item("", ("EXCH-05",), "allgather", "ep2", "even"),
            Item("", ("EXCH-05",), "alltoall", "single", "even"),
            Item("", ("EXCH-05",), "alltoall", "ep2", "uneven"),
            Item("", ("EXCH-05",), "alltoall", "ep2", None),
        ]
        assert [None] * len(others) == [waivers.match(item) for item in others]

    def test_groups_have_a_place_of_their_own(self, tmp_path: Path) -> None:
        """A check for which nothing runs is waived under the names for that, and under no others."""
        waivers = loaded(tmp_path, of_groups("groups", "world-2"))
        assert () == waivers.problems
        assert waivers.match(Item.of_groups("test_outputs[world-2]", ("EXCH-05",))) is not None
        assert waivers.match(ITEM) is None
        (problem,) = loaded(tmp_path, GOOD.replace("alltoall-ep2-even", "world-2")).problems
        assert "is no test_name" in problem

    def test_kinds_of_sizes_are_waived_one_by_one(self, tmp_path: Path) -> None:
        """A waiver of negative sizes hides nothing of layouts, or of sizes that do not divide."""
        waivers = loaded(tmp_path, of_groups("groups-below-one", "world-2-below-one"))
        assert () == waivers.problems
        found = {kind: waivers.match(Item.of_groups(f"test_outputs[world-2{kind}]", ("EXCH-05",))) for kind in KINDS}
        assert ["-below-one"] == [kind for kind, waiver in found.items() if waiver is not None]
        (problem,) = loaded(tmp_path, of_groups("groups-below-one", "world-2")).problems
        assert "is no test_name" in problem

    def test_it_may_be_for_some_checks_of_a_requirement(self, tmp_path: Path) -> None:
        """Where others of them pass on the same case, which would be unexpected."""
        example = 'example = "test_outputs[alltoall-ep2-even]"'
        waivers = loaded(tmp_path, GOOD.replace(example, f'{example}\nchecks = ["test_outputs"]'))
        assert () == waivers.problems
        assert waivers.match(ITEM) is not None
        assert waivers.match(replace(ITEM, name="test_gradients[alltoall-ep2-even]")) is None


class TestFailures:
    @pytest.mark.parametrize(
        "other",
        [
            replace(FAULT, kind="Died"),
            replace(FAULT, stage="experts"),
            replace(FAULT, message="combine: y of rank 0 token 1 is wrong"),
            replace(FAULT, size=101.0),
        ],
        ids=["kind", "stage", "words", "size"],
    )
    def test_another_failure_is_not_excused(self, tmp_path: Path, other: Any) -> None:
        """Kind, stage and all words must be those of the waiver, and the error no larger; beside it nothing fails."""
        (waiver,) = loaded(tmp_path, GOOD).held
        assert (True, True) == (waiver.excuses([FAULT]), waiver.excuses([replace(FAULT, size=100.0)]))
        assert (False, False, False) == (waiver.excuses([other]), waiver.excuses([FAULT, other]), waiver.excuses([]))

    def test_a_bounded_failure_needs_a_largest_size(self, tmp_path: Path) -> None:
        """Without one the waiver excuses what has no size, and nothing that was bounded."""
        (waiver,) = loaded(tmp_path, GOOD.replace("at_most = 100", "")).held
        assert (False, True) == (waiver.excuses([FAULT]), waiver.excuses([replace(FAULT, size=None)]))

    @pytest.mark.parametrize(
        ("value", "size", "excused"), [(5.0, 40.0, True), (1e5, 999_990.0, False), (torch.nan, 1e300, False)]
    )
    def test_the_size_is_what_the_comparisons_counted(
        self, tmp_path: Path, value: float | None, size: float, excused: bool
    ) -> None:
        """Whatever the sentence says: the largest error of the check, and more than any where it is not finite."""
        (waiver,) = loaded(tmp_path, GOOD).held
        trial = Trial(("EXCH-05",), "test_outputs")
        one = torch.ones(1, dtype=torch.float64)
        compare(torch.tensor([value], dtype=torch.float64), one, 0.1 * one, trial.tally)
        compare(one + 0.2, one, 0.1 * one, trial.tally)
        (fault,) = ending(trial, WrongOutput("combine", "y of rank 0 is 2 instead of 1")).faults
        assert (pytest.approx(size), excused) == (fault.size, waiver.excuses([fault]))  # type: ignore[comparison-overlap]

    def test_what_is_compared_exactly_has_no_size(self) -> None:
        """There is no allowed error to count in: kind, stage and words excuse it."""
        trial = Trial(("EXCH-05",), "test_outputs")
        compare(torch.ones(1), torch.zeros(1), torch.zeros(1), trial.tally)
        assert [None] == [each.size for each in ending(trial, WrongOutput("combine", "y is 1 instead of 0")).faults]

    def test_the_waiver_of_the_failure_answers(self, tmp_path: Path) -> None:
        """Of several for one item, the one that names what happened; where none does, the first."""
        other = GOOD.replace("W-1", "W-2").replace("WrongOutput", "Died")
        waivers = loaded(tmp_path, GOOD + other)
        died, lost = replace(FAULT, kind="Died"), replace(FAULT, kind="WrongForm")
        found = [waivers.match(ITEM, [fault]) for fault in (FAULT, died, lost)]
        assert ["W-1", "W-2", "W-1"] == [waiver.id for waiver in found if waiver is not None]


class TestFindings:
    def found(self, *findings: Finding, tally: Tally | None = None) -> tuple[Fault, ...]:
        """Return the faults of a check that fails with some findings."""
        trial = Trial(("EXCH-05",), "test_outputs", tally=tally or Tally())
        with pytest.raises(WrongOutput) as raised:
            fail(WrongOutput, "combine", findings, start="in evaluation: ", note="; as claimed")
        return ending(trial, raised.value).faults

    def test_each_finding_is_a_fault_with_what_is_around_it(self) -> None:
        """Also where the message only counts it."""
        several = [Finding("lost", f"y of token {token} is lost", (0,)) for token in range(9)]
        told = [fault.message for fault in self.found(*several)]
        assert [f"combine: in evaluation: y of token {token} is lost; as claimed" for token in range(9)] == told

    def test_a_waiver_of_one_token_excuses_no_other(self, tmp_path: Path) -> None:
        """Its words are in one finding: those of another token, or of another error, are not excused with it."""
        (waiver,) = loaded(tmp_path, GOOD).held
        known = [Finding("one", f"y of rank 0 token {token} is 2 instead of 1", (0,), beyond=5.0) for token in range(5)]
        assert waiver.excuses(self.found(*known))
        for other in (
            Finding("one", "y of rank 0 token 7 is zero", (0,), beyond=5.0),
            Finding("one", "y of rank 0 token 7 is 1e+30 instead of 1", (0,), beyond=1e30),
            Finding("one", "y of rank 0 token 7 is 2 instead of 1", (0,), beyond=5.0, error="WrongForm"),
        ):
            assert not waiver.excuses(self.found(*known, other))
            assert not waiver.excuses(self.found(other, *known))

    def test_a_finding_has_its_own_size(self, tmp_path: Path) -> None:
        """Where it has none it is no larger than the error of the whole check."""
        (waiver,) = loaded(tmp_path, GOOD).held
        sentence, tally = "y of rank 0 is 2 instead of 1", Tally(beyond=1e6)
        sizes = {beyond: self.found(Finding("", sentence, (0,), beyond=beyond), tally=tally) for beyond in (5.0, None)}
        assert {5.0: (5.0, True), None: (1e6, False)} == {
            beyond: (faults[0].size, waiver.excuses(faults)) for beyond, faults in sizes.items()
        }

    def test_ranks_that_fail_in_another_way_are_not_excused(self, tmp_path: Path) -> None:
        """The message of a run that failed has the error of the first rank alone."""
        text = GOOD.replace("WrongOutput", "Raised").replace('"combine"', '"run"')
        (waiver,) = loaded(tmp_path, text.replace('["instead of", "y of rank"]', '["ValueError: known"]')).held
        for second, excused in (("ValueError: known", True), ("KeyError: other", False), (None, False)):
            ranks = (RankOutcome(0, "raised", error="ValueError: known"), RankOutcome(1, "raised", error=second))
            outcome = Outcome("toy", WORKLOAD, ranks, 0.1)
            with pytest.raises(Raised) as raised:
                require_finished(outcome)
            faults = ending(Trial(("EXCH-05",), "test_outputs", outcome=outcome), raised.value).faults
            assert (2, excused) == (len(faults), waiver.excuses(faults))

    def test_what_was_not_judged_is_judged_for_it(self) -> None:
        """The judges behind one that raises are called when a waiver excuses that one; one that cannot judge is not."""
        trial, called = Trial(("EXCH-05",), "test_outputs"), []

        def judge_first() -> None:
            raise WrongOutput("combine", "known")

        def judge_second() -> None:
            called.append(2)
            raise WrongCount("dispatch", "hidden")

        def judge_third() -> None:
            called.append(3)
            raise KeyError("what the first found is missing")

        with pytest.raises(WrongOutput) as raised:
            in_turn([judge_first, judge_second, judge_third])
        assert [] == called
        assert [Fault("WrongCount", "dispatch", "dispatch: hidden")] == list(further(trial, raised.value))
        assert [2, 3] == called

    def test_what_was_found_before_a_judge_gave_up(self) -> None:
        """A judge that yields comparisons and then raises has found both."""

        @judge(WrongOutput, "combine")
        def judge_both(_: None) -> Comparisons:
            yield Comparison(0, "y is wrong")
            raise WrongForm("combine", "y has no shape")

        with pytest.raises(WrongForm, match="y has no shape") as raised:
            judge_both(None, Tally())
        trial = Trial(("EXCH-05",), "test_outputs")
        assert [Fault("WrongOutput", "combine", "combine: y is wrong")] == list(further(trial, raised.value))


class TestDrawn:
    WITHOUT = GOOD.replace('["even"]', '["even", "drawn with ties"]')

    def test_a_feature_is_left_out(self, tmp_path: Path) -> None:
        """Of the draws of every check that decides a requirement of it, in its cells; nothing is waived."""
        waivers = loaded(tmp_path, self.WITHOUT)
        assert () == waivers.problems
        drawing = Item("test_drawn[alltoall-ep2]", ("EXCH-05", "EXCH-06"), "alltoall", "ep2", None)
        assert waivers.leaves_out(drawing, "ties")
        assert waivers.match(drawing) is None
        assert not waivers.leaves_out(drawing, "idle rank")
        for item in (replace(drawing, requirements=("EXCH-06",)), replace(drawing, layout="single")):
            assert not waivers.leaves_out(item, "ties")

    def test_what_is_not_drawn_cannot_be_seen_to_fail(self, tmp_path: Path) -> None:
        """So such a waiver is never unused."""
        only = self.WITHOUT.replace('"even", ', "").replace("-even]", "]")
        waivers = loaded(tmp_path, only)
        assert () == waivers.problems
        assert [] == list(waivers.unused([ITEM], [], whole=True))


class TestUnused:
    def test_a_waiver_that_waived_nothing_is_told(self, tmp_path: Path) -> None:
        """What it matches was run and did not fail; or, of everything there is, it matches nothing."""
        waivers = loaded(tmp_path, GOOD)
        elsewhere = Item("", ("EXCH-05",), "allgather", "ep2", "even")
        assert [] == list(waivers.unused([ITEM], ["W-1"], whole=True))
        assert [] == list(waivers.unused([elsewhere], [], whole=False))
        (ran,) = waivers.unused([ITEM], [None], whole=False)
        assert f"W-1 is unused: {ITEM.name}" in ran
        (nowhere,) = waivers.unused([elsewhere], [], whole=True)
        assert "no check runs on what it names" in nowhere


class TestProposal:
    def test_a_person_completes_it(self, tmp_path: Path) -> None:
        """With id, evidence, owner, end and words filled in, the proposal holds and excuses what it was made of."""
        items = [ITEM, Item("test_outputs[alltoall-ep4-even]", ("EXCH-05",), "alltoall", "ep4", "even")]
        fault = Fault("WrongOutput", "combine", 'it said "no" to everything', 12.0)
        text = proposal(["EXCH-05"], items, fault, NAMES.versions, "some-library")
        with pytest.raises(tomllib.TOMLDecodeError):
            tomllib.loads(text)
        ended = text.replace("expires = ?", "expires = 2026-12-31")
        assert 4 == len(loaded(tmp_path, ended).problems)
        waivers = loaded(
            tmp_path, ended.replace('words = ["?"]', 'words = ["it said", "to everything"]').replace('"?"', '"me"')
        )
        assert () == waivers.problems
        matched = [waivers.match(item, [fault]) for item in items]
        assert [True, True] == [waiver is not None and waiver.excuses([fault]) for waiver in matched]
        larger = replace(fault, size=1000.0)
        assert [False, False] == [waiver is None or waiver.excuses([larger]) for waiver in matched]
