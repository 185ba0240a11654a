"""Runs a contender once and times its verdicts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import timeline
from benchmarks.contenders.roster import Contender

_ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 300.0
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": str(_ROOT),
}


class ContenderError(Exception):
    """A contender ended wrongly, late or without all verdicts; its figures would mean nothing."""


@dataclass(frozen=True)
class Timing:
    """How a run went; `passed` by number of the case."""

    fixed_s: float  # from the start of the command to the first verdict
    cases_per_s: float  # from the first verdict to the last
    passed: dict[int, bool]


def start(contender: Contender, assignment: timeline.Assignment) -> Timing:
    """Runs all cases and times them; wrong ones are in the timing.

    Raises:
        ContenderError: verdicts are missing, or the exit status contradicts them.
    """
    with tempfile.TemporaryDirectory(prefix="engine-benchmark-") as folder:
        path = Path(folder) / "verdicts"
        path.touch()
        assignment = replace(assignment, path=str(path))
        began = time.monotonic()
        code, output = call(
            contender.command(assignment.world), {**assignment.environment(), **contender.environment}, _LIMIT_S
        )
        verdicts = timeline.read(path)
    passed = {verdict.number: verdict.passed for verdict in verdicts}
    wrong = sorted(number for number, right in passed.items() if not right)
    if (code == 0) != (wrong == []):
        raise ContenderError(f"{contender.name} exited with {code}, though the wrong cases are {wrong}\n{output}")
    if (not wrong and sorted(passed) != list(range(assignment.count))) or len(verdicts) != len(passed):
        numbers = [verdict.number for verdict in verdicts]
        raise ContenderError(f"{contender.name} judged cases {numbers} of {assignment.count}\n{output}")
    first, last = verdicts[0].seconds, verdicts[-1].seconds
    rate = (len(verdicts) - 1) / (last - first) if len(verdicts) > 1 else float("nan")
    return Timing(first - began, rate, passed)


def call(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Runs a command from the checkout's root and returns its exit code and all that it printed.

    How many threads torch takes is the command's own affair: torchrun and the engine set one for each rank.

    Raises:
        ContenderError: it took longer than `limit_s`; it was ended, with all that it had started.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**inherited, **_ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code is None:
        raise ContenderError(f"{' '.join(command)} had not ended after {limit_s} s\n{text}")
    return code, text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that has not ended; torchrun ends its workers, which are not in its process group, if asked."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
