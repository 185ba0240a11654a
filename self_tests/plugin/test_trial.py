"""From the end of an item to its verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis.errors import FlakyFailure, Unsatisfiable

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import (
    Died,
    FalseLimit,
    Indecisive,
    Mismatch,
    NotOffered,
    Raised,
    RunFailed,
    WrongCount,
    WrongOutput,
)
from moe_conformance.plugin import evidence
from moe_conformance.plugin.recording import as_of_its_case
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.report.records import CASE_CRASHED
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from moe_conformance.workloads.plan import Cell
from moe_conformance.workloads.recipes import corpus

WORKLOAD = next(iter(corpus("alltoall", Layout(2, ep=2), "quick")))


def trial(*ranks: RankOutcome) -> Trial:
    """Return the trial of a check of two requirements that draws its workloads."""
    made = Trial(("EXCH-01", "EXCH-02"), "test_x", Cell("alltoall", WORKLOAD.layout, (), "cpu", 0))
    made.outcome = Outcome("toy", WORKLOAD, ranks, 0.1) if ranks else None
    return made


class TestPasses:
    def test_something_was_compared(self) -> None:
        """A check that ended without an exception passes if it compared anything, and is vacuous if not."""
        passed = trial()
        passed.tally.add(elements=1)
        assert Ending("pass") == ending(passed, None)
        assert "vacuous" == ending(trial(), None).verdict


class TestSkips:
    def test_a_fixture_settles_the_verdict(self) -> None:
        """The reason stays with it; a check that skips itself is at fault, since what it was to judge is missing."""
        settled = trial()
        with pytest.raises(pytest.skip.Exception) as raised:
            settled.skip("refused", "refused by the library: no")
        assert Ending("refused", "refused by the library: no") == ending(settled, raised.value)
        assert ("error", "Skipped") == (ending(trial(), raised.value).verdict, ending(trial(), raised.value).kind)

    def test_draws_that_were_all_refused(self) -> None:
        """A backend that refuses whatever is drawn has refused; without a refusal it is the strategy's fault."""
        refused = trial()
        refused.settled, refused.rejected = "refused", "no such dtype"
        ended = ending(refused, Unsatisfiable("no example"))
        assert ("refused", "every drawn workload was refused: no such dtype") == (ended.verdict, ended.message)
        assert "error" == ending(trial(), Unsatisfiable("no example")).verdict

    def test_what_is_not_offered_cannot_be_judged(self) -> None:
        """A judge that finds nothing offered says so; it is neither a pass nor a failure."""
        assert Ending("not adapted", "not adapted: no load") == ending(trial(), NotOffered("no load"))

    def test_a_batch_that_shows_nothing_is_for_other_checks_or_vacuous(self) -> None:
        """By the oracle nothing depends on the rule: not applicable to a batch of a pair of options, vacuous else."""
        pinned, pair = trial(RankOutcome(0, "ok")), trial(RankOutcome(0, "ok"))
        pair.outcome = Outcome("toy", replace(WORKLOAD, rotates=True), (RankOutcome(0, "ok"),), 0.1)
        nothing = Indecisive("no token loses all of its slots")
        assert ("vacuous", "Vacuous") == (ending(pinned, nothing).verdict, ending(pinned, nothing).kind)
        assert Ending("not applicable", f"not applicable: {nothing}") == ending(pair, nothing)
        assert "vacuous" == ending(pair, None).verdict  # compared nothing although there was something to compare


class TestFailures:
    def test_a_mismatch_fails_with_its_words(self) -> None:
        """Stage, kind and ranks are those of the mismatch; what was drawn is told with it."""
        mismatch = WrongOutput("combine", "it is off", ranks=(1,))
        mismatch.outcome = Outcome("toy", WORKLOAD, (RankOutcome(0, "ok"), RankOutcome(1, "ok")), 0.1)
        ended = ending(trial(), mismatch)
        told = (ended.verdict, ended.message, ended.kind, ended.stage, ended.blamed)
        assert ("fail", "combine: it is off", "WrongOutput", "combine", (1,)) == told
        assert ended.detail.startswith("drawn: E = 8, K = 2, D = 32, float32, schedule F0 B0\n")
        assert 1 + 2 == len(ended.detail.splitlines())

    @pytest.mark.parametrize(("status", "verdict"), [("raised", "crash"), ("died", "crash"), ("hung", "hang")])
    def test_a_run_that_did_not_finish(self, status: Any, verdict: str) -> None:
        """A rank that raised or died is a crash, one that gave no answer a hang; its own traceback is shown."""
        blamed = RankOutcome(0, status, traceback="\n".join(f"line {i}" for i in range(99)))
        ended = ending(trial(blamed, RankOutcome(1, "died", secondary=True)), RunFailed("run", "rank 0"))
        assert verdict == ended.verdict
        assert "on rank 0:" in ended.detail
        assert "line 98" in ended.detail
        assert "line 50" not in ended.detail

    def test_a_crash_of_the_case_is_known_from_one_of_a_further_run(self) -> None:
        """Where all ranks of the case finished, it was a run beside it that did not."""
        assert ending(trial(RankOutcome(0, "raised")), Raised("run", "rank 0")).crashed
        assert not ending(trial(RankOutcome(0, "ok")), Raised("run", "run with one token, rank 0")).crashed
        assert not ending(trial(RankOutcome(0, "raised")), WrongCount("dispatch", "one")).crashed

    def test_a_crash_is_reported_by_one_check_of_a_case(self) -> None:
        """That of EXCH-09 where the case has one, else the first that meets it; a wrong result is always reported."""
        crash = ending(trial(RankOutcome(0, "raised")), Raised("run", "rank 0"))
        assert crash is as_of_its_case(crash, set(), elsewhere=False)
        again = as_of_its_case(crash, {crash.message}, elsewhere=False)
        assert ("not run", CASE_CRASHED) == (again.verdict, again.kind)
        assert again == as_of_its_case(crash, set(), elsewhere=True)
        wrong = ending(trial(RankOutcome(0, "raised")), WrongCount("dispatch", "one"))
        assert wrong is as_of_its_case(wrong, {wrong.message}, elsewhere=True)

    def test_a_false_limit_is_reported_by_one_check_of_a_case(self) -> None:
        """By the first, since no requirement has to be that of limits."""
        false = ending(trial(RankOutcome(0, "ok")), FalseLimit("run", "the library raised nothing"))
        assert ("fail", False, True) == (false.verdict, false.crashed, false.of_case)
        assert false is as_of_its_case(false, set(), elsewhere=True)
        again = as_of_its_case(false, {false.message}, elsewhere=False)
        assert ("not run", CASE_CRASHED) == (again.verdict, again.kind)

    def test_several_faults_are_all_told(self) -> None:
        """Hypothesis raises a group when it finds several, the one with the smallest example last."""
        group = ExceptionGroup("two", [WrongOutput("combine", "two"), WrongCount("dispatch", "one")])
        assert ("fail", "dispatch: one\ncombine: two") == (
            ending(trial(), group).verdict,
            ending(trial(), group).message,
        )

    def test_a_fault_that_did_not_come_again(self) -> None:
        """Hypothesis runs the smallest example once more before it tells it; one that then passes is unstable."""
        ended = ending(trial(), FlakyFailure("unreliable", [Raised("run", "rank 0 raised")]))
        assert ("unstable", "Raised") == (ended.verdict, ended.kind)
        assert ended.message.endswith("failed and, run again, did not: run: rank 0 raised")

    def test_a_fault_that_came_again_is_told_first(self) -> None:
        """One that did not is no more than a note beside it."""
        flaky = FlakyFailure("unreliable", [Raised("run", "rank 0 raised")])
        ended = ending(trial(), ExceptionGroup("two", [WrongCount("dispatch", "one"), flaky]))
        assert ("fail", "WrongCount") == (ended.verdict, ended.kind)
        assert ["dispatch: one", "unstable"] == [ended.message.splitlines()[0], ended.message.splitlines()[1][:8]]

    def test_any_other_exception_is_the_suites_own(self) -> None:
        """Even when it comes together with a mismatch."""
        for error in (KeyError("x"), ExceptionGroup("two", [WrongCount("dispatch", "one"), KeyError("x")])):
            ended = ending(trial(), error)
            assert ("error", "KeyError") == (ended.verdict, ended.kind)

    def test_a_check_of_several_requirements_may_say_which_one_fails(self) -> None:
        """Only if every mismatch names one; else all are left to fail."""
        named, other = WrongCount("dispatch", "one"), WrongOutput("combine", "two")
        named.requirement = "EXCH-02"
        assert ("EXCH-02",) == ending(trial(), named).violated
        assert () == ending(trial(), other).violated
        assert () == ending(trial(), ExceptionGroup("two", [named, other])).violated
        assert () == ending(trial(), Mismatch("run", "x")).violated


class TestEvidence:
    TRACEBACK = """Traceback (most recent call last):
  File "/suite/moe_conformance/scenarios/step.py", line 1, in forward
    y = exchange(x)
  File "/torchlibrary/some/moe.py", line 7, in dispatch
    return super().dispatch(x)
           ^^^^^^^^^^^^^^^^^^^
  File "/torch/nn/modules/module.py", line 9, in _call_impl
    return forward_call(*args, **kwargs)
  File "/torchlibrary/some/rows.py", line 3, in rows
    return rows.view(-1)
  File "/torch/_tensor.py", line 5, in view
    raise error
RuntimeError: view size is not compatible
with the stride
"""

    def test_the_frames_of_the_library_are_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of the suite and of torch are not, except the last one; the words of the error are whole."""
        monkeypatch.setattr(evidence, "_SUITE", "/suite/moe_conformance")
        monkeypatch.setattr(evidence, "_OTHERS", ("/torch/", "/python/", "<"))
        shown = evidence.own_frames(self.TRACEBACK)
        frames = [line.split('"')[1] for line in shown if line.startswith("  File")]
        assert ["/torchlibrary/some/moe.py", "/torchlibrary/some/rows.py", "/torch/_tensor.py"] == frames
        assert ["RuntimeError: view size is not compatible", "with the stride"] == shown[-2:]
        assert not any("^^^" in line for line in shown)

    def test_a_stack_of_a_rank_that_hung_is_whole(self) -> None:
        """It has another form, and every frame may be the one that waits."""
        stack = 'Thread 0x1 (most recent call first):\n  File "/torch/x.py", line 1 in wait'
        assert stack.splitlines() == evidence.own_frames(stack)

    def test_warnings_of_torch_are_left_out(self) -> None:
        """What the library printed is shown, its warnings too."""
        printed = (
            "[W1129 10:08:54.000 socket.cpp:759] [c10d] The client socket has failed\n"
            "[rank1]:W1129 10:32:28.793000 3160 torch/utils/_pytree.py:630] deprecated\n"
            "/venv/torch/_tensor.py:9: UserWarning: a view\n  return x.view()\n"
            "/torchlibrary/some/moe.py:9: UserWarning: capacity is small\n  warn()\nlast words\n"
        )
        outcome = Outcome("toy", WORKLOAD, (RankOutcome(0, "died", output=printed), RankOutcome(1, "ok")), 0.1)
        lines = list(evidence.evidence(Died("run", "rank 0 died"), outcome))
        kept = ["/torchlibrary/some/moe.py:9: UserWarning: capacity is small", "  warn()", "last words"]
        assert ["rank 0 printed:", *(f"  {line}" for line in kept)] == lines
