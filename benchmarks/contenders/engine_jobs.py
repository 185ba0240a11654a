"""What the engine runs on its ranks."""

from __future__ import annotations

from benchmarks import cases
from benchmarks.timeline import assigned
from moe_conformance.engine import RankContext


def step(context: RankContext, number: int) -> cases.Outcome:
    """Runs one case's step on this rank."""
    return cases.step(assigned().case(number), context.rank)
