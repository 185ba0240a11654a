"""Ends a run before all items have run, so that what was found is reported and no rank is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from moe_conformance.engine import NO_ANSWER
from moe_conformance.report.records import of_report
from moe_conformance.report.words import shape

MOST_HANGS = 20  # cases
MOST_ALIKE = 3  # cases that hang alike, each for as long as its deadline
MOST_CRASHES = 200  # cases; each costs new ranks

_SPARE, _MOST_SPARE_S = 0.25, 40.0  # of the time limit: for the item at hand, then for the report and the workers' end
_OUT_OF_TIME = 124  # as timeout(1) has it
_ENDS = "moe_conformance_ends"  # when a worker's time is up, on the clock of all processes of the machine


class Stopped(KeyboardInterrupt):
    """Ends the session. Not an Exception: Hypothesis would shrink the example that raised it."""

    def __init__(self, reason: str, status: int) -> None:
        """Take the reason and the exit status."""
        super().__init__(reason)
        self.reason, self.status = reason, status


def stop_now(reason: str, status: int) -> NoReturn:
    """End the session from within an item; SIGTERM does not interrupt its report.

    Raises:
        Stopped: always.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, say, which ends all processes when one is lost
    raise Stopped(reason, status)


class Stopping:
    """Stops the session on SIGTERM, before a time limit, or where too much hangs or crashes."""

    def __init__(self, config: pytest.Config, limit_s: float) -> None:
        """Handle SIGTERM; `limit_s` counts from the start of this process, 0 is no limit."""
        self.reason = ""
        self.status = 0
        self._config = config
        self._session: pytest.Session | None = None
        self._limit_s = limit_s
        workerinput = getattr(config, "workerinput", {})
        self._worker = bool(workerinput)
        self._ends: float = workerinput.get(_ENDS) or time.monotonic() - _age_s() + limit_s
        self._timers: list[threading.Timer] = []
        self._alike: Counter[str] = Counter()  # cases that took all of their deadline, by how they hung
        self._bad: dict[str, set[str]] = {"hang": set(), "crash": set()}
        self._signals = threading.current_thread() is threading.main_thread()  # no other may set a handler
        if self._signals:
            before = signal.signal(signal.SIGTERM, self._terminated)
            config.add_cleanup(partial(_restore, before))

    # ---- SIGTERM and time ----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Start the timers; cancel them after the last item, before pytest begins to end the session."""
        try:
            self._begin(session)
            return (yield)
        finally:
            self._end()

    def _begin(self, session: pytest.Session) -> None:
        """Set two timers: the first lets no further item begin, the second interrupts the one that runs."""
        self._session = session
        if self.reason:  # SIGTERM came while items were collected, and what it raised was lost
            session.shouldstop = self.reason
        if not self._limit_s:
            return
        left_s = self._ends - time.monotonic()
        spare_s = min(_SPARE * self._limit_s, _MOST_SPARE_S)
        for ahead_s, stop in ((spare_s, self._expire), (spare_s / 2, self._interrupt)):
            timer = threading.Timer(max(0.0, left_s - ahead_s), stop)
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Cancel the timers of a session that ends before its items."""
        self._end()

    def _end(self) -> None:
        """Cancel the timers and ignore SIGTERM, so that the report is complete."""
        for timer in self._timers:
            timer.cancel()
        if self._signals:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the end of the time limit to an xdist worker."""
        node.workerinput[_ENDS] = self._ends

    def _expire(self) -> None:
        self._stop(f"--time-limit {self._limit_s:g} is near", _OUT_OF_TIME)

    def _interrupt(self) -> None:
        if self._signals:
            os.kill(os.getpid(), signal.SIGTERM)

    def _terminated(self, number: int, frame: Any) -> NoReturn:
        # What a handler raises is lost where Python ignores exceptions, as in callbacks of the garbage collector: then
        # the session ends with the item that runs.
        self._stop("terminated by SIGTERM", 128 + number)  # 143, as a shell has it
        stop_now(self.reason, self.status)

    # ---- too much of the same ------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count cases that hung or crashed."""
        record = of_report(report.user_properties)
        if self._worker or record is None or record.verdict not in self._bad:
            return
        cases = self._bad[record.verdict]
        if record.verdict == "hang" and NO_ANSWER in record.message and (record.case or record.item) not in cases:
            hung = shape(record.message)
            self._alike[hung] += 1
            if self._alike[hung] == MOST_ALIKE:
                why = f"{MOST_ALIKE} cases hang alike, each until its deadline; if it is too short, give --deadline"
                self._stop(why, 1)
        cases.add(record.case or record.item)
        most = MOST_HANGS if record.verdict == "hang" else MOST_CRASHES
        if len(cases) >= most:
            done = "hung" if record.verdict == "hang" else "crashed"
            self._stop(f"{most} cases have {done}, which is the limit", 1)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep why the session was interrupted."""
        error = excinfo.value
        if isinstance(error, Stopped):
            self.reason, self.status = error.reason, error.status
        elif type(error) is KeyboardInterrupt:
            self.reason, self.status = "interrupted by Ctrl-C", 130
        elif not self.reason:  # pytest or xdist itself: errors while collecting, -x
            self.reason, self.status = str(error), 1

    def _stop(self, reason: str, status: int) -> None:
        """Let the running items end, and no further item begin."""
        if self.reason:
            return
        self.status, self.reason = status, reason  # in this order: who sees a reason, on any thread, has its status
        if self._session is not None:
            self._session.shouldstop = reason
        controller = self._config.pluginmanager.get_plugin("dsession")
        if controller is not None:  # xdist
            controller.shouldstop = reason


def _restore(before: Any) -> None:
    signal.signal(signal.SIGTERM, before)


def _age_s() -> float:
    """Return the age of this process in seconds; 0 where the system does not provide it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
