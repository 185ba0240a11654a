"""Runs pytest and the command line in processes of their own, and looks for what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_conformance.report import folding
from moe_conformance.report.records import Record, Verdict

PROJECT = Path(__file__).parent / "project"
TOY = "self_tests.plugin.project.backend:Toy"
LIMIT_S = 300
_MARK = "MOE_CONFORMANCE_SELF_TEST"


@dataclass(frozen=True)
class Finished:
    """A process that ended."""

    status: int
    output: str  # stdout and stderr together


def pytest_on(*arguments: str, cwd: Path) -> Finished:
    """Run pytest without this checkout's configuration."""
    plain = ("-m", "pytest", "-c", os.devnull, "--rootdir", str(PROJECT), "-p", "no:cacheprovider")
    return run(*plain, *arguments, cwd=cwd)


def cli(*arguments: str, cwd: Path) -> Finished:
    """Run `moe-conformance`."""
    return run("-m", "moe_conformance.cli", *arguments, cwd=cwd)


def run(*arguments: str, cwd: Path) -> Finished:
    """Run Python."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Finished(done.returncode, done.stdout)


def environment(mark: str = "") -> dict[str, str]:
    """Return the environment of such a process; with a mark, all its descendants can be found by it.

    It is no worker of a pytest-xdist that runs the test.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return {**own, "OMP_NUM_THREADS": "1", "COLUMNS": "100", _MARK: mark}


def marked(mark: str) -> Iterator[int]:
    """Yield the ids of the living processes with that mark."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                given = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or another user's
                continue
            if wanted in given:
                yield int(folder.name)


def comes(condition: Callable[[], object]) -> bool:
    """Wait until a condition holds; False if it does not in the time that a process may take."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def result(folder: Path) -> dict[str, Any]:
    """Return the report in a folder."""
    content: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
    return content


def records(report: dict[str, Any]) -> dict[str, Record]:
    """Return the records of a report by the names of their items."""
    return {record.item: record for record in folding.unfold(report)}


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    """Return the verdict of every item by its name, not applicable ones left out.

    Items that were not run stand together under the check and the cell: `test_x[alltoall-ep2]`.
    """
    found = records(report).values()
    return {record.item: record.verdict for record in found if record.verdict != "not applicable"}


def record(requirement: str, verdict: Verdict, layout: str = "ep2", message: str = "", **more: Any) -> Record:
    """Return a record of one check on `even`."""
    node = f"test_x.py::test_{requirement}[alltoall-{layout}-even]"
    return Record(
        node, "test_x", (requirement,), verdict, message, variant="alltoall", layout=layout, workload="even", **more
    )
