"""This engine in pytest: the driver judges some cases while the ranks run the next ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from benchmarks import cases
from benchmarks.contenders import ranks
from benchmarks.timeline import assigned
from moe_conformance.engine import Engine, Job, Running

ASSIGNMENT = assigned()
MOST = int(os.environ.get("ENGINE_BENCHMARK_TOGETHER", "16"))  # cases in a message; the first ones are smaller
PRELOAD = "ENGINE_BENCHMARK_PRELOAD"  # a further module for the ranks


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Iterator[list[cases.Outcome]]]:
    """The outcomes of all ranks, case after case."""
    torch.set_num_threads(1)
    gc.freeze()  # as the driver of the product does once items are collected
    more = [name] if (name := os.environ.get(PRELOAD)) else []
    with Engine(preload=(ranks.__name__, *more)) as engine:
        yield _ahead(engine)


def _ahead(engine: Engine) -> Iterator[list[cases.Outcome]]:
    size = 1
    begun = _start(engine, 0, size)
    while begun:
        size = min(2 * size, MOST)
        following = _start(engine, begun[-1].job.payload + 1, size)
        for running in begun:
            result = running.result()
            assert result.ok, result
            yield cast(list[cases.Outcome], [rank.value for rank in result.ranks])
        begun = following


def _start(engine: Engine, first: int, size: int) -> list[Running]:
    numbers = range(first, min(first + size, ASSIGNMENT.count))
    jobs = [Job(f"{ranks.__name__}:step", number, ASSIGNMENT.world, groups={}) for number in numbers]
    return engine.start_many(jobs) if jobs else []


@pytest.mark.parametrize("number", range(ASSIGNMENT.count))
def test_case(outcomes: Iterator[list[cases.Outcome]], number: int) -> None:
    """The step is the oracle's."""
    ASSIGNMENT.judge(number, next(outcomes))
