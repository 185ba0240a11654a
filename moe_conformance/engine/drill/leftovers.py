"""Injected faults of ranks that return: results that cannot be sent or loaded, and what is left behind."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from typing import Any

import torch
import torch.distributed as dist

from .. import RankContext
from .injection import Target, sum_over

VARIABLE = "ENGINE_DRILL_LEFT_BEHIND"


class BreaksOnTheDriver:
    """An object that can be pickled and raises when it is unpickled."""

    def __setstate__(self, state: dict[str, int]) -> None:
        raise ValueError("drilled")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def return_what_cannot_be_sent(context: RankContext, target: Target) -> Any:
    """The faulty rank returns a generator."""
    sum_over()
    return (n for n in range(3)) if context.rank == target.faulty else "returned"


def return_what_cannot_be_loaded(context: RankContext, target: Target) -> Any:
    """The faulty rank returns an object that raises when the driver loads it."""
    sum_over()
    return BreaksOnTheDriver() if context.rank == target.faulty else "returned"


def return_too_much(context: RankContext, target: Target) -> Any:
    """The faulty rank returns a terabyte, of which only 4 bytes exist."""
    sum_over()
    return torch.ones(1).expand(1 << 38) if context.rank == target.faulty else "returned"


def leave_a_thread(context: RankContext, target: Target) -> str:
    """The faulty rank leaves a thread behind."""
    sum_over()
    if context.rank == target.faulty:
        threading.Thread(target=threading.Event().wait, name="left-behind", daemon=True).start()
    return "returned"


def leave_a_group(context: RankContext, target: Target) -> str:
    """All ranks make a process group and do not destroy it, as a library without a group argument does."""
    sum_over()
    dist.new_group()
    return "returned"


def leave_variables(context: RankContext, target: Target) -> str:
    """The faulty rank adds an environment variable and removes another."""
    sum_over()
    if context.rank == target.faulty:
        os.environ[VARIABLE] = "1"
        del os.environ["OMP_NUM_THREADS"]
    return "returned"


def leave_a_default_dtype(context: RankContext, target: Target) -> str:
    """The faulty rank changes the default dtype and disables gradients."""
    sum_over()
    if context.rank == target.faulty:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
    return "returned"


def leave_children(context: RankContext, target: Target) -> str:
    """The faulty rank starts two processes that would outlive it, one of them in another session."""
    sum_over()
    if context.rank == target.faulty:
        for own_session in (False, True):
            subprocess.Popen(["sleep", "600"], start_new_session=own_session)
    return "returned"


def leave_children_and_die(context: RankContext, target: Target) -> str:
    """The faulty rank starts the same processes, and then exits."""
    leave_children(context, target)
    if context.rank == target.faulty:
        os._exit(7)
    sum_over()
    return "returned"


def close_the_channel(context: RankContext, target: Target) -> str:
    """The faulty rank closes all its Unix sockets, the channel to the driver included."""
    sum_over()
    if context.rank == target.faulty:
        for descriptor in _local_sockets():
            os.close(descriptor)
    return "returned"


def write_into_the_channel(context: RankContext, target: Target) -> str:
    """The faulty rank writes into all its Unix sockets, the channel to the driver included."""
    sum_over()
    if context.rank == target.faulty:
        for descriptor in _local_sockets():
            os.write(descriptor, b"drilled\n")
    return "returned"


def destroy_the_default_group(context: RankContext, target: Target) -> str:
    """The faulty rank destroys the default process group."""
    sum_over()
    if context.rank == target.faulty:
        dist.destroy_process_group()
    return "returned"


def _local_sockets() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd") if _is_local_socket(int(name))]


def _is_local_socket(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
    except OSError:  # the one that listed the folder
        return False
    with socket.socket(fileno=os.dup(descriptor)) as end:
        return end.family == socket.AF_UNIX
