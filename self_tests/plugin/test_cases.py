"""One pytest item runs all checks of a case, and each check is still selected, told and stopped at by its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY, Finished

CHECKS = str(PROJECT / "checks.py")

# A check that asks for what pytest alone could make.
FOREIGN = """
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


@requirement("EXCH-07", run=ExchangeStep())
def test_foreign(outcome, tally, tmp_path):
    tally.add(elements=1)
"""

# Rows beside a function.
ROWS = """
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_outputs
from moe_conformance.spec import requirement
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ExchangeStep


def even(workload):
    return workload.name == "even"


class TestOutputs:
    test_outputs = Row("EXCH-05", ExchangeStep(), judge_outputs, when=even)
    '''The output is right.'''

    @requirement("EXCH-07", run=ExchangeStep(), when=even)
    def test_form(self, reading, tally):
        judge_form(reading, tally)
"""

# Checks that see whether the outcome of an earlier case is still there, although nobody looks for garbage.
FORGOTTEN = """
import gc
import weakref

from moe_conformance.judging.verdict import NotOffered
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep

gc.disable()
seen = {}


@requirement("EXCH-07", run=ExchangeStep(), when=lambda workload: workload.name.startswith("even"))
def test_raises(outcome, tally):
    gc.disable()
    seen[outcome.workload.layout.name, outcome.workload.name] = weakref.ref(outcome)
    raise NotOffered("a frame holds the outcome")


@requirement("EXCH-08", run=ExchangeStep(), when=lambda workload: workload.name.startswith("even"))
def test_forgotten(outcome, tally):
    tally.add(elements=len(seen))
    assert 1 == sum(each() is not None for each in seen.values())
"""


# A check that compares runs, before one that reads the case alone and fails on `wrong`.
ORDERED = """
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Mismatch
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


def even(workload):
    return workload.name == "even"


@requirement("EXCH-13", run=ExchangeStep(), when=even)
def test_compared(outcome, twins, tally):
    raise Mismatch("combine", "the runs differ")


@requirement("EXCH-05", run=ExchangeStep(), when=even)
def test_alone(reading, tally):
    judge_outputs(reading, tally)
"""


def judged(folder: Path, *arguments: str, file: str = CHECKS) -> Finished:
    """Judge the toy on one rank."""
    asked = ("-q", "--moe-backend", TOY, "--moe-ranks", "1", "--moe-report", str(folder))
    return plugin_runs.pytest_on(*asked, *arguments, file, cwd=folder)


def verdicts(folder: Path) -> dict[str, str]:
    """Return what was decided in the folder's report."""
    return plugin_runs.verdicts(plugin_runs.result(folder))


class TestSelection:
    def test_expressions_are_held_against_every_check_of_a_case(self, tmp_path: Path) -> None:
        """`not` too: one check of a case is left out, and the other stays."""
        done = judged(tmp_path, "--collect-only", "-k", "single and (right or wrong) and not test_finished")
        assert 0 == done.status
        named = [line.rpartition("::")[2] for line in done.output.splitlines() if "::" in line]
        assert ["test_outputs[right-single-even]", "test_outputs[wrong-single-even]"] == named

    def test_a_node_id_is_one_check_on_one_case(self, tmp_path: Path) -> None:
        """As it is printed, on the command line."""
        done = judged(tmp_path, file=f"{CHECKS}::test_finished[right-single-even]")
        assert (0, {"test_finished[right-single-even]": "pass"}) == (done.status, verdicts(tmp_path))
        assert "1 passed" in done.output

    def test_what_failed_last_runs_again(self, tmp_path: Path) -> None:
        """With --lf the failed check of a case alone, since pytest remembers it by its own node id."""
        cache = ("-p", "cacheprovider", "-o", f"cache_dir={tmp_path / 'cache'}")
        asked = ("-k", "single and (right or wrong)")
        assert 1 == judged(tmp_path, *cache, *asked).status
        assert 4 == len(verdicts(tmp_path))
        assert 1 == judged(tmp_path, *cache, *asked, "--lf").status
        assert {"test_outputs[wrong-single-even]": "fail"} == verdicts(tmp_path)

    def test_a_foreign_argument_is_refused(self, tmp_path: Path) -> None:
        """A check of cases has no fixtures of pytest's; collecting it says so."""
        (tmp_path / "foreign.py").write_text(FOREIGN)
        done = judged(tmp_path, file=str(tmp_path / "foreign.py"))
        assert pytest.ExitCode.INTERRUPTED != 0 != done.status  # type: ignore[comparison-overlap]
        assert "the arguments outcome, reading, tally, twins" in done.output
        assert "it also has tmp_path" in done.output

    def test_a_row_is_a_check_like_a_function(self, tmp_path: Path) -> None:
        """It is named, selected and judged alike, and no word of how it is made selects it."""
        (tmp_path / "test_rows.py").write_text(ROWS)
        asked = ("-k", "single and (right or wrong)")
        assert 1 == judged(tmp_path, *asked, file=str(tmp_path / "test_rows.py")).status
        expected = {"test_outputs[right-single-even]": "pass", "test_outputs[wrong-single-even]": "fail"}
        expected |= {f"test_form[{each}-single-even]": "pass" for each in ("right", "wrong")}
        assert expected == verdicts(tmp_path)
        node = f"{tmp_path / 'test_rows.py'}::TestOutputs::test_outputs[right-single-even]"
        assert 0 == judged(tmp_path, file=node).status
        assert {"test_outputs[right-single-even]": "pass"} == verdicts(tmp_path)
        assert "1 deselected" in judged(tmp_path, "-k", "judge", file=node).output

    def test_a_row_outside_a_class_is_refused(self, tmp_path: Path) -> None:
        """Its name would be nobody's."""
        (tmp_path / "test_rows.py").write_text(ROWS.replace("class TestOutputs:", "if True:"))
        done = judged(tmp_path, file=str(tmp_path / "test_rows.py"))
        assert 0 != done.status
        assert "test_outputs is a row, and rows stand in a class" in done.output


class TestStops:
    def test_the_first_failure_ends_the_case(self, tmp_path: Path) -> None:
        """With -x the checks that come after it are not run, though their outcome is there."""
        done = judged(tmp_path, "-x", "-k", "wrong and single")
        expected = {"test_outputs[wrong-single-even]": "fail", "test_finished[wrong-single]": "not run"}
        assert (1, expected) == (done.status, verdicts(tmp_path))


class TestTelling:
    def test_every_check_is_told_by_its_own_name(self, tmp_path: Path) -> None:
        """With -v one line for each, with its verdict; the totals count checks, and the item of a case is not told."""
        done = judged(tmp_path, "-vv", "-k", "wrong and single")
        assert 1 == done.status
        assert "checks.py::test_outputs[wrong-single-even] FAIL" in done.output
        assert "checks.py::test_finished[wrong-single-even] PASS" in done.output
        assert "case[" not in done.output
        assert "1 passed" in done.output


class TestOrder:
    @pytest.mark.parametrize(
        ("variant", "live"),
        [
            ("wrong", ["EXCH-05: fail in combine", "test_alone[wrong-single-even]"]),
            ("right", ["EXCH-13: fail in combine", "test_compared[right-single-even]"]),
        ],
    )
    def test_what_a_case_shows_alone_is_told_first(self, tmp_path: Path, variant: str, live: list[str]) -> None:
        """A check that compares runs comes after those that read one, and is told at the end if one of these fails."""
        (tmp_path / "ordered.py").write_text(ORDERED)
        done = judged(tmp_path, "-k", f"single and {variant}", file=str(tmp_path / "ordered.py"))
        told, _, end = done.output.partition("-----")
        assert live == [
            line for line in told.splitlines() if line.startswith(("EXCH-05: fail", "EXCH-13: fail", "test_"))
        ]
        assert f"test_compared[{variant}-single-even]" in end


class TestMemory:
    def test_an_outcome_goes_with_the_last_check_that_reads_it(self, tmp_path: Path) -> None:
        """Neither a verdict nor an exception keeps it, also where garbage is never looked for."""
        (tmp_path / "forgotten.py").write_text(FORGOTTEN)
        done = judged(tmp_path, "-k", "right", file=str(tmp_path / "forgotten.py"))
        found = verdicts(tmp_path)
        assert len(found) > 2
        assert 0 == done.status, done.output
        assert {"test_raises": {"not adapted"}, "test_forgotten": {"pass"}} == {
            check: {verdict for item, verdict in found.items() if item.startswith(check)}
            for check in ("test_raises", "test_forgotten")
        }
