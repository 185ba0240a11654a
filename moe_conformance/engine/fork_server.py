"""The process from which ranks are forked: imports torch and the preload once, then forks, signals, buries.

Unlike multiprocessing's forkserver it tells which module of the preload failed and why, has an environment
and a preload per engine, never imports the driver's `__main__`, and reports each exit with its signal. It
runs one thread and ends when the driver has closed its channel or ended in whatever way; all that the ranks
have started ends with it.
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

_PARENT_DIED = signal.SIGUSR2
STACK_SIGNAL = signal.SIGUSR1  # makes a rank dump the stacks of its threads, even while it holds the GIL
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 800  # of 1000 at most, which the kernel adds to the thousandths of memory that a process uses
# The first backward pass of a process imports the first, and sympy with it; the first optimizer or checkpoint the
# second: half a second and more than a second on every rank, and on each new one.
_ALWAYS_IMPORTED = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")


@dataclass(frozen=True)
class Setup:
    """The driver's first message: its pid and what to import."""

    driver: int
    preload: tuple[str, ...]


@dataclass(frozen=True)
class Importing:
    """Says what is being imported, in case that this is the last that is heard."""

    module: str


@dataclass(frozen=True)
class Ready:
    """Says that everything is imported, or which module failed and why."""

    module: str | None = None
    reason: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class Fork:
    """An order to start a rank; the descriptors of its channel, its stack file and its ledger follow."""

    spec: rank.RankSpec


@dataclass(frozen=True)
class Signal:
    """An order to send a signal to a rank; SIGKILL goes to all processes of its process group."""

    pid: int
    number: int


@dataclass(frozen=True)
class ReadOutput:
    """An order to tell what a rank printed since a time of this machine's `time.monotonic`."""

    pid: int
    since: float


@dataclass(frozen=True)
class Forked:
    """Answers Fork: the new process, or why there is none."""

    pid: int
    reason: str | None = None


@dataclass(frozen=True)
class Printed:
    """Answers ReadOutput."""

    printed: bytes


@dataclass(frozen=True)
class Exited:
    """Says that a rank's process has ended, with the last that it printed; `code` is negative for a signal."""

    pid: int
    code: int
    printed: bytes = b""


def main(descriptor: int) -> NoReturn:
    """Runs the server_pid over an inherited socket until the driver closes its end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the driver's is inherited
    channel = wire.Channel(socket.socket(fileno=descriptor))
    setup: Setup = wire.loads(channel.receive())
    _die_with_parent(setup.driver)  # while importing, nobody looks whether the channel is closed
    if not _import_all(channel, (*_ALWAYS_IMPORTED, *setup.preload)):
        os._exit(1)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # each rank would write it again
    gc.collect()
    gc.freeze()  # keeps the collector of the ranks from touching, and so copying, what they share
    server = _ForkServer(channel, setup.driver)  # from here on, the end of the driver's thread is no matter
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
    """Has the kernel kill this process when its parent ends, or the thread of it that started this process."""
    _send_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(0)


def _send_at_death_of_parent(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class _ForkServer:
    """Carries out orders and reports exits."""

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
            signal.signal(number, lambda *_: None)  # a handler, so that the wake-up socket is written to
        _send_at_death_of_parent(_PARENT_DIED)
        self._preloads = frozenset(processes.children())
        processes.become_subreaper()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> None:
        """Works until the driver has ended or closed its end (EOFError), then kills every rank."""
        try:
            # A child of the driver may hold the channel open, so that its end alone does not tell.
            while os.getppid() == self._driver:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._drain(key.data)
                    elif key.fileobj is self._wake:
                        self._reap()
                    else:
                        self._handle(wire.loads(self._channel.receive()))
        finally:
            while pids := {*self._children, *processes.children()}:  # those whose parents have ended come up in turn
                for pid in pids:
                    _signal(pid, signal.SIGKILL)
                for pid in pids:
                    os.waitpid(pid, 0)
                self._children.clear()

    def _handle(self, order: Fork | Signal | ReadOutput) -> None:
        if isinstance(order, Fork):
            self._channel.send(wire.dumps(self._fork(order.spec)))
        elif isinstance(order, ReadOutput):
            self._channel.send(wire.dumps(Printed(self._printed(order))))
        elif order.pid in self._children:  # not yet buried, so that the pid is still the rank's
            _signal(order.pid, order.number)

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

    def _printed(self, order: ReadOutput) -> bytes:
        if (output := self._children.get(order.pid)) is None:
            return b""
        self._drain(output)
        return output.tail(order.since)

    def _drain(self, output: RankOutput) -> None:
        if output.watched and not output.drain():
            self._unwatch(output)

    def _unwatch(self, output: RankOutput) -> None:
        if output.watched:
            output.watched = False
            self._selector.unregister(output)

    def _close_in_child(self) -> None:
        """Lets go of what is the server_pid's alone, in a child."""
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
                # It was that rank's, in a session of its own, and has just been adopted.
                _signal(orphan, signal.SIGKILL)
        if (output := self._children.pop(pid, None)) is not None:
            printed = self._close(output)
            self._channel.send(wire.dumps(Exited(pid, os.waitstatus_to_exitcode(status), printed)))

    def _close(self, output: RankOutput) -> bytes:
        """Returns the last that an ended rank printed, and lets go of its pipe."""
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
    """Has the kernel kill a rank, and not the driver, when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as adjustment:
        if int(adjustment.read()) < _OOM_SCORE:
            adjustment.seek(0)
            adjustment.write(str(_OOM_SCORE))


def _use_batch_scheduling() -> None:
    """Has the kernel let a thread go on when another one wakes up, where ranks share processors.

    A thread of gloo that sends wakes its receiver, which would take the processor from it while it holds the lock of
    the connection; gloo's other thread then spins on that lock for its whole time slice. With four ranks on two cores
    an all-to-all took 2 ms instead of 0.2.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forbidden: ranks are slower, and no less right
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _run_rank(server_pid: int, spec: rank.RankSpec, channel: int, stacks: int, ledger: int) -> NoReturn:
    """Turns a fresh fork into a rank."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which then ends the ranks
        os.setpgid(0, 0)
        _die_with_parent(server_pid)
        _raise_oom_score()
        _use_batch_scheduling()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # stacks tell more
        faulthandler.enable(file=stacks)
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        serve = threads.serve if spec.virtual else rank.serve
        serve(wire.Channel(socket.socket(fileno=channel)), spec, ledger)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
