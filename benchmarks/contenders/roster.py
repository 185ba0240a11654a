"""Which contenders there are and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """One way to run the cases.

    Attributes:
        name: For options and JSON.
        title: For tables.
        command: The command for a number of ranks.
        slow: Needs seconds for each case, and so is given few.
        environment: Variables for the command.
    """

    name: str
    title: str
    command: Callable[[int], list[str]]
    slow: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _torchrun(world: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]


def _pytest(file: str) -> list[str]:
    # The same configuration for all, so that none pays for this project's own.
    return ["pytest", "-q", "-c", str(_HERE / "pytest.ini"), "--rootdir", str(_HERE.parent.parent), str(_HERE / file)]


BARE = Contender("bare", "bare torchrun loop, no framework", lambda world: [*_torchrun(world), str(_HERE / "bare.py")])
ENGINE = Contender("engine", "this engine in pytest", lambda _: [sys.executable, "-m", *_pytest("engine_in_pytest.py")])
BLIND = replace(
    ENGINE,
    name="engine-blind",
    title="the same without its ledger",
    environment={"ENGINE_BENCHMARK_PRELOAD": "benchmarks.contenders.without_ledger"},
)
CONTINUOUS = Contender(
    "continuous", "MultiProcContinuousTest", lambda _: [sys.executable, "-m", *_pytest("continuous.py")]
)
# It leaves torch as many threads for each rank as there are cores, which on few cores is most of its time.
CONTINUOUS_1 = replace(
    CONTINUOUS,
    name="continuous-1",
    title="the same, OMP_NUM_THREADS=1 set by hand",
    environment={"OMP_NUM_THREADS": "1"},
)
SPAWNED = Contender(
    "spawned", "MultiProcessTestCase", lambda _: [sys.executable, "-m", *_pytest("spawned.py")], slow=True
)
GROUP_PER_TEST = Contender(
    "group-per-test",
    "torchrun -m pytest, a group per test",
    lambda world: [*_torchrun(world), "-m", *_pytest("group_per_test.py")],
)

CONTENDERS = (BARE, ENGINE, BLIND, GROUP_PER_TEST, CONTINUOUS, CONTINUOUS_1, SPAWNED)
