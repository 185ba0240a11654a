"""Starts ranks on the driver's machine: the client of the fork server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TypeVar

from . import fork_server, wire
from .faults import one_line
from .hosts import Child, HostLostError, Placement, RankProcess
from .processes import ThreadStats, thread_stats
from .rank import RankSpec
from .rank_files import RankFiles
from .records import EngineError
from .transport import visible_gpus

_IMPORT_LIMIT_S = 300.0  # for one module of the preload
_STACKS_LIMIT_S = 1.0

_Request = fork_server.Setup | fork_server.Fork | fork_server.Signal | fork_server.ReadOutput
_Reply = TypeVar("_Reply")

LOOPBACK = "lo"
_ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs while importing must not initialise CUDA before a fork
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # results report lost peers
}

# Set by launchers such as torchrun for their processes. A world may have fewer ranks than the launcher has processes.
_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

# sys.path must be the driver's before this package can be imported.
_BOOT = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[2])
descriptor = int(sys.argv[1])
del sys.argv[1:]
from {fork_server.__name__} import main
main(descriptor)
"""


class ForkServerLostError(HostLostError):
    """The fork server has exited; all of its ranks have ended with it."""


class LocalHost:
    """Starts a fork server, and ranks through it.

    Args:
        preload: Modules imported once, before ranks are forked.
        environment: Variables on top of this process's.
        interface: The one that gloo uses; None leaves it to gloo or GLOO_SOCKET_IFNAME. With loopback, nothing listens
            for other machines.

    Raises:
        EngineError: on construction, if a module of the preload cannot be imported; says which and why.
        ForkServerLostError: from any method but `close`, if the fork server has exited.
    """

    address = "127.0.0.1"

    def __init__(
        self, preload: Sequence[str], environment: Mapping[str, str], interface: str | None = LOOPBACK
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(_import_path())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=_environment(environment, interface),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the driver receives Ctrl-C from the terminal
            )
        self._process = process
        self._channel = wire.Channel(ours)
        self._end = weakref.finalize(self, _end, self._channel, process)
        self._exits: dict[int, fork_server.Exited] = {}
        self._files: dict[int, RankFiles] = {}
        self._gpus = visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"))
        try:
            self._open(tuple(preload))
        except BaseException:
            self.close()
            raise

    def placement(self, rank: int) -> Placement:
        """Returns where a rank would run: on this machine, with the GPUs that this process sees."""
        return Placement(rank, self._gpus)

    def start(self, specs: Sequence[RankSpec]) -> list[RankProcess]:
        """Forks ranks, each with a channel."""
        started: list[RankProcess] = []
        try:
            for spec in specs:
                ours, theirs = _pair(spec)
                try:
                    pid = self.fork(spec, theirs)
                except BaseException:
                    ours.close()
                    raise
                started.append(RankProcess(spec.rank, pid, wire.Channel(ours)))
        except BaseException:
            for process in started:
                self.drop(process)
            raise
        return started

    def fork(self, spec: RankSpec, channel: socket.socket) -> int:
        """Forks one rank, which inherits the given end of a channel, and returns its pid.

        Raises:
            EngineError: it could not be forked.
        """
        try:
            files = RankFiles()
        except OSError as error:
            channel.close()
            raise EngineError(f"rank {spec.rank} could not be forked: {one_line(error)}") from error
        with channel:
            self._request(fork_server.Fork(spec))
            socket.send_fds(self._channel.socket, [b"."], [channel.fileno(), *files.descriptors])
        reply = self._reply(fork_server.Forked)
        if reply.reason is not None:
            files.close()
            raise EngineError(f"rank {spec.rank} could not be forked: {reply.reason}")
        self._exits.pop(reply.pid, None)  # the exit of an earlier process with this pid
        self._files[reply.pid] = files
        return reply.pid

    def drop(self, process: RankProcess) -> None:
        """Kills a rank, if it is alive, and discards what is known of it."""
        process.channel.close()
        self.forget(process.pid)

    def forget(self, pid: int) -> None:
        """Kills a rank to which this process has no channel, and discards what is known of it."""
        with contextlib.suppress(ForkServerLostError):  # then it is dead already
            self._request(fork_server.Signal(pid, signal.SIGKILL))
        self._exits.pop(pid, None)
        if (files := self._files.pop(pid, None)) is not None:
            files.close()

    def begin(self, processes: Sequence[Child]) -> None:
        """Discards what ranks have written so far; called before a job is sent."""
        for process in processes:
            self._files[process.pid].begin()

    def signal(self, processes: Sequence[Child], number: signal.Signals) -> None:
        """Sends a signal to ranks; one that has exited is skipped."""
        for process in processes:
            self._request(fork_server.Signal(process.pid, number))

    def stacks(self, processes: Sequence[Child]) -> dict[int, str]:
        """Makes ranks dump the stacks of their threads; "" for a rank that does not within a second.

        Works while a rank holds the GIL; not while it is stopped or blocks the signal.
        """
        sizes: dict[int, int] = {}
        files = {process.rank: self._files[process.pid] for process in processes}
        for rank, file in files.items():
            file.skip_stacks()
            sizes[rank] = file.stacks_size()
        self.signal(processes, fork_server.STACK_SIGNAL)
        waiting = set(sizes)
        until = time.monotonic() + _STACKS_LIMIT_S
        while waiting and time.monotonic() < until:
            time.sleep(0.01)
            for rank, file in files.items():
                grown = file.stacks_size()
                if sizes[rank] == grown > 0 and file.new_stacks():
                    waiting.discard(rank)  # there is a dump, and it no longer grows
                sizes[rank] = grown
        return {rank: file.new_stacks() for rank, file in files.items()}

    def last_stacks(self, process: Child) -> str:
        """Returns the stacks that a rank has dumped since `begin`, as a crash makes it do."""
        return self._files[process.pid].all_stacks()

    def ledgers(self, processes: Sequence[Child]) -> dict[int, bytes]:
        """Returns what ranks have written into their ledgers since `begin`."""
        return {process.rank: self._files[process.pid].ledger() for process in processes}

    def printed(self, process: Child) -> str:
        """Returns the end of what a rank has printed since `begin`; if it has exited, in its whole life."""
        self.collect()
        if process.pid not in self._exits:
            self._request(fork_server.ReadOutput(process.pid, self._files[process.pid].begun))
            reply = self._reply(fork_server.Printed)
            if process.pid not in self._exits:  # else it exited before the request, and its last output was reported
                return reply.printed.decode(errors="replace")
        return self._exits[process.pid].printed.decode(errors="replace")

    def thread_stats(self, processes: Sequence[Child], main_only: bool) -> dict[int, Mapping[int, ThreadStats]]:
        """Returns the scheduling statistics of each rank's threads, or of its main thread only."""
        return {process.rank: thread_stats(process.pid, main_only) for process in processes}

    def wakers(self) -> Sequence[wire.Channel]:
        """Returns the channels that become readable when `collect` has something to read."""
        return [self._channel]

    def collect(self) -> None:
        """Reads all exits that were reported so far, without waiting."""
        while self._channel.readable():
            self._note(self._receive())

    def exit_code(self, process: Child) -> int | None:
        """Returns a rank's exit code, negative for a signal; None if it had not exited at the last `collect`."""
        exited = self._exits.get(process.pid)
        return None if exited is None else exited.code

    def wait(self, process: Child, patience_s: float) -> int | None:
        """Waits until a rank has exited and returns its exit code; None if it has not within `patience_s`."""
        until = time.monotonic() + patience_s
        self.collect()
        while process.pid not in self._exits and (left := until - time.monotonic()) > 0:
            if self._channel.readable(left):
                self._note(self._receive())
        return self.exit_code(process)

    def close(self) -> None:
        """Ends the fork server and all ranks; idempotent."""
        self._end()
        for files in self._files.values():
            files.close()
        self._files.clear()

    def _open(self, preload: tuple[str, ...]) -> None:
        self._request(fork_server.Setup(os.getpid(), preload))
        module = "torch"
        self._channel.socket.settimeout(_IMPORT_LIMIT_S)
        while True:
            try:
                message = wire.loads(self._channel.receive())
            except TimeoutError:
                raise EngineError(f"preload module {module!r} was not imported after {_IMPORT_LIMIT_S} s") from None
            except (EOFError, OSError):
                how = describe_exit(self._process.wait())
                raise EngineError(f"the process that imports the preload ended at {module!r}: {how}") from None
            if isinstance(message, fork_server.Ready):
                break
            module = message.module
        self._channel.socket.settimeout(None)
        if message.module is not None:
            raise EngineError(
                f"preload module {message.module!r} failed to import: {message.reason}\n{message.traceback}"
            )

    def _reply(self, kind: type[_Reply]) -> _Reply:
        """Waits for the reply to a request, and records the exits that are reported before it."""
        while not isinstance(reply := self._receive(), kind):
            self._note(reply)
        return reply

    def _request(
        self, request: fork_server.Setup | fork_server.Fork | fork_server.Signal | fork_server.ReadOutput
    ) -> None:
        try:
            self._channel.send(wire.dumps(request))
        except OSError:
            raise self._lost() from None

    def _receive(self) -> object:
        try:
            return wire.loads(self._channel.receive())
        except (EOFError, OSError):
            raise self._lost() from None

    def _note(self, message: object) -> None:
        assert isinstance(message, fork_server.Exited), message
        if message.pid in self._files:  # else it was discarded
            self._exits[message.pid] = message

    def _lost(self) -> ForkServerLostError:
        try:
            how = describe_exit(self._process.wait(timeout=5))
        except subprocess.TimeoutExpired:
            how = "it closed its channel"
        return ForkServerLostError(f"the process that forks the ranks has ended ({how}); the next run starts another")


def _pair(spec: RankSpec) -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise EngineError(f"rank {spec.rank} could not be forked: {one_line(error)}") from error


class LocalCluster:
    """The driver's machine only."""

    def open(self, preload: Sequence[str], environment: Mapping[str, str]) -> LocalHost:
        """Starts a fork server that has imported the preload."""
        return LocalHost(preload, environment)


def describe_exit(code: int) -> str:
    """Returns in words how a process ended, from an exit code that is negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _environment(given: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Returns the fork server's environment, which does not depend on what started the driver."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHERS and not name.startswith("TORCHELASTIC_")
    }
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
    return {**variables, **_ENVIRONMENT, **given}


def _import_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _end(channel: wire.Channel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then kills the ranks
        process.wait()
