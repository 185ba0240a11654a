"""What a world needs of the machines that its ranks are on. `LocalHost` is this for the driver's own machine."""

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
    """What forks the ranks of a machine has ended; these ranks have ended with it."""


class MachineLostError(HostLostError):
    """A machine is gone for good, and with it what this engine, or another, could run there."""


@dataclass(frozen=True)
class Child:
    """One rank as its own machine sees it."""

    rank: int
    pid: int


@dataclass(frozen=True, eq=False)
class RankProcess(Child):
    """One rank as the driver sees it: its process on its machine, and its channel."""

    channel: wire.Channel


@dataclass(frozen=True)
class Placement:
    """Where a rank will be.

    Attributes:
        local_rank: Its number on its machine.
        gpus: Names of the GPUs that it will see, in its order; two processes that see the same GPU call it the same.
    """

    local_rank: int
    gpus: tuple[str, ...]


class Hosts(Protocol):
    """Starts ranks, sends them signals, and tells of them even when they do not answer.

    Methods that take several ranks ask all of them at once; what they return is keyed by rank.

    Raises:
        HostLostError: from any method but `drop` and `close`.
    """

    address: str
    """The numeric address at which the ranks reach the driver."""

    def placement(self, rank: int) -> Placement:
        """Says where a rank would be.

        Raises:
            EngineError: there is no room for so many.
        """

    def start(self, specs: Sequence[RankSpec]) -> list[RankProcess]:
        """Starts ranks; they have yet to join their world.

        Raises:
            EngineError: one could not be started; none is left.
        """

    def drop(self, process: RankProcess) -> None:
        """Kills a rank, if it still lives, and forgets it."""

    def begin(self, processes: Sequence[RankProcess]) -> None:
        """Leaves behind what ranks wrote before the job that is about to be sent."""

    def signal(self, processes: Sequence[RankProcess], number: signal.Signals) -> None:
        """Sends a signal to ranks, unless they have ended."""

    def stacks(self, processes: Sequence[RankProcess]) -> dict[int, str]:
        """Makes ranks dump the stacks of their threads; a rank that does not within a second has an empty text.

        Works while a rank holds the GIL; not while it is stopped or blocks the signal.
        """

    def last_stacks(self, process: RankProcess) -> str:
        """Returns what a rank that has ended dumped since `begin`, as a crash makes it do."""

    def ledgers(self, processes: Sequence[RankProcess]) -> dict[int, bytes]:
        """Returns what ranks wrote into their ledgers since `begin`."""

    def printed(self, process: RankProcess) -> str:
        """Returns the end of what a rank printed since `begin`, or in its life if it has ended."""

    def thread_stats(self, processes: Sequence[RankProcess], main_only: bool) -> dict[int, Mapping[int, ThreadStats]]:
        """Returns what each thread of each rank has had of a processor, or (`main_only`) its main thread alone.

        Empty where the machine cannot tell.
        """

    def wakers(self) -> Sequence[wire.Channel]:
        """Returns what becomes readable when `collect` has something to take in."""

    def collect(self) -> None:
        """Takes in all exits reported so far, without waiting."""

    def exit_code(self, process: RankProcess) -> int | None:
        """Returns a rank's exit code, negative for a signal; None if it had not ended at the last `collect`."""

    def wait(self, process: RankProcess, patience_s: float) -> int | None:
        """Returns a rank's exit code as soon as it has ended; None if it has not within `patience_s`."""

    def close(self) -> None:
        """Ends all ranks and what forks them; idempotent."""


class Cluster(Protocol):
    """The machines that an engine may use."""

    def open(self, preload: Sequence[str], environment: Mapping[str, str]) -> Hosts:
        """Imports the preload there, and makes ready to start ranks.

        Raises:
            EngineError: a module of the preload cannot be imported, or a machine cannot be used.
        """
