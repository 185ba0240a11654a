"""The command line: what it lists, what it finds on this machine, and how a run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_conformance import cli, contract, spec, waiving
from moe_conformance.backends.native import Native
from moe_conformance.cli import explaining
from moe_conformance.report import floor_file
from moe_conformance.spec.places import Places
from moe_conformance.workloads.selection import power
from self_tests.plugin import plugin_runs

STARTS_S = 60.0


def printed(*arguments: str) -> str:
    """Return what a command prints."""
    done = CliRunner().invoke(cli.main, arguments)
    assert 0 == done.exit_code, done.output
    return done.output


class TestList:
    def test_requirements(self) -> None:
        """One line each, with the sentence."""
        lines = printed("list", "requirements").splitlines()
        assert list(spec.load()) == [line.split()[0] for line in lines]
        assert all("MUST" in line or "SHOULD" in line for line in lines)

    def test_requirements_of_native_alone(self) -> None:
        """With sentence and reason, and how many there are; what a real library fails by is a judgement too."""
        *lines, last = printed("list", "requirements", "--native-only").splitlines()
        found = {line.split()[0]: reason.strip() for line, reason in zip(lines[::2], lines[1::2], strict=True)}
        assert last.startswith(f"{len(found)} requirements are judged on native alone, ")
        assert all(spec.load()[line.split()[0]].sentence in line for line in lines[::2])
        assert {id: spec.load()[id].without_library or "no reason given" for id in found} == found
        floors = floor_file.FOLDER
        held = set(re.findall(r"[A-Z]+-\d\d", (floors / "native.toml").read_text()))
        named = "".join(
            path.read_text()
            for path in (*floors.glob("*.toml"), *waiving.FOLDER.glob("*.toml"))
            if path.name != "native.toml"
        )
        places = Places()
        assert found.keys() == {id for id in held if id not in named and not places.detected(id)}

    def test_reasons_are_of_requirements_of_native_alone(self) -> None:
        """Each has a reason why no real library could be judged, which is gone once one was."""
        reasoned = {id for id, each in spec.load().items() if each.without_library}
        assert set(explaining.native_only()) == reasoned

    def test_limits_and_shoulds_are_judged_by_their_findings(self) -> None:
        """No waiver is of them: `explain` names what their checks detected."""
        found = printed("explain", "EXCH-44").splitlines()
        assert [
            "megatron-core: fails by MC-41",
            "torchtitan: fails by TT-07",
            "transformers: fails by TF-10",
        ] == sorted(line.strip() for line in found if "fails by" in line)

    def test_libraries_that_were_judged(self) -> None:
        """With their versions, what passes there, and what is waived: in some versions what newer ones have mended."""
        lines = [line for line in printed("explain", "GRAD-08").splitlines() if line.startswith("  megatron-core ")]
        said = r"  megatron-core \d\S+, torch \d\S+: passes with [a-z, ]*(; known failures MC-01-replicas)?"
        found = [re.fullmatch(said, line) for line in lines]
        assert [] == [line for line, match in zip(lines, found, strict=True) if match is None]
        assert {True, False} == {bool(match and match[1]) for match in found}

    def test_checks(self) -> None:
        """Each check with what it decides and the kind of run that it reads; helpers and imports are none."""
        lines = printed("list", "checks").splitlines()
        assert len(lines) == len(set(lines))
        (dispatch,) = (line for line in lines if "test_every_pair_reaches_its_expert_once" in line)
        where = "moe_conformance.distributed_tests.test_exchange::TestDispatch::test_every_pair_reaches_its_expert_once"
        assert f"{where}  EXCH-01  (exchange with the probe)" == dispatch

    def test_backends(self) -> None:
        """With versions, or with what to install; `--importable` gives bare names."""
        assert "native: torch " in printed("list", "backends")
        assert "native" in printed("list", "backends", "--importable").splitlines()

    def test_surfaces(self) -> None:
        """Each method of `Session` that a chapter adds, with the chapter and what it builds."""
        lines = {line.split()[0]: line for line in printed("list", "surfaces").splitlines()}
        built = "Build the exchange with a meter of overload attached; collective."
        assert ["load_meter", "overload", built] == lines["load_meter"].split(maxsplit=2)
        assert lines.keys() <= set(dir(contract.Session))

    def test_importable_goes_with_backends(self) -> None:
        """Anywhere else it would be ignored."""
        done = CliRunner().invoke(cli.main, ["list", "checks", "--importable"])
        assert 2 == done.exit_code

    def test_native_only_goes_with_requirements(self) -> None:
        """Nor does it mean anything elsewhere."""
        done = CliRunner().invoke(cli.main, ["list", "backends", "--native-only"])
        assert 2 == done.exit_code
        assert "--native-only goes with `list requirements`" in done.output


class TestOnly:
    def test_requirements_in_several_options(self, tmp_path: Path) -> None:
        """All of them are judged, and none else."""
        asked = ("--only", "EXCH-01", "--only", "EXCH-04,EXCH-05", "--report", str(tmp_path))
        assert 0 == plugin_runs.cli("run", "--ranks", "1", *asked, "--", "-k", "alltoall", cwd=tmp_path).status
        assert ["EXCH-01", "EXCH-04", "EXCH-05"] == json.loads((tmp_path / "result.json").read_text())["only"]

    def test_a_requirement_without_a_check(self, tmp_path: Path) -> None:
        """It says so, and why, instead of judging nothing."""
        done = plugin_runs.cli("run", "--only", "GRAPH-01", cwd=tmp_path)
        assert 2 == done.status
        assert "GRAPH-01 has no check yet: needs a GPU to capture graphs on" in done.output


class TestDoctor:
    def test_what_runs_here_and_why_not_the_rest(self) -> None:
        """Two real ranks start; layouts of more ranks than asked for say so."""
        output = printed("doctor", "--ranks", "2")
        assert "two ranks: started, all-reduce over gloo is correct" in output
        assert "  ep2 (quick): 2 ranks" in output
        assert "  ep4 (quick): ep4 is a layout of 4 ranks, and --ranks is 2" in output
        assert "  native: torch " in output

    def test_ranks_that_no_layout_fits(self) -> None:
        """One sentence and status 2."""
        done = CliRunner().invoke(cli.main, ["doctor", "--ranks", "0"])
        assert 2 == done.exit_code
        assert "Error: no layout fits 0 ranks; give --ranks 1 to 64\n" == done.output


class TestWithoutTorch:
    @pytest.mark.parametrize("arguments", [["run"], ["list", "backends"], ["doctor"]], ids=" ".join)
    def test_every_command_says_what_is_missing(self, arguments: list[str]) -> None:
        """Where torch is not installed each command ends with one sentence and status 2."""
        hidden = "import sys; sys.modules['torch'] = None; from moe_conformance.cli import main; main(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, timeout=STARTS_S, check=False
        )
        assert 2 == done.returncode
        assert done.stderr.startswith("Error: torch is not installed here")
        assert 1 == len(done.stderr.splitlines())


class TestRun:
    def test_the_reproducing_command_selects_one_item(self, tmp_path: Path) -> None:
        """Outside the checkout, with a pytest configuration there that must not matter, one item runs and passes."""
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
        item = "test_every_pair_reaches_its_expert_once[alltoall-ep2-even]"
        asked = ("run", "--only", "EXCH-01", "--report", "report", "--", "-k", item)
        done = plugin_runs.cli(*asked, cwd=tmp_path)
        assert 0 == done.status, done.output
        report = plugin_runs.result(tmp_path / "report")
        assert {item: "pass"} == plugin_runs.verdicts(report)
        assert (1, 0) == (report["cases"], report["exit"])
        assert "1 pass" in done.output

    def test_a_run_in_which_nothing_passed_fails(self, tmp_path: Path) -> None:
        """Nothing selected is nothing shown."""
        done = plugin_runs.cli("run", "--only", "EXCH-01", "--", "-k", "no_such_check", cwd=tmp_path)
        assert 1 == done.status
        assert "FAILS THE RUN: no check passed" in done.output

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_an_interrupted_run_leaves_no_process(self, tmp_path: Path, number: int, status: int) -> None:
        """Ctrl-C and SIGTERM end the ranks with the driver, and the report says that it is a part."""
        mark = f"{os.getpid()}-{number}"
        command = [sys.executable, "-m", "moe_conformance.cli", "run", "--only", "EXCH-01", "--report", str(tmp_path)]
        environment = plugin_runs.environment(mark)
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=heed_interrupts,
        )
        try:
            wait_for_ranks(mark)
            wait_for_records(tmp_path)
            process.send_signal(number)
            assert status == process.wait(timeout=plugin_runs.LIMIT_S)
        finally:
            process.kill()
        assert [] == gone(mark)
        report = plugin_runs.result(tmp_path)
        assert (True, status) == (report["interrupted"], report["exit"])
        assert "not run" in plugin_runs.verdicts(report).values()
        assert not (tmp_path / "records.jsonl").exists()


def heed_interrupts() -> None:
    """Undo what a shell does to commands in the background: they start with SIGINT ignored, and pass that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for_ranks(mark: str) -> None:
    """Wait until ranks run beside the driver, the forking process and its tracker."""
    end = time.monotonic() + STARTS_S
    while len(list(plugin_runs.marked(mark))) < 4:
        assert time.monotonic() < end, "no ranks"
        time.sleep(0.1)


def wait_for_records(folder: Path) -> None:
    """Wait until an item has ended."""
    end = time.monotonic() + STARTS_S
    while not (folder / "records.jsonl").read_bytes():
        assert time.monotonic() < end, "no records"
        time.sleep(0.1)


def gone(mark: str) -> list[int]:
    """Return what is left of the processes after a while."""
    end = time.monotonic() + 10.0
    while (left := list(plugin_runs.marked(mark))) and time.monotonic() < end:
        time.sleep(0.1)
    return left


class TestEvery:
    def test_each_importable_backend_has_its_report(self, tmp_path: Path) -> None:
        """One after the other, and the worst status is the command's."""
        folder = tmp_path / "all"
        asked = ("--only", "EXCH-01", "--ranks", "1", "--report", str(folder))
        done = plugin_runs.cli("run", "--backend", cli.running.EVERY, *asked, "--", "-k", "single-even]", cwd=tmp_path)
        names = printed("list", "backends", "--importable").splitlines()
        assert sorted(names) == sorted(path.name for path in folder.iterdir())
        statuses = [plugin_runs.result(Path(folder / name))["exit"] for name in names]
        assert max(statuses) == done.status


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
