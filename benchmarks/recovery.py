"""How long it takes until a world whose ranks were all killed works again."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from benchmarks import cases
from moe_conformance.engine import Engine, Job, RankContext

_CASE = 3


def end(context: RankContext, payload: None) -> None:
    """Kills this rank."""
    os.kill(os.getpid(), signal.SIGKILL)


def step(context: RankContext, number: int) -> cases.Outcome:
    """Runs one case's step on this rank."""
    return cases.step(cases.make(number, context.world), context.rank)


def seconds(world: int, repeats: int) -> list[float]:
    """Returns, for each repeat, the seconds from sending a job that kills all ranks to the next job's right outcome.

    Raises:
        AssertionError: the fault was not told, or the next job went wrong.
    """
    with Engine(preload=(__name__,)) as engine:
        _check(engine, world)
        return [_once(engine, world) for _ in range(repeats)]


def _once(engine: Engine, world: int) -> float:
    began = time.monotonic()
    result = engine.run(Job(f"{__name__}:end", None, world, groups={}))
    assert ["died"] * world == [rank.status for rank in result.ranks], result
    _check(engine, world)
    return time.monotonic() - began


def _check(engine: Engine, world: int) -> None:
    result = engine.run(Job(f"{__name__}:step", _CASE, world, groups={}))
    assert result.ok, result
    outcomes: list[Any] = [rank.value for rank in result.ranks]
    cases.judge(cases.make(_CASE, world), outcomes)
