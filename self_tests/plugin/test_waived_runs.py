"""Waivers in whole runs of the toy backend."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY

NEXT_YEAR = (date.today() + timedelta(days=300)).isoformat()


def toy_waiver(
    number: int, variant: str, layout: str, requirement: str, expires: str = NEXT_YEAR, kind: str = "WrongOutput"
) -> str:
    """Return a waiver for the toy backend."""
    return f"""
[[waiver]]
id = "TOY-{number}"
requirements = ["{requirement}"]
variants = ["{variant}"]
layouts = ["{layout}"]
workloads = ["even"]
reason = "a toy"
evidence = "self_tests"
owner = "self_tests"
expires = {expires}
versions = ["torch>=2"]
example = "test_outputs[{variant}-{layout.replace("*", "ep2")}-even]"

[[waiver.failure]]
kind = "{kind}"
stage = "combine"
words = ["every element of y is 2.000 x the expected value"]
at_most = 1
"""


class TestRun:
    def judged(self, folder: Path, text: str, *arguments: str) -> plugin_runs.Finished:
        """Judge the toy with those waivers."""
        (folder / "toy.toml").write_text(text)
        given = ("--moe-backend", TOY, "--moe-ranks", "2", "--moe-waivers", "toy.toml", "--moe-report", str(folder))
        here = ("-o", "python_files=checks.py", str(PROJECT))
        return plugin_runs.pytest_on("-v", *given, *arguments, *here, cwd=folder)

    def test_a_waived_failure_is_green_and_runs_first(self, tmp_path: Path) -> None:
        """The failures of one variant are waived, and the run passes; the example comes before everything else."""
        done = self.judged(tmp_path, toy_waiver(1, "wrong", "*", "EXCH-05"), "-k", "wrong or right")
        assert 0 == done.status
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path))
        assert "waived" == verdicts["test_outputs[wrong-ep2-even]"] == verdicts["test_outputs[wrong-single-even]"]
        assert "pass" == verdicts["test_finished[wrong-ep2-even]"]

    def test_one_of_other_versions_excuses_nothing(self, tmp_path: Path) -> None:
        """What it would waive fails; that it was not applied is no failure, and is said at the end."""
        text = toy_waiver(1, "wrong", "*", "EXCH-05").replace("torch>=2", "torch>=99")
        done = self.judged(tmp_path, text, "-k", "(wrong or right) and outputs")
        assert 1 == done.status
        report = plugin_runs.result(tmp_path)
        assert "fail" == plugin_runs.verdicts(report)["test_outputs[wrong-ep2-even]"]
        assert [] == report["problems"]
        assert "waivers of other versions, not applied: 1" in done.output

    def test_a_crash_is_not_excused_by_a_waiver_of_wrong_outputs(self, tmp_path: Path) -> None:
        """Under the cell of a waiver an item that fails in another way fails, and the run says which failure it is."""
        done = self.judged(tmp_path, toy_waiver(1, "raises", "*", "EXCH-05"), "-k", "(raises or right) and outputs")
        assert 1 == done.status
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path))
        assert "crash" == verdicts["test_outputs[raises-ep2-even]"] == verdicts["test_outputs[raises-single-even]"]
        assert "TOY-1 waives another failure here; this is Raised in run" in done.output

    def test_a_crash_of_a_case_is_excused_for_all_of_its_checks(self, tmp_path: Path) -> None:
        """It is one fault: a check of another requirement needs no waiver of its own, and of another case it does."""
        text = toy_waiver(1, "raises", "ep2", "EXCH-05", kind="Raised").replace("combine", "run")
        text = text.replace("every element of y is 2.000 x the expected value", "the toy is broken")
        done = self.judged(tmp_path, text, "-k", "raises")
        report = plugin_runs.result(tmp_path)
        verdicts = plugin_runs.verdicts(report)
        assert "waived" == verdicts["test_finished[raises-ep2-even]"]  # which decides EXCH-09
        assert "crash" == verdicts["test_finished[raises-single-even]"]
        assert 1 == done.status

    def test_a_wrong_waiver_fails_the_run(self, tmp_path: Path) -> None:
        """One matches a pass, one is unused, one expired: each is told, and the run fails."""
        waivers = [
            toy_waiver(1, "wrong", "ep2", "EXCH-05"),
            toy_waiver(2, "right", "ep2", "EXCH-05"),
            toy_waiver(3, "refuses", "ep2", "EXCH-05"),
            toy_waiver(4, "wrong", "single", "EXCH-05", expires="2020-01-01"),
        ]
        done = self.judged(tmp_path, "".join(waivers))
        assert 1 == done.status
        report = plugin_runs.result(tmp_path)
        verdicts = plugin_runs.verdicts(report)
        assert "waived" == verdicts["test_outputs[wrong-ep2-even]"]
        assert "unexpected pass" == verdicts["test_outputs[right-ep2-even]"]
        assert "fail" == verdicts["test_outputs[wrong-single-even]"]
        expired, unused = report["problems"]
        assert "TOY-4: expired on 2020-01-01" in expired
        assert "TOY-3 is unused" in unused
        assert "TOY-2 waives this check, but it passes" in done.output
        first = next(line for line in done.output.splitlines() if "::test_" in line)
        assert "checks.py::test_outputs[right-ep2-even]" in first
