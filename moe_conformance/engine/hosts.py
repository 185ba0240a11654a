"""Protocols of the machines on which ranks run. `LocalHost` implements them for the driver's machine."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import wire
from .processes import ThreadStats
from .rank import RankSpec
from .records import EngineError


class HostLostError(EngineError):
    """The process from which a machine's ranks are forked has ended, and its ranks with it."""


class MachineLostError(HostLostError):
    """A machine is lost permanently: neither this engine nor another can run ranks there."""


@dataclass(frozen=True)
class Child:
    """A rank's process, as its own machine identifies it."""

    rank: int
    pid: int


@dataclass(frozen=True, eq=False)
class RankProcess(Child):
    """A rank's process, as the driver identifies it, with the channel to it."""

    channel: wire.Channel


@dataclass(frozen=True)
class Placement:
    """Where a rank runs: its number on its machine, and the GPUs that it sees.

    Attributes:
        local_rank: Its number on its machine.
        gpus: Names of the GPUs that it will see, in its order; the name of a GPU is the same in all processes.
    """

    local_rank: int
    gpus: tuple[str, ...]


class Hosts(Protocol):
    """Starts ranks on one machine or several, signals them, and reads what they write and print.

    Methods that take several ranks handle them at the same time; what they return is keyed by rank.

    Raises:
        HostLostError: from any method but `drop` and `close`.
    """

    address: str
    """The numeric address at which the ranks reach the driver."""

    def placement(self, rank: int) -> Placement:
        """Returns where a rank would run.

        Raises:
            EngineError: there is no room for so many.
        """

    def start(self, specs: Sequence[RankSpec]) -> list[RankProcess]:
        """Starts ranks, which have yet to join their process group.

        Raises:
            EngineError: one could not be started; none is left.
        """

    def drop(self, process: RankProcess) -> None:
        """Kills a rank, if it is alive, and discards what is known of it."""

    def begin(self, processes: Sequence[RankProcess]) -> None:
        """Discards what ranks have written so far; called before a job is sent."""

    def signal(self, processes: Sequence[RankProcess], number: signal.Signals) -> None:
        """Sends a signal to ranks; one that has exited is skipped."""

    def stacks(self, processes: Sequence[RankProcess]) -> dict[int, str]:
        """Makes ranks dump the stacks of their threads; "" for a rank that does not within a second.

        Works while a rank holds the GIL, but not while it is stopped or blocks the signal.
        """

    def last_stacks(self, process: RankProcess) -> str:
        """Returns the stacks that a rank has dumped since `begin`, as a crash makes it do."""

    def ledgers(self, processes: Sequence[RankProcess]) -> dict[int, bytes]:
        """Returns what ranks have written into their ledgers since `begin`."""

    def printed(self, process: RankProcess) -> str:
        """Returns the end of what a rank has printed since `begin`; if it has exited, in its whole life."""

    def thread_stats(self, processes: Sequence[RankProcess], main_only: bool) -> dict[int, Mapping[int, ThreadStats]]:
        """Returns the scheduling statistics of each rank's threads, or of its main thread only.

        Empty where the machine does not provide them.
        """

    def wakers(self) -> Sequence[wire.Channel]:
        """Returns the channels that become readable when `collect` has something to read."""

    def collect(self) -> None:
        """Reads all exits that were reported so far, without waiting."""

    def exit_code(self, process: RankProcess) -> int | None:
        """Returns a rank's exit code, negative for a signal; None if it had not exited at the last `collect`."""

    def wait(self, process: RankProcess, patience_s: float) -> int | None:
        """Waits until a rank has exited and returns its exit code; None if it has not within `patience_s`."""

    def close(self) -> None:
        """Ends all ranks and the processes from which they are forked; idempotent."""


class Cluster(Protocol):
    """The machines that an engine may use."""

    def open(self, preload: Sequence[str], environment: Mapping[str, str]) -> Hosts:
        """Imports the preload on every machine and returns the machines, ready to start ranks.

        Raises:
            EngineError: a module of the preload cannot be imported, or a machine cannot be used.
        """
