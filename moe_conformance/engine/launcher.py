"""The driver's side of the nursery: starts ranks, sends them signals, and knows which have ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, TypeVar

from . import nursery, wire
from .rank import Station
from .records import EngineError

_IMPORT_LIMIT_S = 300.0  # for one module of the preload

_Reply = TypeVar("_Reply")

_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # nothing listens beyond this machine
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs while importing must not initialise CUDA before a fork
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a lost peer is told by the results
}

# sys.path must be the driver's before anything of ours can be imported.
_BOOT = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[2])
descriptor = int(sys.argv[1])
del sys.argv[1:]
from {nursery.__name__} import main
main(descriptor)
"""


class LauncherLostError(EngineError):
    """The process from which ranks are forked has ended; all ranks have ended with it."""


class RankProcess:
    """One rank as the driver sees it: its process, its channel, and the files that tell of it after its death."""

    def __init__(self, rank: int, pid: int, channel: wire.Channel, stacks: IO[bytes], ledger: IO[bytes]) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel
        self._stacks = stacks
        self._ledger = ledger
        self._read = 0

    def begin(self) -> None:
        """Leaves behind what was written before the job that is about to be sent."""
        self.skip_stacks()
        os.ftruncate(self._ledger.fileno(), 0)

    def stacks_size(self) -> int:
        """Bytes dumped so far."""
        return os.fstat(self._stacks.fileno()).st_size

    def skip_stacks(self) -> None:
        """Leaves out of later `new_stacks` what is dumped already."""
        self._read = self.stacks_size()

    def new_stacks(self) -> str:
        """Returns what was dumped since `skip_stacks`."""
        # Never by the file's own position: the rank writes at it.
        data = os.pread(self._stacks.fileno(), self.stacks_size() - self._read, self._read)
        return data.decode(errors="replace")

    def ledger(self) -> bytes:
        """Returns what the rank wrote into its ledger since `begin`; its last line may be cut."""
        return os.pread(self._ledger.fileno(), os.fstat(self._ledger.fileno()).st_size, 0)

    def close(self) -> None:
        """Lets go of the driver's ends; an idle rank ends by it."""
        self.channel.close()
        self._stacks.close()
        self._ledger.close()


class Launcher:
    """Owns the nursery process.

    Raises:
        EngineError: on construction, if a module of the preload cannot be imported; says which and why.
        LauncherLostError: from any method but `close`, if the nursery has ended.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(_import_path())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C on the terminal is the driver's alone
            )
        self._process = process
        self._channel = wire.Channel(ours)
        self._end = weakref.finalize(self, _end, self._channel, process)
        self._exits: dict[int, nursery.Exited] = {}
        try:
            self._open(tuple(preload))
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The descriptor that becomes readable when a rank has ended."""
        return self._channel.fileno()

    def start(self, station: Station) -> RankProcess:
        """Forks one rank."""
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile(prefix="stacks-")  # noqa: SIM115 - closed by the RankProcess
        ledger = tempfile.TemporaryFile(prefix="ledger-")  # noqa: SIM115 - closed by the RankProcess
        fcntl.fcntl(ledger, fcntl.F_SETFL, os.O_APPEND)  # the driver empties it while the rank has it open
        with theirs:
            self._order(nursery.Fork(station))
            socket.send_fds(self._channel.socket, [b"."], [theirs.fileno(), stacks.fileno(), ledger.fileno()])
        reply = self._reply(nursery.Forked)
        process = RankProcess(station.rank, reply.pid, wire.Channel(ours), stacks, ledger)
        if reply.reason is not None:
            process.close()
            raise EngineError(f"rank {station.rank} could not be forked: {reply.reason}")
        self._exits.pop(reply.pid, None)  # of an earlier process with this pid
        return process

    def printed(self, process: RankProcess, seconds: float) -> str:
        """Returns the end of what a rank printed in the last `seconds`."""
        self.collect()
        if process.pid in self._exits:
            return self._exits[process.pid].printed.decode(errors="replace")
        self._order(nursery.Print(process.pid, seconds))
        return self._reply(nursery.Printed).printed.decode(errors="replace")

    def signal(self, process: RankProcess, number: signal.Signals) -> None:
        """Sends a signal to a rank, unless it has ended."""
        self._order(nursery.Signal(process.pid, number))

    def collect(self) -> None:
        """Takes in all exits reported so far, without waiting."""
        while self._channel.readable():
            self._note(self._receive())

    def exit_code(self, process: RankProcess) -> int | None:
        """Returns a rank's exit code, negative for a signal; None if it had not ended at the last `collect`."""
        exited = self._exits.get(process.pid)
        return None if exited is None else exited.code

    def wait(self, process: RankProcess, patience_s: float) -> int | None:
        """Returns a rank's exit code as soon as it has ended; None if it has not within `patience_s`."""
        until = time.monotonic() + patience_s
        self.collect()
        while process.pid not in self._exits and (left := until - time.monotonic()) > 0:
            if self._channel.readable(left):
                self._note(self._receive())
        return self.exit_code(process)

    def close(self) -> None:
        """Ends the nursery and all ranks; idempotent."""
        self._end()

    def _open(self, preload: tuple[str, ...]) -> None:
        self._order(nursery.Opening(os.getpid(), preload))
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
            if isinstance(message, nursery.Ready):
                break
            module = message.module
        self._channel.socket.settimeout(None)
        if message.module is not None:
            raise EngineError(
                f"preload module {message.module!r} failed to import: {message.reason}\n{message.traceback}"
            )

    def _reply(self, kind: type[_Reply]) -> _Reply:
        """Waits for the answer to an order, taking in the exits that come before it."""
        while not isinstance(reply := self._receive(), kind):
            self._note(reply)
        return reply

    def _order(self, order: nursery.Opening | nursery.Fork | nursery.Signal | nursery.Print) -> None:
        try:
            self._channel.send(wire.dumps(order))
        except OSError:
            raise self._lost() from None

    def _receive(self) -> object:
        try:
            return wire.loads(self._channel.receive())
        except (EOFError, OSError):
            raise self._lost() from None

    def _note(self, message: object) -> None:
        assert isinstance(message, nursery.Exited), message
        self._exits[message.pid] = message

    def _lost(self) -> LauncherLostError:
        try:
            how = describe_exit(self._process.wait(timeout=5))
        except subprocess.TimeoutExpired:
            how = "it closed its channel"
        return LauncherLostError(f"the process that forks the ranks is gone ({how}); the next run starts another")


def describe_exit(code: int) -> str:
    """Says how a process ended, from an exit code that is negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _import_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _end(channel: wire.Channel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then kills the ranks
        process.wait()
