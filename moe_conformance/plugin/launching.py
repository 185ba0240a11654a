"""Under a launcher such as torchrun RANK 0's process runs pytest; the others fork ranks for it and print nothing."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moe_conformance.engine.remote.cluster import RemoteCluster
    from moe_conformance.engine.remote.rendezvous import Launch

TOKEN = "MOE_CONFORMANCE_TOKEN"
_USAGE_ERROR = int(pytest.ExitCode.USAGE_ERROR)


class Launched:
    """A plug-in of RANK 0's process: when pytest ends it ends the other processes with the session's exit status."""

    def __init__(self, launch: Launch, site: RemoteCluster | None) -> None:
        """Hold the launch and its machines; a launcher of one process needs no site."""
        self.size = launch.size
        self.site = site
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Hold the session, which has the exit status at the end."""
        self._session = session

    def end(self) -> None:
        """End the other processes."""
        if self.site is not None:
            self.site.end(_USAGE_ERROR if self._session is None else int(self._session.exitstatus))


LAUNCHED = pytest.StashKey[Launched]()


def is_launched() -> bool:
    """Whether a launcher has started this process; imports nothing."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(config: pytest.Config) -> int | None:
    """Take this process's part in a launcher's job.

    Returns None in RANK 0's process once the others have joined: it then runs pytest. Returns the exit status in the
    others, once RANK 0's process has ended them.

    Raises:
        pytest.UsageError: in RANK 0's process, if the run cannot start; says why and what to do.
    """
    driver = os.environ["RANK"] == "0"
    if problem := _problem(config):  # before torch is imported
        if driver:
            raise pytest.UsageError(problem)
        return 0  # RANK 0 says why and fails; torchrun would end it, should we be the first to fail
    from moe_conformance.engine import EngineError
    from moe_conformance.engine.remote.agent import serve
    from moe_conformance.engine.remote.cluster import RemoteCluster
    from moe_conformance.engine.remote.rendezvous import UserSecret, launch_of

    token = os.environ.pop(TOKEN, None)  # ranks, and what they start, need not know it
    try:
        launch = launch_of(os.environ)
        assert launch is not None
        if launch.rank > 0:
            return serve(launch, UserSecret(token, TOKEN))
        launched = Launched(launch, RemoteCluster(launch, UserSecret(token, TOKEN)) if launch.size > 1 else None)
    except EngineError as error:
        if driver:
            raise pytest.UsageError(str(error)) from None
        print(f"RANK {os.environ['RANK']}: {error}", file=sys.stderr)
        return _USAGE_ERROR
    config.stash[LAUNCHED] = launched
    config.pluginmanager.register(launched, "moe-conformance-launched")
    config.add_cleanup(launched.end)
    return None


def with_ranks(config: pytest.Config, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, with one rank per process unless the number of ranks is given.

    Raises:
        pytest.UsageError: the launcher's other processes cannot know that they are needed.
    """
    if not is_launched():
        return given
    if LAUNCHED not in config.stash:
        raise pytest.UsageError("under torchrun, name distributed_tests or give an option such as --moe-backend native")
    return {**given, "ranks": str(config.stash[LAUNCHED].size)} if given.get("ranks") is None else given


def _problem(config: pytest.Config) -> str | None:
    """Return why a launcher's job cannot run, as far as every process can find out; None if it can."""
    if config.getoption("numprocesses", None) or config.getoption("tx", None):
        return "pytest-xdist starts processes of its own; leave out either -n or torchrun"
    ranks, size = str(config.getoption("moe_ranks", None)), os.environ["WORLD_SIZE"]
    if ranks.isdecimal() and size.isdecimal() and int(ranks) > int(size) > 1:
        return f"{ranks} ranks are more than the {size} processes that were launched; launch more of them"
    return None


def site_of(config: pytest.Config) -> RemoteCluster | None:
    """Return the machines on which ranks run, None for this one only."""
    return config.stash[LAUNCHED].site if LAUNCHED in config.stash else None
