"""The plug-in judges a small project: one variant of a toy backend per verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_conformance import spec
from moe_conformance.report.records import Record
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY, Finished

ASKED = ("--moe-propose-waivers", "--moe-backend", TOY, "--moe-ranks", "2")

# Checks that are at fault themselves.
BROKEN = """
import pytest

from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


def right(workload):
    return workload.name == "even" and workload.config.variant == "right"


@requirement("EXCH-07", run=ExchangeStep(), when=right)
def test_nothing(reading, tally):
    pass


@requirement("EXCH-08", run=ExchangeStep(), when=right)
def test_broken(reading, tally):
    tally.add(elements=1 // 0)


@requirement("EXCH-11", run=ExchangeStep(), when=right)
def test_skips(reading, tally):
    pytest.importorskip("no_such_module")
"""

# Of both checks, on the single rank and on ep2.
VERDICTS = {
    "refuses": ("refused", "refused"),
    "unadapted": ("not adapted", "not adapted"),
    "limited": ("limit", "limit"),
    "proves": ("refused", "refused"),
    "proves_late": ("refused", "refused"),
}


def expected_verdicts() -> dict[str, str]:
    """Return what every item of the project must end in."""
    found = {}
    for layout, at in (("single", 0), ("ep2", 1)):
        for check in ("test_outputs", "test_finished"):
            for variant, verdicts in VERDICTS.items():
                found[f"{check}[{variant}-{layout}-even]"] = verdicts[at]
            found[f"{check}[right-{layout}-even]"] = "pass"
        found[f"test_outputs[wrong-{layout}-even]"] = "fail"
        found[f"test_finished[wrong-{layout}-even]"] = "pass"
        found[f"test_nothing[right-{layout}-even]"] = "vacuous"
        found[f"test_broken[right-{layout}-even]"] = found[f"test_skips[right-{layout}-even]"] = "error"
        # A fault of the whole case is reported once; what other checks were not run is counted by cell.
        found |= {f"test_finished[raises-{layout}-even]": "crash", f"test_outputs[raises-{layout}]": "not run"}
        for variant in ("stumbles", "boasts"):
            found |= {f"test_outputs[{variant}-{layout}-even]": "fail", f"test_finished[{variant}-{layout}]": "not run"}
    found |= {f"{check}[waits-single-even]": "pass" for check in ("test_outputs", "test_finished")}
    return found | {"test_finished[waits-ep2-even]": "hang", "test_outputs[waits-ep2]": "not run"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run of this module reports."""
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of the project."""
    broken = tmp_path_factory.mktemp("checks") / "broken_checks.py"
    broken.write_text(BROKEN)
    return str(PROJECT / "checks.py"), str(broken)


@pytest.fixture(scope="module")
def judged(folder: Path, checks: tuple[str, str]) -> Finished:
    """The project, judged once."""
    return plugin_runs.pytest_on("-q", *ASKED, "--moe-report", str(folder), *checks, cwd=folder)


@pytest.fixture(scope="module")
def report(judged: Finished, folder: Path) -> dict[str, Any]:
    """The report of that run."""
    return plugin_runs.result(folder)


def decided(report: dict[str, Any]) -> dict[str, Record]:
    """Return all of every record, the traceback of the suite's own fault aside."""
    return {item: replace(record, detail="") for item, record in plugin_runs.records(report).items()}


def record(report: dict[str, Any], item: str) -> Record:
    """Return the record of an item."""
    return plugin_runs.records(report)[item]


class TestVerdicts:
    def test_every_item_ends_in_its_verdict(self, report: dict[str, Any]) -> None:
        """A variant that computes wrongly fails, one that raises crashes, one that waits hangs, and so on."""
        assert expected_verdicts() == plugin_runs.verdicts(report)

    def test_the_run_fails(self, judged: Finished) -> None:
        """A failing item fails the run."""
        assert 1 == judged.status

    def test_the_law_is_listed_whole(self, report: dict[str, Any]) -> None:
        """Every requirement has a verdict; those without a check are not run."""
        verdicts = {entry["id"]: entry["verdict"] for entry in report["requirements"]}
        decided = {"EXCH-05": "fail", "EXCH-07": "vacuous", "EXCH-08": "error", "EXCH-09": "fail", "EXCH-11": "error"}
        assert {each: decided.get(each, "not run") for each in spec.load()} == verdicts

    def test_xdist_gives_the_same(self, tmp_path: Path, checks: tuple[str, str], report: dict[str, Any]) -> None:
        """Two workers, each with ranks of its own, decide in all what one process does, and no case runs twice."""
        again = plugin_runs.pytest_on("-n", "2", *ASKED, "--moe-report", str(tmp_path), *checks, cwd=tmp_path)
        assert 1 == again.status
        merged = plugin_runs.result(tmp_path)
        assert plugin_runs.verdicts(report) == plugin_runs.verdicts(merged)
        assert report["cases"] == merged["cases"]
        assert decided(report) == decided(merged)


class TestRecord:
    def test_a_failure_says_what_and_how_to_see_it_again(self, report: dict[str, Any]) -> None:
        """Diagnosis, stage, blamed ranks, what was compared, and a command that selects the item."""
        failed = record(report, "test_outputs[wrong-ep2-even]")
        assert "every element of y is 2.000 x the expected value" in failed.message
        assert ("combine", "WrongOutput") == (failed.stage, failed.kind)
        assert ("wrong", "ep2", "even") == (failed.variant, failed.layout, failed.workload)
        assert failed.reproduce(report["again"]) == (
            f"moe-conformance run --backend {TOY} --ranks 2 --only EXCH-05 -- -k 'test_outputs[wrong-ep2-even]'"
        )

    def test_sizes_of_one_value_are_told_apart_by_another_layout(self, report: dict[str, Any]) -> None:
        """A factor of two on two ranks may be ep, dp or K; on a single rank it is K or none of these."""
        failed = record(report, "test_outputs[wrong-ep2-even]")
        assert "every element of y is 2.000 x the expected value: K" in failed.message
        further = "on single, where ep = 1, K = 2, dp = 1, it is 2.000 x: K"
        assert further == failed.message.rpartition("; ")[2]

    def test_a_pass_says_what_it_compared(self, report: dict[str, Any]) -> None:
        """Elements and ranks are counted, and the backend says what it resolved to."""
        passed = record(report, "test_outputs[right-ep2-even]")
        assert 0 < passed.compared["elements"]
        assert [0, 1] == passed.compared["ranks"]
        assert "AllToAllExchange" == passed.resolved["exchange"]

    def test_a_crash_brings_the_ranks_traceback(self, report: dict[str, Any]) -> None:
        """The rank is blamed, and its own traceback is there, not the judge's."""
        crashed = record(report, "test_finished[raises-ep2-even]")
        assert (0,) == crashed.blamed
        assert "ZeroDivisionError: the toy is broken" in crashed.detail
        assert "judging" not in crashed.detail

    def test_a_limit_that_nothing_refuses_is_a_false_claim(self, report: dict[str, Any]) -> None:
        """A backend that declares a proved limit must have its library refuse."""
        assert "but the library raised nothing" in record(report, "test_outputs[boasts-ep2-even]").message

    def test_a_step_may_refuse_what_a_limit_says(self, report: dict[str, Any]) -> None:
        """A library that raises on every rank while it runs has proved the limit, as one that refuses to be built."""
        told = record(report, "test_outputs[proves_late-ep2-even]").message
        assert told.startswith("refused by the library in forward:0: ")

    def test_a_mistake_is_no_refusal(self, report: dict[str, Any]) -> None:
        """What a program raises by mistake proves no limit, and is told."""
        told = record(report, "test_outputs[stumbles-ep2-even]").message
        assert "and rank 0 raised AttributeError: 'Routing' object has no attribute 'renamed'" in told

    def test_the_run_is_described(self, report: dict[str, Any]) -> None:
        """The report says what was judged, where and how."""
        assert (TOY, "cpu", 2, "quick", 1) == tuple(
            report[name] for name in ("backend", "device", "ranks", "profile", "exit")
        )
        assert "--moe-backend" in report["command"]
        assert not report["interrupted"]


class TestCrash:
    def test_it_is_one_failure_of_all_requirements_of_the_case(self, report: dict[str, Any]) -> None:
        """Of the checks of a case that crashed, that of EXCH-09 fails, by their requirements too; the others say so."""
        crashed = [each for each in plugin_runs.records(report).values() if each.verdict in ("crash", "hang")]
        assert {("EXCH-09", "EXCH-05")} == {each.requirements for each in crashed}
        assert 3 == len(crashed)
        other = record(report, "test_outputs[raises-ep2]")
        assert "not run: the case crashed, which another check of it reports" == other.message

    def test_a_false_limit_is_one_failure_too(self, report: dict[str, Any]) -> None:
        """The limit is of the case, and not of what each check judges."""
        told = record(report, "test_outputs[boasts-ep2-even]")
        assert ("FalseLimit", ("EXCH-05", "EXCH-09")) == (told.kind, told.requirements)
        assert told.reproduce("again") == "again -- -k 'test_outputs[boasts-ep2-even]'"

    def test_what_was_not_run_for_it_is_not_said_to_fail_the_run(self, judged: Finished) -> None:
        """Nothing is added to the failure."""
        assert "FAILS THE RUN" not in judged.output


class TestTerminal:
    def test_one_fault_is_told_once(self, judged: Finished) -> None:
        """A crash is one failure of a case, not one per check; two layouts that crash alike share one traceback."""
        assert 1 == judged.output.count('raise ZeroDivisionError("the toy is broken")')
        assert "1 more of this kind, on raises-ep2-even" in judged.output

    def test_no_python_traceback_of_the_judge(self, judged: Finished) -> None:
        """What is wrong stands there in words."""
        assert "combine: every element of y is 2.000 x the expected value" in judged.output
        assert "judge_outputs" not in judged.output

    def test_a_failure_is_told_as_it_happens(self, judged: Finished) -> None:
        """Long before the summary, with the requirement, its sentence and the command; at the end it comes again."""
        first, _, summary = judged.output.partition("judged 3 of")
        assert "EXCH-09: crash" in first
        assert f"EXCH-09: {spec.load()['EXCH-09'].sentence}" in first
        assert "reproduce: moe-conformance run" in first
        assert "EXCH-09: crash" not in summary

    def test_the_matrix_has_a_column_per_layout(self, judged: Finished) -> None:
        """Requirement by layout, with how many items of a cell failed."""
        (row,) = [line.split() for line in judged.output.splitlines() if line.startswith("   EXCH-09 ")]
        assert ["EXCH-09", "✗3", "✗4", "-", "-", "-", "-"] == row

    def test_cases_are_counted_once(self, judged: Finished, report: dict[str, Any]) -> None:
        """A case is one run on ranks, however many checks read it: ten variants run on two layouts."""
        assert 20 == report["cases"]
        assert "20 cases in" in judged.output

    def test_a_waiver_is_proposed_where_it_is_asked_for(self, judged: Finished, folder: Path) -> None:
        """The proposal leaves to a person what only a person can say, and is not written anywhere."""
        assert 'owner = "?"' in judged.output
        assert ["result.json"] == sorted(path.name for path in folder.iterdir())
