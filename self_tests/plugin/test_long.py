"""Long runs: divided, stopped before their time is up, cut off, and judged by workers that die."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY, Finished

TOYS = TOY.partition(":")[0]
RIGHT = f"{TOYS}:RightToy"

# Checks that take their time, and one that ends its process.
SLOW = """
import os
import signal
import time

from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


@requirement("EXCH-05", run=ExchangeStep(), when=lambda workload: workload.name.startswith("even"))
def test_quick(outcome, tally):
    tally.add(elements=1)
    time.sleep({item_s})


@requirement("EXCH-09", run=ExchangeStep(), when=lambda workload: workload.name == "even")
def test_endless(outcome, tally):
    tally.add(elements=1)
    time.sleep({last_s})


@requirement("EXCH-07", run=ExchangeStep(), when=lambda workload: workload.name == "even")
def test_deadly(outcome, tally):
    tally.add(elements=1)
    if {deadly} and outcome.workload.layout.name == "ep2":
        os.kill(os.getpid(), signal.SIGKILL)
"""

# SIGTERM comes where Python ignores what is raised: while items are collected, or while the first of them runs.
TERMINATED = """
import signal

from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@requirement("EXCH-05", run=ExchangeStep(), when=lambda workload: workload.layout.world == 1)
def test_any(outcome, tally):
    tally.add(elements=1)
    if {late}:
        Last()


if not {late}:
    Last()
"""


def run(folder: Path, backend: str, *arguments: str) -> Finished:
    """Judge a toy on two ranks and report into the folder."""
    asked = ("-q", "--moe-backend", backend, "--moe-ranks", "2", "--moe-report", str(folder))
    return plugin_runs.pytest_on(*asked, *arguments, cwd=folder)


def slow(folder: Path, item_s: float = 0.0, last_s: float = 0.0, deadly: bool = False) -> str:
    """Write the checks and return their file."""
    path = folder / "slow_checks.py"
    path.write_text(SLOW.format(item_s=item_s, last_s=last_s, deadly=deadly))
    return str(path)


class TestShards:
    def test_shards_make_the_whole(self, tmp_path: Path) -> None:
        """Each item is in one shard; merged, they are what a run in one piece decided, number of cases included."""
        folders = [tmp_path / name for name in ("whole", "one", "two")]
        for folder in folders:
            folder.mkdir()
        whole, *parts = folders
        file = str(PROJECT / "checks.py")
        run(whole, TOY, file)
        for index, folder in enumerate(parts, 1):
            run(folder, TOY, file, "--moe-shard", f"{index}/2")
        left_out = [plugin_runs.result(folder)["left_out"] for folder in parts]
        assert 0 < min(each["cases"] for each in left_out)
        assert not set(left_out[0]["cells"]) & set(left_out[1]["cells"])
        done = plugin_runs.cli("merge", *map(str, parts), "--report", str(tmp_path / "merged"), cwd=tmp_path)
        expected, merged = plugin_runs.result(whole), plugin_runs.result(tmp_path / "merged")
        assert 1 == done.status
        assert plugin_runs.verdicts(expected) == plugin_runs.verdicts(merged)
        assert (expected["cases"], expected["problems"]) == (merged["cases"], merged["problems"])

    def test_a_shard_says_what_it_left_out(self, tmp_path: Path) -> None:
        """On the terminal too; fewer cells than shards cannot be divided."""
        done = run(tmp_path, RIGHT, str(PROJECT / "checks.py"), "--moe-shard", "2/2")
        assert 0 == done.status, done.output
        assert "shard 2/2: " in done.output
        assert "are in other shards" in done.output
        assert "only 4 cells have cases" in run(tmp_path, RIGHT, "--moe-shard", "1/5").output


class TestTimeLimit:
    def test_the_run_ends_after_the_item_at_hand(self, tmp_path: Path) -> None:
        """It ends before the limit, with its own status and sentence, and the rest is shown as not run."""
        began = time.monotonic()
        run(tmp_path, RIGHT, slow(tmp_path), "--moe-time-limit", "1")
        limit = 20 + math.ceil(2 * (time.monotonic() - began))  # a start takes as long as the machine is busy
        done = run(tmp_path, RIGHT, slow(tmp_path, item_s=limit / 5), "--moe-time-limit", str(limit))
        report = plugin_runs.result(tmp_path)
        assert (124, 124, True) == (done.status, report["exit"], report["interrupted"])
        assert f"STOPPED: --time-limit {limit} is near" in done.output
        verdicts = plugin_runs.verdicts(report)
        assert {"not run"} < set(verdicts.values())

    def test_a_limit_that_the_start_takes_up_is_told_as_well(self, tmp_path: Path) -> None:
        """Nothing has run, and the report says so of every item."""
        done = run(tmp_path, RIGHT, slow(tmp_path), "--moe-time-limit", "1")
        report = plugin_runs.result(tmp_path)
        assert (124, 124, True) == (done.status, report["exit"], report["interrupted"])
        assert "STOPPED: --time-limit 1 is near" in done.output
        assert {"not run"} == set(plugin_runs.verdicts(report).values())

    def test_an_item_that_takes_too_long_is_interrupted(self, tmp_path: Path) -> None:
        """It is not run, and nothing waits for it."""
        done = run(tmp_path, RIGHT, slow(tmp_path, last_s=600.0), "--moe-time-limit", "40")
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path))
        assert 124 == done.status
        assert {"test_endless", "test_quick", "test_deadly"} == {item.partition("[")[0] for item in verdicts}
        assert "not run" == verdicts["test_endless[right-single]"]


class TestTerminated:
    @pytest.mark.parametrize("late", [False, True], ids=["collecting", "running"])
    def test_a_signal_whose_exception_is_lost_ends_the_run_too(self, tmp_path: Path, late: bool) -> None:
        """One item has its verdict, no other begins, and the report and the exit status say why."""
        (tmp_path / "checks.py").write_text(TERMINATED.format(late=late))
        done = run(tmp_path, RIGHT, str(tmp_path / "checks.py"))
        report = plugin_runs.result(tmp_path)
        assert 143 == done.status, done.output
        assert (143, True, "terminated by SIGTERM") == (report["exit"], report["interrupted"], report["stopped"])
        assert "STOPPED: terminated by SIGTERM" in done.output
        ended = sorted(plugin_runs.verdicts(report).values())
        assert ["not run"] * (len(ended) - 1) + ["pass"] == ended
        assert len(ended) > 1

    def test_a_signal_while_the_session_ends_changes_nothing(self, tmp_path: Path) -> None:
        """What was found is told in full, under the reason that came first."""
        (tmp_path / "checks.py").write_text(
            TERMINATED.format(late=True).replace("Last()\n", "raise KeyboardInterrupt\n", 1)
        )
        hook = "def pytest_keyboard_interrupt():\n    signal.raise_signal(signal.SIGTERM)\n"
        (tmp_path / "conftest.py").write_text(f"import signal\n\n\n{hook}")
        done = run(tmp_path, RIGHT, str(tmp_path / "checks.py"))
        report = plugin_runs.result(tmp_path)
        assert (130, 130, "interrupted by Ctrl-C") == (done.status, report["exit"], report["stopped"]), done.output


class TestCutOff:
    def test_after_many_hangs_the_rest_is_not_run(self, tmp_path: Path) -> None:
        """A sentence says so, and the run fails."""
        (tmp_path / "checks.py").write_text((PROJECT / "checks.py").read_text().replace("name == ", "name[:4] == "))
        asked = ("-p", "self_tests.plugin.project.impatient", "-k", "ep2 and (waits or right)")
        done = run(tmp_path, TOY, *asked, str(tmp_path / "checks.py"))
        report = plugin_runs.result(tmp_path)
        assert (1, True) == (done.status, report["interrupted"])
        assert "STOPPED: 2 cases have hung" in done.output
        assert "not run" in plugin_runs.verdicts(report).values()


class TestWorkers:
    def test_the_controller_knows_what_its_workers_did_not_come_to(self, tmp_path: Path) -> None:
        """It collects nothing itself; stopped in the middle, it tells every item, and leaves no process."""
        mark = f"{os.getpid()}-workers"
        asked = f"--moe-backend {RIGHT} --moe-ranks 2 --moe-report {tmp_path} -n 2".split()
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, *asked, slow(tmp_path, last_s=600.0)]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=plugin_runs.environment(mark),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        journal = tmp_path / "records.jsonl"
        try:
            assert plugin_runs.comes(lambda: journal.exists() and journal.read_bytes())
            process.send_signal(signal.SIGTERM)
            assert 143 == process.wait(timeout=plugin_runs.LIMIT_S)
        finally:
            process.kill()
        assert plugin_runs.comes(lambda: not list(plugin_runs.marked(mark)))
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path))
        assert {"test_endless", "test_quick", "test_deadly"} == {item.partition("[")[0] for item in verdicts}
        assert "not run" == verdicts["test_endless[right-single]"]
        assert not journal.exists()

    def test_the_others_go_on_when_a_worker_ends(self, tmp_path: Path) -> None:
        """The item that it ran is an error and is not run again, and every other has its own verdict."""
        asked = ("-n", "2", slow(tmp_path, deadly=True))
        done = run(tmp_path, RIGHT, *asked)
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path))
        assert 1 == done.status
        assert "error" == verdicts.pop("test_deadly[right-ep2-even]")
        assert {"pass", "refused"} == set(verdicts.values())
        assert "the pytest-xdist worker ended while it ran this item" in done.output
