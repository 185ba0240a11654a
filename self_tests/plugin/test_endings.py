"""How a run ends whatever happens to it: a full disk, another run in its folder, code that ends its process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_conformance.cli.supervising import supervised
from moe_conformance.report.folder import Hold, InUse
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT

# An adapter that computes twice what is right, and ends the process of pytest as if all had passed.
QUITS = """
import atexit, os

from moe_conformance.backends.native import Native
from self_tests.plugin.project.backend import Doubled, Toy, ToySession


class AtOnce(Toy):
    variants = ("wrong",)

    def limits(self, variant):
        os._exit(0)


class AtTheEnd(Toy):
    variants = ("wrong",)

    def versions(self):
        atexit.register(os._exit, 0)
        return super().versions()
"""
ONE_CASE = ("--ranks", "1", "--only", "EXCH-05", "--", "-k", "single-even]")


def toy(folder: Path, *arguments: str) -> plugin_runs.Finished:
    """Judge the toy without fault, with a report in a folder."""
    given = ("--moe-backend", "self_tests.plugin.project.backend:RightToy", "--moe-ranks", "1")
    here = ("-o", "python_files=checks.py", "-k", "right", str(PROJECT))
    return plugin_runs.pytest_on(*given, "--moe-report", str(folder), *arguments, *here, cwd=folder)


class TestQuitting:
    @pytest.mark.parametrize(
        ("backend", "sentence"),
        [("AtOnce", "the run ended without a verdict: something in it called os._exit(0)"), ("AtTheEnd", "1 fail")],
    )
    def test_an_adapter_cannot_end_a_run_as_if_it_passed(self, tmp_path: Path, backend: str, sentence: str) -> None:
        """Neither before there is a verdict nor behind it, and no process is left."""
        (tmp_path / "quits.py").write_text(QUITS)
        done = plugin_runs.cli("run", "--backend", f"quits:{backend}", *ONE_CASE, cwd=tmp_path)
        assert 1 == done.status, done.output
        assert sentence in done.output

    def test_what_was_reported_is_the_status(self) -> None:
        """Also where the process ends with another one afterwards; a signal is told as a shell has it."""
        assert [0, 3] == [supervised_in_child(f"return {status}") for status in (0, 3)]
        assert [1, 4, 137] == [
            supervised_in_child(code) for code in ("os._exit(0)", "os._exit(4)", "os.kill(os.getpid(), signal.SIGKILL)")
        ]


def supervised_in_child(code: str) -> int:
    """Return the exit status of a process that supervises a function with some code."""
    lines = ["import os, signal, sys", f"from {supervised.__module__} import supervised", "def run():", f"    {code}"]
    return plugin_runs.run("-c", "\n".join([*lines, "sys.exit(supervised(run))"]), cwd=PROJECT).status


class TestFolder:
    def test_one_run_at_a_time(self, tmp_path: Path) -> None:
        """The second is refused before anything runs, and may begin once the first has ended."""
        hold = Hold(tmp_path)
        with pytest.raises(InUse, match="another run writes into"):
            Hold(tmp_path)
        done = toy(tmp_path)
        assert 4 == done.status, done.output
        assert f"another run writes into {tmp_path}; wait for its end, or give another --report" in done.output
        assert [] == list(tmp_path.iterdir())
        hold.release()
        Hold(tmp_path).release()

    def test_the_disk_fills_up_while_it_runs(self, tmp_path: Path) -> None:
        """What is judged is shown, and the run fails with one sentence."""
        (tmp_path / "records.jsonl").symlink_to("/dev/full")
        done = toy(tmp_path)
        assert 1 == done.status, done.output
        self.check_told(done.output, tmp_path)

    def test_the_disk_is_full_at_the_end(self, tmp_path: Path) -> None:
        """The first report stays, which says that the run did not end, and the records beside it."""
        done = toy(tmp_path, "-p", "self_tests.plugin.project.full_disk")
        assert 1 == done.status, done.output
        self.check_told(done.output, tmp_path)
        assert plugin_runs.result(tmp_path)["interrupted"]
        assert b"" != (tmp_path / "records.jsonl").read_bytes()

    def test_the_disk_is_full_from_the_beginning(self, tmp_path: Path) -> None:
        """Then nothing runs."""
        (tmp_path / "records.jsonl").mkdir()
        done = toy(tmp_path)
        assert 4 == done.status, done.output
        assert f"the report cannot be written into {tmp_path}: Is a directory" in done.output

    def check_told(self, output: str, folder: Path) -> None:
        """Check that the one sentence is there, and no traceback."""
        why = os.strerror(28)
        assert 1 == output.count(f"FAILS THE RUN: the report cannot be written into {folder}: {why}")
        assert "2 pass" in output
        assert "Traceback" not in output
        assert "INTERNALERROR" not in output
