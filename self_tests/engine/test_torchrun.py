"""Under torchrun one process is the driver, every process has a rank, and a lost process is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from self_tests.engine.torchrun_runs import PYTEST, agents, torchrun
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY
from self_tests.plugin.test_verdicts import VERDICTS

CHECKS = str(PROJECT / "checks.py")
RIGHT = "self_tests.plugin.project.backend:RightToy"
DESERTER = "self_tests.plugin.project.deserter:Deserter"
TOKEN = "a token of the test, and of no other"
# One case at a time: cases that are sent together with the one that ends a rank would be lost with it.
ALONE = ("-p", "self_tests.plugin.project.one_at_a_time")


def reported(folder: Path) -> dict[str, Any]:
    """Returns the content of result.json."""
    return plugin_runs.result(folder / "report")


def asked(backend: str) -> tuple[str, ...]:
    """Return the arguments that judge a backend."""
    return (*PYTEST, CHECKS, "--moe-backend", backend, "--moe-report", "report")


class TestOneMachine:
    def test_faults_of_ranks_are_survived_and_told_once(self, tmp_path: Path) -> None:
        """Crashes, hangs and refusals have the verdicts of a local run, and one process prints."""
        run = torchrun(*asked(TOY), cwd=tmp_path)
        assert 1 == run.status
        assert 1 == run.output.count("test session starts")
        report = reported(tmp_path)
        assert (2, False) == (report["ranks"], report["interrupted"])
        verdicts = plugin_runs.verdicts(report)
        for variant, expected in VERDICTS.items():
            for at, layout in enumerate(("single", "ep2")):
                assert expected[at] == verdicts[f"test_finished[{variant}-{layout}-even]"], (variant, layout)
        assert "pass" == verdicts["test_outputs[right-ep2-even]"]
        assert "fail" == verdicts["test_outputs[wrong-ep2-even]"]

    def test_a_killed_process_ends_the_run_and_what_was_found_is_kept(self, tmp_path: Path) -> None:
        """Torchrun ends all processes when it misses one; the report is written first."""
        run = torchrun(*asked(DESERTER), *ALONE, cwd=tmp_path)
        assert 0 != run.status
        report = reported(tmp_path)
        assert report["interrupted"]
        verdicts = plugin_runs.verdicts(report)
        assert "pass" == verdicts["test_outputs[right-single-even]"]
        assert "not run" == verdicts["test_outputs[deserts-ep2]"]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("-n", "2"), "pytest-xdist starts processes of its own"),
            (("--moe-ranks", "4"), "4 ranks are more than the 2 processes that were launched"),
        ],
    )
    def test_what_cannot_go_together_is_refused_once(
        self, tmp_path: Path, arguments: tuple[str, ...], sentence: str
    ) -> None:
        """RANK 0's process says why; the others end with it."""
        run = torchrun(*asked(RIGHT), *arguments, cwd=tmp_path)
        assert 0 != run.status
        assert 1 == run.output.count(sentence)


class TestSeveralMachines:
    def test_agents_run_together(self, tmp_path: Path) -> None:
        """With a token in common, the processes of both agents are ranks; the driver's agent alone prints."""
        first, second = agents(*asked(RIGHT), cwd=tmp_path, MOE_CONFORMANCE_TOKEN=TOKEN)
        assert (0, 0) == (first.status, second.status), first.output + second.output
        assert "" == second.output
        assert "pass" == plugin_runs.verdicts(reported(tmp_path))["test_outputs[right-ep2-even]"]

    def test_without_a_token_the_sentence_says_what_to_set(self, tmp_path: Path) -> None:
        """Processes of several machines have no private file in common; `moe-conformance run` says so too."""
        first, second = agents("-m", "moe_conformance.cli", "run", cwd=tmp_path)
        assert 0 not in (first.status, second.status)
        assert "set MOE_CONFORMANCE_TOKEN to the same text for all" in first.output

    def test_a_lost_machine_ends_the_run_and_what_was_found_is_kept(self, tmp_path: Path) -> None:
        """The driver's agent does not know; the driver does, and says which process it was."""
        first, second = agents(*asked(DESERTER), *ALONE, cwd=tmp_path, MOE_CONFORMANCE_TOKEN=TOKEN)
        assert 0 not in (first.status, second.status)
        report = reported(tmp_path)
        assert report["interrupted"]
        assert "the process of RANK 1 is lost" in report["stopped"]
        verdicts = plugin_runs.verdicts(report)
        assert "pass" == verdicts["test_outputs[right-single-even]"]
        assert "not run" == verdicts["test_outputs[deserts-ep2]"]
