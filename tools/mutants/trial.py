"""One mutant against its tests, in a process forked for it that has everything but the oracles imported.

What is tried lies in the memory of that process only; no file of the checkout is written. A mutant may loop, eat all
memory or crash: each is noticed.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType

import hypothesis
import numpy  # noqa: F401  # what the tests import, once and for all
import pytest
import torch

from tools.mutants.changes import Mutant
from tools.mutants.oracles import module

# Of the processor's time: several times what the longest test of a pair takes.
SECONDS_PER_TEST = 20
_BYTES = 8 * 2**30
_CLOCKS = (signal.SIGPROF, signal.SIGALRM)
_SURVIVED, _NOTICED, _BROKEN = 0, 1, 2

# A failure is enough: the smallest example of it is not needed.
hypothesis.settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)


@dataclass(frozen=True)
class Trial:
    """Tests to run in this order until one fails; without a mutant it should be none."""

    root: Path
    tests: Sequence[str]
    mutant: Mutant | None = None
    seconds_per_test: int = SECONDS_PER_TEST


@dataclass(frozen=True)
class Verdict:
    """Whether a mutant was noticed, and by what: a test, an import, a signal such as that of the clock."""

    noticed: bool
    by: str


class Broken(RuntimeError):
    """The tests could not be run."""


def run(trials: Sequence[Trial], jobs: int = 1) -> Iterator[tuple[Trial, Verdict]]:
    """Run trials, so many at once, and yield each as it ends.

    Raises:
        Broken: pytest could not run the tests.
    """
    gc.collect()
    gc.freeze()  # no child needs to look through all of torch
    waiting = list(reversed(trials))
    running: dict[int, tuple[Trial, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.pop()
                pid, pipe = _start(trial)
                running[pid] = (trial, pipe)
            pid, status = os.wait()
            trial, pipe = running.pop(pid)
            yield trial, _verdict(os.waitstatus_to_exitcode(status), pipe)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _verdict(status: int, pipe: int) -> Verdict:
    with open(pipe, encoding="utf-8") as reader:
        by = reader.read()
    if status == _BROKEN:
        raise Broken(by)
    if status < 0:
        return Verdict(True, "time" if -status in _CLOCKS else signal.Signals(-status).name)
    return Verdict(status != _SURVIVED, by)


def _start(trial: Trial) -> tuple[int, int]:
    """Fork a process for a trial; return its id and where it will say by what the mutant was noticed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = _BROKEN
    try:
        status, by = _in_child(trial)
        os.write(writer, by.encode())
    except BaseException as error:
        os.write(writer, repr(error).encode())
    finally:
        os._exit(status)


def _in_child(trial: Trial) -> tuple[int, str]:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    for clock in _CLOCKS:
        signal.signal(clock, signal.SIG_DFL)  # ends the process, whatever it is doing
    _allow(trial.seconds_per_test)
    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(trial.root)
    sys.path.insert(0, str(trial.root))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("moe_conformance", "self_tests")]:
        del sys.modules[name]  # of this checkout, or of another one
    if trial.mutant:
        try:
            _put_in_place(trial.mutant, trial.root)
        except Exception as error:
            return _NOTICED, f"import: {error!r}"
    for test in trial.tests:
        watch = _Watch(trial.seconds_per_test)
        code = pytest.main([*_ARGUMENTS, f"--rootdir={trial.root}", test], [watch])
        if code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            return _NOTICED, watch.failed or test
        if code != pytest.ExitCode.OK:
            return _BROKEN, f"pytest {test} ends with {code!r}"
    return _SURVIVED, ""


_ARGUMENTS = ("-x", "-q", "--tb=no", "--doctest-modules", "-pno:cacheprovider", "-p_hypothesis_pytestplugin",
              "--hypothesis-profile=mutants")  # fmt: skip


class _Watch:
    """Gives every test its time, and keeps the name of the one that fails."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self.failed = ""

    def pytest_runtest_logstart(self) -> None:
        _allow(self._seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


def _allow(seconds: int) -> None:
    """Give this process so much time from now on, in vain if it does nothing but wait."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(20 * seconds)


class _Source(SourceFileLoader):
    """Loads a module from a changed source, under the name of the file that it takes the place of."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source; nothing is cached."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


def _put_in_place(mutant: Mutant, root: Path) -> None:
    """Import the mutant as the module that it is a mutant of, before anything else imports that."""
    name = module(mutant.file)
    package, _, stem = name.rpartition(".")
    path = str(root / mutant.file)
    spec = spec_from_file_location(name, path, loader=_Source(name, path, mutant.source))
    assert spec is not None
    assert spec.loader is not None
    parent = importlib.import_module(package)
    mutated = module_from_spec(spec)
    sys.modules[name] = mutated
    setattr(parent, stem, mutated)
    spec.loader.exec_module(mutated)
