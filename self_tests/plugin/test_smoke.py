"""The profile smoke: the first cases of the quick profile, and nothing else."""

from __future__ import annotations

from pathlib import Path

from moe_conformance.backends.native import Native
from moe_conformance.workloads.selection import power
from self_tests.plugin import plugin_runs


class TestSmoke:
    def test_it_runs_its_cases_alone_and_says_what_they_detect(self, tmp_path: Path) -> None:
        """All of those that fit the ranks, held to no floor; the report is of the profile."""
        done = plugin_runs.cli("run", "--profile", "smoke", "--ranks", "1", "--report", "report", cwd=tmp_path)
        report = plugin_runs.result(tmp_path / "report")
        assert (0, "smoke", []) == (done.status, report["profile"], report["problems"]), done.output
        records = [each for each in plugin_runs.records(report).values() if each.verdict != "not run"]
        judged = {(each.variant, each.layout, each.workload) for each in records if each.verdict != "not applicable"}
        assert {place for place in power.smoke(Native.variants) if place[1] == "single"} == judged
        known = power.read()
        assert (
            f"smoke: the first {known.smoke} cases of the profile quick, which detect {known.share:.0%} of the planted "
            "bugs that it detects; held to no floor"
        ) in done.output
