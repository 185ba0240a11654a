"""The machines of a launcher's job, from which an engine takes its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from .. import wire
from ..local_host import LOOPBACK, LocalHost
from ..records import EngineError
from . import messages, sockets
from .agent_client import AgentClient
from .hosts import RemoteHosts
from .rendezvous import FIND_LIMIT_S, Launch, UserSecret, announce

_IMPORT_LIMIT_S = 600.0  # for the whole preload


class RemoteCluster:
    """A Cluster of a launcher's processes: RANK 0's is the driver, the others are its agents.

    All agents are connected on construction. One engine at a time may use it.

    Raises:
        EngineError: on construction, if an agent does not connect in time or has other versions, or if the processes
            have no secret in common.
    """

    def __init__(self, launch: Launch, given: UserSecret) -> None:
        self._launch = launch
        self._agents: list[AgentClient] = []
        self._listener, file = announce(launch, given)
        try:
            self._connect_agents()
        except BaseException:
            self.end(status=1)
            raise
        finally:
            if file is not None:
                file.remove()

    @property
    def size(self) -> int:
        """The number of processes of the launcher, which is the size of the largest world."""
        return self._launch.size

    def open(self, preload: Sequence[str], environment: Mapping[str, str]) -> RemoteHosts:
        """Imports the preload on all machines at once, and returns them ready to start ranks.

        Raises:
            EngineError: a module of the preload cannot be imported somewhere.
            MachineLostError: an agent has ended.
        """
        setup = messages.Setup(
            tuple(preload), dict(environment), tuple(entry or os.getcwd() for entry in sys.path), os.getcwd()
        )
        for agent in self._agents:
            agent.ask(setup)
        problem: EngineError | None = None
        local: LocalHost | None = None
        try:
            local = LocalHost(preload, environment, self._interface())
        except EngineError as error:  # the replies of the agents must still be taken
            problem = error
        for agent in self._agents:
            try:
                agent.answer(_IMPORT_LIMIT_S)
            except EngineError as error:
                problem = problem or EngineError(f"RANK {agent.rank} on {agent.info.machine}: {error}")
        if problem is not None or local is None:
            if local is not None:
                local.close()
            raise problem or AssertionError
        return RemoteHosts(local, self._launch.local_rank, self._agents, self._listener)

    def end(self, status: int) -> None:
        """Ends the agents; the run ends with that status."""
        for agent in self._agents:
            agent.dismiss(messages.Shutdown(status))
            agent.channel.close()
        self._listener.close()

    def _connect_agents(self) -> None:
        subjects = {messages.control(rank): rank for rank in range(1, self._launch.size)}
        ends = self._listener.wait(subjects, FIND_LIMIT_S)
        for subject, end in ends.items():
            sockets.tune(end)
            sockets.limit_silence(end)
            self._agents.append(AgentClient(subjects[subject], wire.Channel(end)))
        self._agents.sort(key=lambda agent: agent.rank)
        if missing := [str(rank) for subject, rank in subjects.items() if subject not in ends]:
            why = f" ({self._listener.refused})" if self._listener.refused else ""
            raise EngineError(f"no connection from RANK {', '.join(missing)} after {FIND_LIMIT_S:.0f} s{why}")
        for agent in self._agents:
            self._require_same_versions(agent)

    def _require_same_versions(self, agent: AgentClient) -> None:
        for name, version in messages.versions().items():
            if (theirs := agent.info.versions[name]) != version:
                where = f"RANK {agent.rank} on {agent.info.machine}"
                raise EngineError(f"{where} runs {name} {theirs}, RANK 0 {version}; install the same everywhere")

    def _interface(self) -> str | None:
        address = self._listener.address
        if sockets.is_loopback(address):
            return LOOPBACK
        return os.environ.get("GLOO_SOCKET_IFNAME") or sockets.interface_of(address)
