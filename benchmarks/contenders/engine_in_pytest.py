"""This engine in pytest: the driver judges a case while the ranks run the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from benchmarks import cases
from benchmarks.contenders import engine_jobs
from benchmarks.timeline import assigned
from moe_conformance.engine import Engine, Job, Running

ASSIGNMENT = assigned()
PRELOAD = "ENGINE_BENCHMARK_PRELOAD"  # a further module for the ranks


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Iterator[list[cases.Outcome]]]:
    """The outcomes of all ranks, case after case."""
    torch.set_num_threads(1)
    more = [name] if (name := os.environ.get(PRELOAD)) else []
    with Engine(preload=(engine_jobs.__name__, *more)) as engine:
        yield _ahead(engine)


def _ahead(engine: Engine) -> Iterator[list[cases.Outcome]]:
    running = _start(engine, 0)
    for number in range(ASSIGNMENT.count):
        following = _start(engine, number + 1) if number + 1 < ASSIGNMENT.count else running
        result, running = running.result(), following
        assert result.ok, result
        yield cast(list[cases.Outcome], [rank.value for rank in result.ranks])


def _start(engine: Engine, number: int) -> Running:
    return engine.start(Job(f"{engine_jobs.__name__}:step", number, ASSIGNMENT.world, groups={}))


@pytest.mark.parametrize("number", range(ASSIGNMENT.count))
def test_case(outcomes: Iterator[list[cases.Outcome]], number: int) -> None:
    """The step is the oracle's."""
    ASSIGNMENT.judge(number, next(outcomes))
