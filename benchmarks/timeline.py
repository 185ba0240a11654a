"""What a contender is asked, and how it tells its verdicts: by its environment, and by lines in a file.

A line is `number passed monotonic-nanoseconds`; the clock is the machine's, the same in all processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cases

_PREFIX = "ENGINE_BENCHMARK_"


@dataclass(frozen=True)
class Assignment:
    """What one run of a contender is asked for.

    Attributes:
        world: The number of ranks.
        count: The number of cases, 0 to count - 1.
        broken: The case that has a bug planted; -1 for none.
        path: The file for verdicts.
    """

    world: int
    count: int
    broken: int
    path: str

    def environment(self) -> dict[str, str]:
        """Returns the variables by which `assigned` finds this again in the contender's processes."""
        return {
            f"{_PREFIX}WORLD": str(self.world),
            f"{_PREFIX}COUNT": str(self.count),
            f"{_PREFIX}BROKEN": str(self.broken),
            f"{_PREFIX}PATH": self.path,
        }

    def case(self, number: int) -> cases.Case:
        """Returns one of the cases."""
        return cases.make(number, self.world, broken=number == self.broken)

    def judge(self, number: int, outcomes: Sequence[cases.Outcome]) -> None:
        """Judges a case and writes the verdict down.

        Raises:
            AssertionError: the outcomes are wrong.
        """
        passed = False
        try:
            cases.judge(self.case(number), outcomes)
            passed = True
        finally:
            with open(self.path, "a") as file:
                file.write(f"{number} {int(passed)} {time.monotonic_ns()}\n")


@dataclass(frozen=True)
class Verdict:
    """One line of the file, `seconds` on the monotonic clock."""

    number: int
    passed: bool
    seconds: float


def assigned() -> Assignment:
    """Returns what this contender's process is asked for."""
    world, count, broken = (int(os.environ[f"{_PREFIX}{name}"]) for name in ("WORLD", "COUNT", "BROKEN"))
    return Assignment(world, count, broken, os.environ[f"{_PREFIX}PATH"])


def read(path: Path) -> list[Verdict]:
    """Returns the verdicts written so far, in order."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [Verdict(int(number), passed == "1", int(at) / 1e9) for number, passed, at in lines]
