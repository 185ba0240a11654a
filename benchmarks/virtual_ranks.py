"""What a step on virtual ranks costs: `python -m benchmarks.virtual_ranks`.

One workload of the virtual corpus through the native backend: dispatch, combine and backward, the probe expert between
them. The first step of a world starts its process and makes its groups and sessions.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from itertools import pairwise

from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.workloads import virtual

_WORKLOAD = "many-ranks-uneven"
_LATER = 3  # steps after the first, of which the median counts
_RUNS = (
    ("alltoall", Layout(8, ep=8)),
    ("alltoall", Layout(64, ep=64)),
    ("allgather", Layout(64, ep=64)),
    ("alltoall", Layout(256, ep=256)),
    ("alltoall", Layout(512, ep=512)),
    ("allgather", Layout(512, ep=64)),
    ("alltoall", Layout(512, tp=2, ep=256, etp=2)),
)


@dataclass(frozen=True)
class Cost:
    """Seconds and processor seconds of the first step and of a later one, and the peak of the ranks' process in MiB."""

    first_s: float
    later_s: float
    first_cpu_s: float
    later_cpu_s: float
    peak_mib: float


def spent(context: RankContext, payload: None) -> tuple[float, float]:
    """Processor seconds of the ranks' process so far, and the most MiB that it has held."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(variant: str, layout: Layout) -> Cost:
    """Run the workload a few times in a new process.

    Raises:
        AssertionError: a rank did not finish.
    """
    (workload,) = [each for each in virtual.corpus(variant, layout) if each.name == _WORKLOAD]
    seconds, processor = [], [0.0]
    with Engine(virtual=True, preload=("moe_conformance.scenarios.moe_step", "benchmarks.virtual_ranks")) as engine:
        for _ in range(1 + _LATER):
            began = time.monotonic()
            outcome = moe_step(engine, "native", workload)
            seconds.append(time.monotonic() - began)
            assert all(rank.status == "ok" for rank in outcome.ranks), outcome.blamed
            cpu, peak = engine.run(Job("benchmarks.virtual_ranks:spent", None, layout.world, {})).ranks[0].value
            processor.append(cpu)
    later = sorted(after - before for before, after in pairwise(processor[1:]))
    return Cost(seconds[0], sorted(seconds[1:])[_LATER // 2], processor[1], later[_LATER // 2], peak)


def main() -> None:
    """Print a table for the docs."""
    print("| ranks | layout | variant | first step s | later step s | processor s, first | later | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for variant, layout in _RUNS:
        cost = measure(variant, layout)
        figures = (cost.first_s, cost.later_s, cost.first_cpu_s, cost.later_cpu_s)
        told = " | ".join(f"{figure:.2f}" for figure in figures)
        print(f"| {layout.world} | {layout.name} | {variant} | {told} | {cost.peak_mib:.0f} |", flush=True)


if __name__ == "__main__":
    main()
