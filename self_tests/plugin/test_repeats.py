"""A failure is repeated once on new ranks, and a fault of the machine is not blamed on the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_conformance.report.records import Record
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY

MOODY = f"{TOY.partition(':')[0]}:MoodyToy"

# A check that draws: what fails on the first ranks only is unstable there too.
DRAWN = """
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.observed.run import read
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import DrawnRuns, ExchangeStep
from moe_conformance.workloads.drawn.strategies import probe_workloads


@requirement("EXCH-05", run=DrawnRuns(ExchangeStep()))
def test_drawn(cell, drive, tally):
    workloads = probe_workloads(cell.variant, cell.layout, cell.limits, cell.device)
    drive(workloads, lambda outcome: judge_outputs(read(outcome), tally))
"""


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., tuple[plugin_runs.Finished, dict[str, Record]]]]:
    """Judges the toy on one rank, its mood new."""
    patch = pytest.MonkeyPatch()

    def judged(*arguments: str) -> tuple[plugin_runs.Finished, dict[str, Record]]:
        folder = tmp_path_factory.mktemp("report")
        patch.setenv("MOODY", str(folder / "first-rank"))
        asked = ("-q", "--moe-backend", MOODY, "--moe-ranks", "1", "--moe-report", str(folder))
        done = plugin_runs.pytest_on(*asked, *arguments, cwd=folder)
        return done, plugin_runs.records(plugin_runs.result(folder))

    yield judged
    patch.undo()


@pytest.fixture(scope="module")
def pinned(
    run: Callable[..., tuple[plugin_runs.Finished, dict[str, Record]]],
) -> tuple[plugin_runs.Finished, dict[str, Record]]:
    """The checks of the project, judged once."""
    return run(str(PROJECT / "checks.py"))


class TestPinned:
    def test_another_verdict_on_new_ranks_is_unstable(
        self, pinned: tuple[plugin_runs.Finished, dict[str, Record]]
    ) -> None:
        """Both endings are told; it fails, and what passed at first is not repeated."""
        done, checks = pinned
        record = checks["test_outputs[moody-single-even]"]
        assert "unstable" == record.verdict
        assert "unstable: fail first, pass in a repeat on new ranks" in record.message
        assert "every element of y is 2.000 x the expected value" in record.message
        assert "pass" == checks["test_finished[moody-single-even]"].verdict
        assert 1 == done.status

    def test_the_same_verdict_stays(self, pinned: tuple[plugin_runs.Finished, dict[str, Record]]) -> None:
        """A repeat is for diagnosis only: it is neither counted nor told."""
        record = pinned[1]["test_outputs[wrong-single-even]"]
        assert ("fail", 1) == (record.verdict, record.runs)
        assert record.message.startswith("combine: every element")

    def test_the_machine_is_not_blamed_on_the_backend(
        self, pinned: tuple[plugin_runs.Finished, dict[str, Record]]
    ) -> None:
        """Nobody is blamed and no waiver is proposed, but the run is not green."""
        done, checks = pinned
        record = checks["test_finished[unlucky-single-even]"]
        assert ("infrastructure", ()) == (record.verdict, record.blamed)
        assert "memory error of a GPU: RuntimeError: CUDA error: uncorrectable ECC" in record.message
        assert "INFRASTRUCTURE: 2 items have no result, since the machine failed" in done.output


class TestDrawn:
    def test_a_drawn_failure_is_repeated_as_it_was_found(
        self, run: Callable[..., tuple[plugin_runs.Finished, dict[str, Record]]], tmp_path: Path
    ) -> None:
        """The smallest example runs on new ranks, and passes there; one that fails there again has failed."""
        (tmp_path / "drawn_checks.py").write_text(DRAWN)
        checks = run(str(tmp_path / "drawn_checks.py"))[1]
        assert "unstable" == checks["test_drawn[moody-single]"].verdict
        assert "drawn: E = " in checks["test_drawn[moody-single]"].detail
        assert "fail" == checks["test_drawn[wrong-single]"].verdict
        assert "infrastructure" == checks["test_drawn[unlucky-single]"].verdict
