"""Runs all contenders in turn, round after round, so that what else the machine does meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.contenders.roster import BARE, Contender
from benchmarks.contenders.start import ContenderError, start
from benchmarks.timeline import Assignment


@dataclass(frozen=True)
class Sample:
    """One contender in one round."""

    round: int
    world: int
    contender: str
    fixed_s: float
    cases_per_s: float


@dataclass(frozen=True)
class Plan:
    """How much is run: `count` cases each, `slow_count` by a contender that needs seconds for one."""

    rounds: int
    worlds: Sequence[int]
    count: int
    slow_count: int

    def assignment(self, contender: Contender, world: int) -> Assignment:
        """Returns what a contender is asked for."""
        return Assignment(world, self.slow_count if contender.slow else self.count, broken=-1, path="")


def run(plan: Plan, contenders: Sequence[Contender], tell: Callable[[Sample], None]) -> list[Sample]:
    """Runs all rounds; each begins with another contender, and each sample is told as soon as it is there.

    Raises:
        ContenderError: a contender failed or judged a case wrong: then there is no figure.
    """
    samples: list[Sample] = []
    for number in range(plan.rounds):
        shift = number % len(contenders)
        for world in plan.worlds:
            for contender in (*contenders[shift:], *contenders[:shift]):
                timing = start(contender, plan.assignment(contender, world))
                if wrong := [case for case, passed in timing.passed.items() if not passed]:
                    raise ContenderError(f"{contender.name} at {world} ranks: cases {wrong} are wrong")
                sample = Sample(number, world, contender.name, timing.fixed_s, timing.cases_per_s)
                tell(sample)
                samples.append(sample)
    return samples


def of(samples: Sequence[Sample], contender: str, world: int) -> list[Sample]:
    """Returns one contender's samples at one world size, by round."""
    return sorted((s for s in samples if (s.contender, s.world) == (contender, world)), key=lambda s: s.round)


def ratios(samples: Sequence[Sample], contender: str, world: int, base: str = BARE.name) -> list[float]:
    """Returns a contender's rate in units of the rate of `base` in the same round."""
    pairs = zip(of(samples, contender, world), of(samples, base, world), strict=True)
    return [mine.cases_per_s / theirs.cases_per_s for mine, theirs in pairs]
