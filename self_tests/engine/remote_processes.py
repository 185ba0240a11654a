"""Starts the processes of a launcher's job without the launcher: this process is the driver, the others are agents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from moe_conformance.engine.remote.rendezvous import Launch, UserSecret, launch_of
from self_tests.plugin.plugin_runs import environment

CHECKOUT = Path(__file__).parents[2]
GIVEN = UserSecret(None, "SECRET_OF_TEST")
AGENT = """
import os, sys
from moe_conformance.engine import EngineError
from moe_conformance.engine.remote.agent import serve
from moe_conformance.engine.remote.rendezvous import UserSecret, launch_of
try:
    sys.exit(serve(launch_of(os.environ), UserSecret(os.environ.get("SECRET_OF_TEST"), "SECRET_OF_TEST")))
except EngineError as error:
    sys.exit(str(error))
"""


class Processes:
    """All processes of one job of `size`, on one machine unless `local_size` says otherwise."""

    def __init__(self, size: int, mark: str, **variables: str) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._variables = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **variables,
        }
        self._mark = mark
        self.agents = [self._start(rank) for rank in range(1, size)]

    @property
    def driver(self) -> Launch:
        """The Launch of this process."""
        launch = launch_of({**self._variables, "RANK": "0", "LOCAL_RANK": "0"})
        assert launch is not None
        return launch

    def end(self) -> None:
        """Ends those agents that still run."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
            agent.stdout.close()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", AGENT],
            cwd=CHECKOUT,
            env={**environment(self._mark), **self._variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
