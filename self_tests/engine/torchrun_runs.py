"""Runs pytest under torchrun, with one agent or with several on loopback, and looks for what it leaves behind."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from self_tests.engine.test_life import survivors
from self_tests.plugin.plugin_runs import LIMIT_S, PROJECT, Finished, environment, marked

PYTEST = ("-m", "pytest", "-c", os.devnull, "--rootdir", str(PROJECT), "-p", "no:cacheprovider")


def torchrun(*arguments: str, cwd: Path, **variables: str) -> Finished:
    """Run one agent with two processes."""
    (finished,) = _together([["--nproc-per-node", "2", *arguments]], cwd, variables)
    return finished


def agents(*arguments: str, cwd: Path, **variables: str) -> list[Finished]:
    """Run two agents with one process each, as on two machines."""
    rendezvous = ("--rdzv-backend", "static", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    two_machines = ("--nnodes", "2", "--nproc-per-node", "1", *rendezvous)
    # In the agent that ends last torchrun logs that the other one, with the store of its rendezvous, is gone.
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL", **variables}
    return _together([[*two_machines, "--node-rank", str(rank), *arguments] for rank in range(2)], cwd, variables)


def _together(commands: list[list[str]], cwd: Path, variables: dict[str, str]) -> list[Finished]:
    mark = uuid.uuid4().hex
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            cwd=cwd,
            env={**environment(mark), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in commands
    ]
    try:
        found = []
        for process in started:
            output, _ = process.communicate(timeout=LIMIT_S)
            found.append(Finished(process.returncode, output))
        left = survivors(list(marked(mark)))
        assert not left, f"processes are left: {left}"
        return found
    finally:
        for process in started:
            process.kill()
            process.communicate()


# Below those that systems give to whoever connects to somewhere or asks for any port: from 32768 on, or 49152.
_AMONG = range(20000, 32000)


def free_port() -> int:
    """Return a port at which nothing listens, and which what runs beside the test is not given in the meantime."""
    while True:
        port = random.choice(_AMONG)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
