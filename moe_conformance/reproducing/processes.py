"""Start the ranks of a script without a launcher: processes forked from it, on the loopback interface only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from moe_conformance.engine import store
from moe_conformance.engine.local_host import describe_exit
from moe_conformance.reproducing import secrets
from moe_conformance.reproducing.mailbox import Mailbox

ADDRESS = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


def start(ranks: int) -> int | None:
    """Fork the ranks and wait for them; return rank 0's exit status, or None in a rank.

    No rank outlives this process, however it ends.
    """
    listener = store.listen(ADDRESS)
    port: int = listener.getsockname()[1]
    sys.stdout.flush()
    living: dict[int, int] = {}  # ranks by the ids of their processes
    before = signal.signal(signal.SIGTERM, _terminated)
    parent, secret = os.getpid(), secrets.new()
    try:
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, before)
                listener.close()
                os.environ[secrets.VARIABLE] = secret
                _be(rank, ranks, port, parent)
                return None
            living[pid] = rank
        served = store.serve(listener)  # after the forks, since threads are not forked
        return _wait(living, Mailbox(ADDRESS, port, secret.encode()), served)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if os.getpid() == parent:
            _kill(living)
            signal.signal(signal.SIGTERM, before)


def _be(rank: int, ranks: int, port: int, parent: int) -> None:
    """Set up a forked process as a rank, as torchrun would; it is killed when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all ranks: no traceback per rank
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=ADDRESS,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is in the parent
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _wait(living: dict[int, int], mailbox: Mailbox, served: object) -> int:
    """Wait for rank 0 and return its exit status; report ranks that end before it to its mailbox.

    `served` keeps the store alive meanwhile.
    """
    while True:
        pid, status = os.wait()
        rank, code = living.pop(pid), os.waitstatus_to_exitcode(status)
        if code == -signal.SIGINT:  # Ctrl-C, which reaches this process as well
            return 128 + signal.SIGINT
        if rank > 0:
            mailbox.put(f"ended/{rank}", describe_exit(code) + ("" if code < 0 else " before it answered"))
        elif code >= 0:
            return code
        else:
            print(f"run: rank 0 died: {describe_exit(code)}")
            return 1


def _kill(living: dict[int, int]) -> None:
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    for pid in living:
        os.waitpid(pid, 0)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
