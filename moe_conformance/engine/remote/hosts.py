"""Starts ranks on all machines of a launcher's job: rank r is a child of the process with RANK r."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .. import wire
from ..hosts import Child, HostLostError, MachineLostError, Placement, RankProcess
from ..local_host import LocalHost
from ..processes import ThreadStats
from ..rank import RankSpec
from ..records import EngineError
from . import messages, sockets
from .agent_client import AgentClient
from .handshake import SUBJECT
from .listener import Listener

_START_LIMIT_S = 60.0
_LOOK_S = 0.1

_Value = TypeVar("_Value")


class RemoteHosts:
    """Hosts that run rank 0 on the driver's machine and every other rank under its agent."""

    def __init__(self, local: LocalHost, local_rank: int, agents: Sequence[AgentClient], listener: Listener) -> None:
        self._local = local
        self._local_rank = local_rank
        self._agents = agents
        self._listener = listener
        self.address: str = listener.address

    def placement(self, rank: int) -> Placement:
        """Returns where a rank would run.

        Raises:
            EngineError: the job has fewer processes.
        """
        if rank == 0:
            return Placement(self._local_rank, self._local.placement(0).gpus)
        if rank > len(self._agents):
            raise EngineError(
                f"a world with a rank {rank} does not fit into the {len(self._agents) + 1} processes that were "
                "launched; launch more of them, or use smaller worlds"
            )
        return self._agents[rank - 1].info.placement

    def start(self, specs: Sequence[RankSpec]) -> list[RankProcess]:
        """Starts ranks, all at once, which have yet to join their process group.

        Raises:
            EngineError: one could not be started; none is left.
        """
        subjects = {spec.rank: os.urandom(SUBJECT) for spec in specs if spec.rank > 0}
        for spec in specs:
            if spec.rank > 0:
                self._of(spec.rank).ask(messages.Start(spec, subjects[spec.rank]))
        started: dict[int, RankProcess] = {}
        problem: EngineError | None = None
        try:
            for process in self._local.start([spec for spec in specs if spec.rank == 0]):
                started[process.rank] = process
        except HostLostError:
            raise
        except EngineError as error:  # the replies of the agents must still be taken
            problem = error
        channels = self._receive(list(subjects.values()), [self._of(rank) for rank in subjects])
        for rank, subject in subjects.items():
            try:
                pid = self._of(rank).answer()
            except HostLostError:
                raise
            except EngineError as error:
                problem = problem or error
                continue
            assert isinstance(pid, int), pid
            self._of(rank).started(pid)
            started[rank] = RankProcess(rank, pid, channels[subject])
        if problem is not None:
            for process in started.values():
                self.drop(process)
            raise problem
        return [started[spec.rank] for spec in specs]

    def drop(self, process: RankProcess) -> None:
        """Kills a rank, if it is alive, and discards what is known of it."""
        if process.rank == 0:
            self._local.drop(process)
        else:
            process.channel.close()
            self._of(process.rank).forget(process)

    def begin(self, processes: Sequence[RankProcess]) -> None:
        """Discards what ranks have written so far; called before a job is sent."""
        self._ask("begin", processes)

    def signal(self, processes: Sequence[RankProcess], number: signal.Signals) -> None:
        """Sends a signal to ranks; one that has exited is skipped."""
        self._ask("signal", processes, number)

    def stacks(self, processes: Sequence[RankProcess]) -> dict[int, str]:
        """Makes ranks dump the stacks of their threads; "" for a rank that does not within a second."""
        return self._ask("stacks", processes)

    def last_stacks(self, process: RankProcess) -> str:
        """Returns the stacks that a rank has dumped since `begin`, as a crash makes it do."""
        return self._ask_one("last_stacks", process, str)

    def ledgers(self, processes: Sequence[RankProcess]) -> dict[int, bytes]:
        """Returns what ranks have written into their ledgers since `begin`."""
        return self._ask("ledgers", processes)

    def printed(self, process: RankProcess) -> str:
        """Returns the end of what a rank has printed since `begin`; if it has exited, in its whole life."""
        return self._ask_one("printed", process, str)

    def thread_stats(self, processes: Sequence[RankProcess], main_only: bool) -> dict[int, Mapping[int, ThreadStats]]:
        """Returns the scheduling statistics of each rank's threads, or of its main thread only."""
        return self._ask("thread_stats", processes, main_only)

    def wakers(self) -> Sequence[wire.Channel]:
        """Returns the channels that become readable when `collect` has something to read."""
        return [*self._local.wakers(), *(agent.channel for agent in self._agents)]

    def collect(self) -> None:
        """Reads all exits that were reported so far, without waiting."""
        self._local.collect()
        for agent in self._agents:
            agent.collect()

    def exit_code(self, process: RankProcess) -> int | None:
        """Returns a rank's exit code, negative for a signal; None if it had not exited at the last `collect`."""
        return (self._local if process.rank == 0 else self._of(process.rank)).exit_code(process)

    def wait(self, process: RankProcess, patience_s: float) -> int | None:
        """Waits until a rank has exited and returns its exit code; None if it has not within `patience_s`."""
        return (self._local if process.rank == 0 else self._of(process.rank)).wait(process, patience_s)

    def close(self) -> None:
        """Ends all ranks and the fork servers; the agents stay, for another engine."""
        for agent in self._agents:
            agent.dismiss(messages.Close())
        self._local.close()

    def _of(self, rank: int) -> AgentClient:
        return self._agents[rank - 1]

    def _receive(self, subjects: list[bytes], agents: list[AgentClient]) -> dict[bytes, wire.Channel]:
        """Returns the connections of new ranks; one is missing if its agent refused, as its reply will say."""
        found: dict[bytes, wire.Channel] = {}
        until = time.monotonic() + _START_LIMIT_S
        while missing := [subject for subject in subjects if subject not in found]:
            for subject, end in self._listener.wait(missing, _LOOK_S).items():
                sockets.tune(end)
                found[subject] = wire.Channel(end)
            if all(agent.channel.readable() for agent in agents):  # they have replied, or ended
                break
            if time.monotonic() > until:
                raise MachineLostError(f"ranks were not connected to the driver within {_START_LIMIT_S:.0f} s")
        return found

    def _ask(self, method: str, processes: Sequence[RankProcess], *arguments: object) -> dict[int, Any]:
        """Calls a method of LocalHost for ranks of all machines; the agents work while this machine does."""
        remote = [process for process in processes if process.rank > 0]
        for process in remote:
            self._of(process.rank).ask(messages.Invoke(method, Child(process.rank, process.pid), arguments))
        local = getattr(self._local, method)([process for process in processes if process.rank == 0], *arguments)
        answers = dict(local or {})
        for process in remote:
            answers[process.rank] = self._of(process.rank).answer()
        return answers

    def _ask_one(self, method: str, process: RankProcess, kind: type[_Value]) -> _Value:
        if process.rank == 0:
            answer = getattr(self._local, method)(process)
        else:
            self._of(process.rank).ask(messages.Invoke(method, Child(process.rank, process.pid)))
            answer = self._of(process.rank).answer()
        assert isinstance(answer, kind), answer
        return answer
