"""The machines of a launcher's job, as an engine uses them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from .. import wire
from ..launcher import LOOPBACK, Launcher
from ..records import EngineError
from . import messages, sockets
from .fleet import Fleet
from .proxy import Proxy
from .rendezvous import FIND_LIMIT_S, Given, Launch, announce

_IMPORT_LIMIT_S = 600.0  # of the whole preload


class RemoteSite:
    """A Site: RANK 0's process is the driver, the others are its outposts, all of which are here on construction.

    One engine at a time may use it.

    Raises:
        EngineError: on construction, if an outpost does not come in time or runs other versions; or if there is no
            secret in common.
    """

    def __init__(self, launch: Launch, given: Given) -> None:
        self._launch = launch
        self._outposts: list[Proxy] = []
        self._reception, file = announce(launch, given)
        try:
            self._gather()
        except BaseException:
            self.end(status=1)
            raise
        finally:
            if file is not None:
                file.remove()

    @property
    def size(self) -> int:
        """The number of processes, and so of ranks of the largest world."""
        return self._launch.size

    def open(self, preload: Sequence[str], environment: Mapping[str, str]) -> Fleet:
        """Imports the preload on all hosts at once, and makes ready to start ranks.

        Raises:
            EngineError: a module of the preload cannot be imported somewhere.
            SiteLostError: an outpost is gone.
        """
        opening = messages.Opening(
            tuple(preload), dict(environment), tuple(entry or os.getcwd() for entry in sys.path), os.getcwd()
        )
        for outpost in self._outposts:
            outpost.ask(opening)
        problem: EngineError | None = None
        local: Launcher | None = None
        try:
            local = Launcher(preload, environment, self._interface())
        except EngineError as error:  # the answers of the others must be taken even so
            problem = error
        for outpost in self._outposts:
            try:
                outpost.answer(_IMPORT_LIMIT_S)
            except EngineError as error:
                problem = problem or EngineError(f"RANK {outpost.rank} on {outpost.presence.machine}: {error}")
        if problem is not None or local is None:
            if local is not None:
                local.close()
            raise problem or AssertionError
        return Fleet(local, self._launch.local_rank, self._outposts, self._reception)

    def end(self, status: int) -> None:
        """Lets the other processes go; the run ends with that status."""
        for outpost in self._outposts:
            outpost.dismiss(messages.Farewell(status))
            outpost.channel.close()
        self._reception.close()

    def _gather(self) -> None:
        subjects = {messages.control(rank): rank for rank in range(1, self._launch.size)}
        ends = self._reception.wait(subjects, FIND_LIMIT_S)
        for subject, end in ends.items():
            sockets.tune(end)
            sockets.limit_silence(end)
            self._outposts.append(Proxy(subjects[subject], wire.Channel(end)))
        self._outposts.sort(key=lambda outpost: outpost.rank)
        if missing := [str(rank) for subject, rank in subjects.items() if subject not in ends]:
            why = f" ({self._reception.refused})" if self._reception.refused else ""
            raise EngineError(f"no connection from RANK {', '.join(missing)} after {FIND_LIMIT_S:.0f} s{why}")
        for outpost in self._outposts:
            self._require_same_versions(outpost)

    def _require_same_versions(self, outpost: Proxy) -> None:
        for name, version in messages.versions().items():
            if (theirs := outpost.presence.versions[name]) != version:
                where = f"RANK {outpost.rank} on {outpost.presence.machine}"
                raise EngineError(f"{where} runs {name} {theirs}, RANK 0 {version}; install the same everywhere")

    def _interface(self) -> str | None:
        address = self._reception.address
        if sockets.is_loopback(address):
            return LOOPBACK
        return os.environ.get("GLOO_SOCKET_IFNAME") or sockets.interface_of(address)
