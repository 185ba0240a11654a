"""Functions that the tests of the engine run on ranks; most cause a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_conformance.engine import RankContext

_groups_seen: dict[str, dist.ProcessGroup] = {}
_jobs_here = [0]


class RefusedError(Exception):
    """An exception with attributes, of which only some are plain."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.by = "library"
        self.count = 3
        self.tensor = torch.ones(2)


class BreaksWhileLoading:
    """A payload that ends the faulty rank's process while it is loaded, and raises a lost connection on others."""

    def __init__(self, faulty: int) -> None:
        self.faulty = faulty

    def __setstate__(self, state: dict[str, int]) -> None:
        if dist.get_rank() == state["faulty"]:
            os._exit(7)
        raise RuntimeError("Connection closed by peer")


# ---- functions that return ----


def echo(context: RankContext, payload: Any) -> Any:
    """Returns the payload."""
    return payload


def where_am_i(context: RankContext, payload: Any) -> Any:
    """Returns the fields of the context, and the ranks that torch reports for the groups."""
    groups = {name: dist.get_process_group_ranks(group) for name, group in context.groups.items()}
    default = (dist.get_rank(), dist.get_world_size())
    return context.rank, context.world, default, str(context.device), groups


def sums(context: RankContext, payload: Any) -> dict[str, float]:
    """Returns the sum of (rank + 1) over the world and over each group."""
    totals = {}
    for name, group in {"world": None, **context.groups}.items():
        total = torch.tensor([context.rank + 1.0])
        dist.all_reduce(total, group=group)
        totals[name] = total.item()
    return totals


def same_groups_as_before(context: RankContext, payload: Any) -> bool:
    """Returns whether every group is the same object as in the previous job."""
    same = all(_groups_seen.get(name) is group for name, group in context.groups.items())
    _groups_seen.update(context.groups)
    return same


def pid(context: RankContext, payload: Any) -> tuple[int, int]:
    """Returns the pids of this process and of the fork server."""
    return os.getpid(), os.getppid()


def count_jobs(context: RankContext, payload: Any) -> int:
    """Returns how often this process has run this function."""
    _jobs_here[0] += 1
    return _jobs_here[0]


def settings(context: RankContext, payload: Any) -> Any:
    """Returns the settings that the engine makes in a rank's process."""
    with open("/proc/self/oom_score_adj", encoding="ascii") as oom:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return torch.get_num_threads(), ignored, sys.path, int(oom.read()), os.sched_getscheduler(0)


def variable(context: RankContext, payload: str) -> str | None:
    """Returns an environment variable."""
    return os.environ.get(payload)


def reduce_megabytes(context: RankContext, megabytes: int) -> float:
    """Returns an element of the sum of large tensors."""
    big = torch.full((megabytes * 2**18,), context.rank + 1.0)
    for _ in range(3):
        dist.all_reduce(big)
    return big[-1].item()


def say(context: RankContext, payload: str) -> None:
    """Prints, without flushing."""
    print(f"rank {context.rank} says {payload}\n", end="")  # at once, should it be written unbuffered


def warn(context: RankContext, payload: str) -> None:
    """Warns from one line, as a library may do in every step, then prints."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(payload, FutureWarning, stacklevel=1)
    print(f"rank {context.rank} goes on")


def start_a_sleeper(context: RankContext, payload: Any) -> int:
    """Returns the pid of a process that this rank keeps."""
    context.kept["sleeper"] = subprocess.Popen(["sleep", "600"])
    return context.kept["sleeper"].pid  # type: ignore[no-any-return]


# ---- functions that do not; `faulty` is the rank to blame ----


def _all_reduce() -> None:
    dist.all_reduce(torch.ones(3))


def one_raises(context: RankContext, faulty: int) -> None:
    """The faulty rank raises; the others wait for it in a collective."""
    _all_reduce()
    if context.rank == faulty:
        raise ValueError(f"rank {faulty} has\nhad enough")
    _all_reduce()


def one_raises_and_others_wrap(context: RankContext, faulty: int) -> None:
    """The faulty rank raises; the others raise another exception from the one they get."""
    if context.rank == faulty:
        raise ValueError("the first fault")
    try:
        _all_reduce()
    except RuntimeError as error:
        raise RefusedError("could not exchange") from error


def one_raises_others_work(context: RankContext, faulty: int) -> str:
    """The faulty rank raises; the others never wait for it."""
    if context.rank == faulty:
        raise ValueError("alone")
    time.sleep(0.2)
    return "done"


def all_raise(context: RankContext, payload: Any) -> None:
    """All ranks raise the same, with attributes."""
    raise RefusedError(f"no such thing on rank {context.rank}")


def leave(context: RankContext, faulty: int) -> None:
    """The faulty rank calls sys.exit."""
    if context.rank == faulty:
        sys.exit(3)


def exit_hard(context: RankContext, faulty: int) -> None:
    """The faulty rank's process exits by os._exit."""
    if context.rank == faulty:
        os._exit(7)
    _all_reduce()


def kill_oneself(context: RankContext, culprit_and_signal: tuple[int, int]) -> None:
    """The faulty rank's process is killed by a signal."""
    faulty, number = culprit_and_signal
    if context.rank == faulty:
        os.kill(os.getpid(), number)
    _all_reduce()


def kill_the_parent(context: RankContext, payload: Any) -> None:
    """Kills the fork server."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def sleep_before_collective(context: RankContext, faulty: int) -> None:
    """The faulty rank sleeps; the others wait for it in a collective."""
    if context.rank == faulty:
        time.sleep(600)
    _all_reduce()


def spin_before_collective(context: RankContext, faulty: int) -> None:
    """The faulty rank computes for ever, in Python; the others wait on the handle of an asynchronous collective."""
    while context.rank == faulty:
        pass
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def skip_collective(context: RankContext, faulty: int) -> str:
    """The faulty rank omits a collective."""
    _all_reduce()
    if context.rank != faulty:
        _all_reduce()
    return "returned"


def reduce_otherwise(context: RankContext, faulty: int) -> str:
    """The faulty rank reduces by MAX where the others add; the transport lets all ranks return."""
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if context.rank == faulty else dist.ReduceOp.SUM)
    return "returned"


def skip_collective_in_backward(context: RankContext, faulty: int) -> None:
    """The faulty rank omits a collective that is part of the backward pass."""
    x = torch.ones(3, requires_grad=True)
    y = x * 2 if context.rank == faulty else _Met.apply(x)  # type: ignore[no-untyped-call]
    y.sum().backward()


class _Met(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        _all_reduce()
        return dy


def wait_for_each_other(context: RankContext, payload: Any) -> None:
    """Every rank waits for a message that none sends."""
    dist.recv(torch.empty(3), src=(context.rank + 1) % context.world)


def sleep(context: RankContext, seconds: float) -> str:
    """Sleeps on all ranks; the answer comes late."""
    time.sleep(seconds)
    return "late"


def make_a_group(context: RankContext, payload: Any) -> tuple[float, float]:
    """Make a group of ranks 0 and 1, rank 0 later than the others; return when that began and when it ended."""
    if context.rank == 0:
        time.sleep(0.3)
    began = time.monotonic()
    group = dist.new_group([0, 1])
    made = time.monotonic()
    if context.rank < 2:
        dist.destroy_process_group(group)
    return began, made


def sum_in_own_group(context: RankContext, payload: Any) -> float:
    """Return the sum of the ranks in a group that the first and the last rank make without the others."""
    if context.rank not in (0, context.world - 1):
        return 0.0
    group = dist.new_group([0, context.world - 1], use_local_synchronization=True)
    total = torch.tensor(float(context.rank))
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return total.item()


def make_file(context: RankContext, path: str) -> None:
    """Make a file, on the rank that comes first."""
    Path(path).touch()


def wait_for_file(context: RankContext, path: str) -> str:
    """Return once there is a file, and say which."""
    while not Path(path).exists():
        time.sleep(0.01)
    return path


def sleep_on_a_thread(context: RankContext, payload: Any) -> None:
    """Rank 0 waits for a thread that sleeps; the others wait for rank 0."""
    if context.rank == 0:
        thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
        thread.start()
        thread.join()
    _all_reduce()


def destroy_the_default_group(context: RankContext, faulty: int) -> None:
    """The faulty rank destroys the default process group."""
    if context.rank == faulty:
        dist.destroy_process_group()


def stop_oneself(context: RankContext, faulty: int) -> None:
    """The faulty rank is stopped by a signal and cannot even dump its stack."""
    if context.rank == faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    _all_reduce()


def return_a_generator(context: RankContext, faulty: int) -> Any:
    """The faulty rank returns what cannot be pickled."""
    return (n for n in range(3)) if context.rank == faulty else "fine"


# ---- functions that leave something behind, or print ----


def leave_behind(context: RankContext, what: str) -> None:
    """Leaves something behind on rank 1."""
    if context.rank == 1:
        _LEAVES[what]()


def keep(context: RankContext, payload: Any) -> None:
    """Stores something in `kept`, and changes the process."""
    context.kept["server"] = threading.Thread(target=time.sleep, args=(600,), daemon=True, name="server")
    context.kept["server"].start()
    os.environ["SERVED"] = "yes"


def print_then_fail(context: RankContext, payload: int) -> None:
    """Prints that many lines, the last one from a child process, and raises."""
    for line in range(payload):
        print(f"rank {context.rank} line {line}")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    raise RefusedError("enough")


def print_without_end(context: RankContext, payload: Any) -> None:
    """Prints for ever on rank 1."""
    while context.rank == 1:
        print("again and again " * 10)


def _leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="watcher").start()


def _leave_no_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


_LEAVES: dict[str, Callable[[], object]] = {
    "thread": _leave_a_thread,
    "variable": partial(os.environ.__setitem__, "DEBUG", "1"),
    "dtype": partial(torch.set_default_dtype, torch.float64),
    "folder": partial(os.chdir, "/"),
    "removed folder": _leave_no_folder,
    "mode": partial(torch.set_grad_enabled, False),
}


def leave_groups(context: RankContext, payload: Any) -> None:
    """Leaves two process groups behind on every rank."""
    for _ in range(2):
        dist.new_group(list(range(context.world)))


def fork_and_return(context: RankContext, payload: Any) -> str:
    """Forks, and returns in both processes."""
    return "parent" if os.fork() else "child"


def call_for_ever(context: RankContext, payload: Any) -> None:
    """Rank 1 calls collectives on a group of one for ever."""
    alone = dist.new_group([1])
    while context.rank == 1:
        dist.all_reduce(torch.ones(1), group=alone)


def own(context: RankContext, payload: Any) -> tuple[Any, Any]:
    """Returns the payload and the rank payload."""
    return payload, context.rank_payload


def peek_before_the_wait(context: RankContext, payload: Any) -> bool:
    """Returns whether the output of an asynchronous collective is hidden before the wait."""
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    hidden = bool(x.isnan().all())
    work.wait()
    return hidden
