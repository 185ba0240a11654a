"""The fork server: a process that imports torch and the preload once, then forks ranks and reaps them.

Unlike multiprocessing's forkserver it reports which module of the preload failed and why, has an environment
and a preload per engine, never imports the driver's `__main__`, and reports every exit with its signal. It
runs one thread, and ends when the driver closes the channel or exits in any way; all processes that the ranks
have started end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from . import processes, rank, wire
from .faults import one_line
from .rank_output import RankOutput
from .virtual import threads

_PARENT_DIED = signal.SIGUSR2  # sent by the kernel
STACK_SIGNAL = signal.SIGUSR1  # makes a rank dump the stacks of its threads, even while it holds the GIL
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 800  # of 1000 at most, which the kernel adds to the thousandths of memory that a process uses
# The first backward pass of a process imports the first, and sympy with it; the first optimizer or checkpoint imports
# the second: half a second and more than a second on every rank.
_ALWAYS_IMPORTED = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")


@dataclass(frozen=True)
class Setup:
    """The driver's first message: its pid and the modules to import."""

    driver: int
    preload: tuple[str, ...]


@dataclass(frozen=True)
class Importing:
    """Reports which module is about to be imported, since importing it may end the process."""

    module: str


@dataclass(frozen=True)
class Ready:
    """Reports that all modules are imported, or which module failed and why."""

    module: str | None = None
    reason: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class Fork:
    """Requests a new rank; the descriptors of its channel, its stack file and its ledger follow."""

    spec: rank.RankSpec


@dataclass(frozen=True)
class Signal:
    """Requests that a rank is sent a signal; SIGKILL goes to its whole process group."""

    pid: int
    number: int


@dataclass(frozen=True)
class ReadOutput:
    """Requests what a rank has printed since a time of this machine's `time.monotonic`."""

    pid: int
    since: float


@dataclass(frozen=True)
class Forked:
    """Reply to Fork: the pid of the new process, or why there is none."""

    pid: int
    reason: str | None = None


@dataclass(frozen=True)
class Printed:
    """Reply to ReadOutput."""

    printed: bytes


@dataclass(frozen=True)
class Exited:
    """Reports that a rank's process has exited, with its last output; `code` is negative for a signal."""

    pid: int
    code: int
    printed: bytes = b""


def main(descriptor: int) -> NoReturn:
    """Runs the fork server on an inherited socket until the driver closes its end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the driver's is inherited
    channel = wire.Channel(socket.socket(fileno=descriptor))
    setup: Setup = wire.loads(channel.receive())
    _die_with_parent(setup.driver)  # while importing, nothing reads from the channel
    if not _import_all(channel, (*_ALWAYS_IMPORTED, *setup.preload)):
        os._exit(1)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else every rank would print the buffered text too
    gc.collect()
    gc.freeze()  # keeps the garbage collector of the ranks from copying shared pages
    server = _ForkServer(channel, setup.driver)  # from here on, the end of the driver's thread does not matter
    channel.send(wire.dumps(Ready()))
    with contextlib.suppress(EOFError, OSError):
        server.serve()
    os._exit(0)


def _import_all(channel: wire.Channel, modules: Sequence[str]) -> bool:
    for module in modules:
        channel.send(wire.dumps(Importing(module)))
        try:
            importlib.import_module(module)
            if torch.cuda.is_initialized():
                raise RuntimeError("importing it initialised CUDA, which forked ranks could not use")
        except BaseException as error:
            channel.send(wire.dumps(Ready(module, one_line(error), traceback.format_exc())))
            return False
    return True


def _die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, or the thread that started it, ends."""
    _send_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the prctl call
        os._exit(0)


def _send_at_death_of_parent(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class _ForkServer:
    """Handles the driver's requests and reports the exits of ranks."""

    def __init__(self, channel: wire.Channel, driver: int) -> None:
        self._channel = channel
        self._driver = driver
        self._children: dict[int, RankOutput] = {}
        self._warned: set[bytes] = set()  # warnings that ranks have printed
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, _PARENT_DIED):
            signal.signal(number, lambda *_: None)  # a handler is needed for the wake-up socket to be written to
        _send_at_death_of_parent(_PARENT_DIED)
        self._preloads = frozenset(processes.children())
        processes.become_subreaper()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> None:
        """Handles requests until the driver exits or closes its end (EOFError), then kills all ranks."""
        try:
            # A child of the driver may hold the channel open, so that EOF alone is no sufficient sign.
            while os.getppid() == self._driver:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._drain(key.data)
                    elif key.fileobj is self._wake:
                        self._reap()
                    else:
                        self._handle(wire.loads(self._channel.receive()))
        finally:
            while pids := {*self._children, *processes.children()}:  # orphans become children of this process
                for pid in pids:
                    _signal(pid, signal.SIGKILL)
                for pid in pids:
                    os.waitpid(pid, 0)
                self._children.clear()

    def _handle(self, request: Fork | Signal | ReadOutput) -> None:
        if isinstance(request, Fork):
            self._channel.send(wire.dumps(self._fork(request.spec)))
        elif isinstance(request, ReadOutput):
            self._channel.send(wire.dumps(Printed(self._printed(request))))
        elif request.pid in self._children:  # not reaped yet, so that the pid is still the rank's
            _signal(request.pid, request.number)

    def _fork(self, spec: rank.RankSpec) -> Forked:
        _, descriptors, _, _ = socket.recv_fds(self._channel.socket, 1, 3)
        server_pid = os.getpid()
        try:
            output = RankOutput(self._warned)
        except OSError as error:
            return Forked(0, one_line(error))
        try:
            pid = os.fork()
        except OSError as error:
            output.close()
            return Forked(0, one_line(error))
        finally:
            if os.getpid() == server_pid:
                output.close_writer()
                for descriptor in descriptors:
                    os.close(descriptor)
        if pid == 0:
            self._close_in_child()
            output.redirect_stdout()
            _run_rank(server_pid, spec, *descriptors)
        self._children[pid] = output
        self._selector.register(output, selectors.EVENT_READ, output)
        output.watched = True
        return Forked(pid)

    def _printed(self, request: ReadOutput) -> bytes:
        if (output := self._children.get(request.pid)) is None:
            return b""
        self._drain(output)
        return output.tail(request.since)

    def _drain(self, output: RankOutput) -> None:
        if output.watched and not output.drain():
            self._unwatch(output)

    def _unwatch(self, output: RankOutput) -> None:
        if output.watched:
            output.watched = False
            self._selector.unregister(output)

    def _close_in_child(self) -> None:
        """Closes, in a forked child, the descriptors and handlers that only the fork server needs."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, _PARENT_DIED):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for output in self._children.values():
            output.close()
        for end in (self._channel, self._wake, self._waker):
            end.close()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        with contextlib.suppress(ChildProcessError):  # there are no more
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._reap_one(ended.si_pid)

    def _reap_one(self, pid: int) -> None:
        _signal(pid, signal.SIGKILL)  # what the rank started; before the pid is free for others
        _, status = os.waitpid(pid, 0)
        for orphan in processes.children():
            if orphan not in self._children and orphan not in self._preloads:
                # The rank had started it, in another session, and it has just become a child of this process.
                _signal(orphan, signal.SIGKILL)
        if (output := self._children.pop(pid, None)) is not None:
            printed = self._close(output)
            self._channel.send(wire.dumps(Exited(pid, os.waitstatus_to_exitcode(status), printed)))

    def _close(self, output: RankOutput) -> bytes:
        """Closes the pipe of a rank that has exited, and returns the end of its output."""
        self._drain(output)
        self._unwatch(output)
        output.close()
        return output.tail()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.kill(pid, number)
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _raise_oom_score() -> None:
    """Raises the rank's OOM score, so that the kernel kills a rank and not the driver."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as adjustment:
        if int(adjustment.read()) < _OOM_SCORE:
            adjustment.seek(0)
            adjustment.write(str(_OOM_SCORE))


def _use_batch_scheduling() -> None:
    """Selects SCHED_BATCH, so that a thread that wakes up does not preempt the one that woke it.

    A thread of gloo that sends wakes its receiver, which would preempt it while it holds the lock of the connection;
    gloo's other thread then spins on that lock for its whole time slice. With four ranks on two cores an all-to-all
    took 2 ms instead of 0.2.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # not permitted: ranks are slower, with the same results
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _run_rank(server_pid: int, spec: rank.RankSpec, channel: int, stacks: int, ledger: int) -> NoReturn:
    """Runs a rank in a process that has just been forked."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the driver, which then ends the ranks
        os.setpgid(0, 0)
        _die_with_parent(server_pid)
        _raise_oom_score()
        _use_batch_scheduling()
        # No core dumps, since stacks are dumped.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        faulthandler.enable(file=stacks)
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        serve = threads.serve if spec.virtual else rank.serve
        serve(wire.Channel(socket.socket(fileno=channel)), spec, ledger)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
