"""How long it takes until a world whose ranks were all killed works again."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.contenders import engine_jobs
from moe_conformance.engine import Engine, Job, RankContext


def end(context: RankContext, payload: None) -> None:
    """Kills this rank."""
    os.kill(os.getpid(), signal.SIGKILL)


def total(context: RankContext, payload: int) -> int:
    """Returns the sum of all ranks' numbers, each `payload` more than its rank."""
    import torch
    import torch.distributed as dist

    sum_ = torch.tensor(context.rank + payload)
    dist.all_reduce(sum_)
    return int(sum_)


def seconds(world: int, repeats: int) -> list[float]:
    """Returns, for each repeat, the seconds from sending a job that kills all ranks to the next job's right result.

    Raises:
        AssertionError: the fault was not told, or the next job went wrong.
    """
    with Engine(preload=(__name__, engine_jobs.__name__)) as engine:
        _check(engine, world)
        return [_once(engine, world) for _ in range(repeats)]


def _once(engine: Engine, world: int) -> float:
    began = time.monotonic()
    result = engine.run(Job(f"{__name__}:end", None, world, groups={}))
    assert ["died"] * world == [rank.status for rank in result.ranks], result
    _check(engine, world)
    return time.monotonic() - began


def _check(engine: Engine, world: int) -> None:
    result = engine.run(Job(f"{__name__}:total", 1, world, groups={}))
    assert [world * (world + 1) // 2] * world == [rank.value for rank in result.ranks], result
