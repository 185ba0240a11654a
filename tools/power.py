"""Measure which planted bugs each case detects, and store the order of power: `python -m tools.power`.

A matrix of planted bugs and cases is stored in self_tests/workloads/power.toml. What a bug expects, and its second case
(tools/second_cases.py), are known from the start. Beyond these each bug runs on the cases on which bugs in the same
class of native are detected, those first that come first in the order, and every check that reads the case judges it.
Two kinds are left out, so that what is stored is the least that is detected: bugs that hang or end ranks run nowhere
else, and checks that compare a case with equivalent runs are not asked. What is not known counts as not detected.

The order is greedy: next comes what detects most bugs, of those that nothing before detects, for its seconds. Seconds
of a case are half of the processor time that native's ranks and the checks take: there are two processors.

A run that was ended, or stopped by `--limit SECONDS`, goes on from where it was. `--order` measures nothing and stores
the order anew.
"""

from __future__ import annotations

import argparse
import os
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from moe_conformance.backends.native import Native
from moe_conformance.engine import Engine
from moe_conformance.judging.verdict import Mismatch, NotOffered
from moe_conformance.reproducing.examining import refusal_of
from moe_conformance.scenarios.moe_step import Step, start_many
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.waiving import only_should
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.selection.power import FILE as ORDER
from moe_conformance.workloads.selection.power import Place
from self_tests.checks import Check, checks, judge
from self_tests.planted_bugs import Plant
from self_tests.workloads.second_cases import declared, expectations, second
from tools.select_cases import place_of

MATRIX = Path(__file__).parents[1] / "self_tests" / "workloads" / "power.toml"
SMOKE_S = 10.0
_NATIVE = "native"
_DEADLINE_S = 20.0
_CASES = 10  # beyond those that are known, for one bug
_REPEATS = 2  # of a case of native whose seconds are measured
_USUAL_S, _USUAL_OF_MANY_S = {"single": 0.015, "ep2": 0.022}, 0.035
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Matrix:
    """Which planted bugs are detected in which cases, and the seconds of cases."""

    seconds: dict[Place, float] = field(default_factory=dict)
    detected: dict[str, set[Place]] = field(default_factory=dict)  # by name of a planted bug
    missed: dict[str, set[Place]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Matrix:
        """Return what is stored, of bugs and cases that there are; what bugs name themselves is added by `known`."""
        if not MATRIX.is_file():
            return cls()
        stored = tomllib.loads(MATRIX.read_text(encoding="utf-8"))
        places = [_place(each) for each in stored["seconds"]]

        def rows(table: Mapping[str, str]) -> dict[str, set[Place]]:
            return {name: {places[int(number)] for number in row.split()} for name, row in table.items()}

        seconds = dict(zip(places, stored["seconds"].values(), strict=True))
        return cls(seconds, rows(stored["detected"]), rows(stored["missed"]))

    def store(self) -> None:
        """Write the file; rows hold the numbers of cases, counted from 0."""
        places = sorted({*self.seconds, *_union(self.detected), *_union(self.missed)})
        numbers = {place: number for number, place in enumerate(places)}
        lines = ["# Which planted bugs cases detect: rows of numbers of cases. Written by tools/power.py.", ""]
        lines += ["[seconds]", *(f'"{" ".join(each)}" = {self.seconds.get(each, 0.0):.4f}' for each in places)]
        for title, rows in (("detected", self.detected), ("missed", self.missed)):
            lines += ["", f"[{title}]"]
            for name, row in sorted(rows.items()):
                lines.append(f'{name} = "{" ".join(str(number) for number in sorted(map(numbers.__getitem__, row)))}"')
        MATRIX.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def order(self) -> list[Place]:
        """Return the cases that detect what nothing before them does, the most bugs for the seconds first."""
        left = {name for name, row in self.detected.items() if row}
        found: dict[Place, set[str]] = defaultdict(set)
        for name, row in self.detected.items():
            for place in row:
                found[place].add(name)
        ordered: list[Place] = []
        while left:
            best = max(sorted(found), key=lambda place: len(found[place] & left) / self.seconds_of(place))
            left -= found[best]
            ordered.append(best)
        return ordered

    def seconds_of(self, place: Place) -> float:
        """Return the seconds of a case; of one that was not measured, what is usual of its number of ranks."""
        return self.seconds.get(place) or _USUAL_S.get(place[1], _USUAL_OF_MANY_S)

    def within(self, order: Sequence[Place], seconds: float) -> int:
        """Return how many cases of an order fit in that time."""
        taken = 0.0
        for number, place in enumerate(order):
            taken += self.seconds_of(place)
            if taken > seconds:
                return number
        return len(order)

    def share(self, places: Iterable[Place]) -> int:
        """Return how many planted bugs are detected in some of these cases."""
        some = set(places)
        return sum(1 for row in self.detected.values() if row & some)


def _union(rows: Mapping[str, set[Place]]) -> set[Place]:
    return set().union(*rows.values())


def _place(text: str) -> Place:
    variant, layout, name = text.split()
    return variant, layout, name


# ---- what is known, and what is to be tried ------------------------------------------------------------------------


@cache
def quick_plants() -> dict[str, Plant]:
    """Return the planted bugs that a case of the quick profile has to detect, by name."""
    return {plant.name: plant for plant, _ in expectations().values()}


@cache
def only_advised() -> frozenset[str]:
    """Return the names of bugs that violate requirements of the level SHOULD alone."""
    requirements: dict[str, set[str]] = defaultdict(set)
    for plant, expected in expectations().values():
        requirements[plant.name].add(expected.requirement)
    return frozenset(name for name, some in requirements.items() if only_should(some))


@cache
def faulty() -> frozenset[str]:
    """Return the names of bugs that hang or end ranks."""
    return frozenset(plant.name for plant, expected in expectations().values() if expected.stage == "run")


def known() -> dict[str, set[Place]]:
    """Return the cases that each bug names, and its second cases."""
    found: dict[str, set[Place]] = {name: set() for name in quick_plants()}
    for places in (declared(), second()):
        for expectation, place in places.items():
            plant, expected = expectations()[expectation]
            if plant.name in only_advised() or not only_should([expected.requirement]):
                found[plant.name].add(place)
    return found


def changed(plant: Plant) -> str:
    """Return the names of the classes of native in whose place a bug has others."""
    return " ".join(sorted(each.__name__ for each in plant.native.session_class.replaced))


def to_try(matrix: Matrix, name: str, alike: Mapping[str, set[Place]], order: Mapping[Place, int]) -> list[Place]:
    """Return cases on which a bug was not tried and bugs in the same class are detected, in the order of power."""
    if name in faulty():
        return []
    tried = matrix.detected.get(name, set()) | matrix.missed.get(name, set())
    ordered = sorted((place for place in alike[changed(quick_plants()[name])] if place in order), key=order.__getitem__)
    return [place for place in ordered[:_CASES] if place not in tried]


# ---- trying ----------------------------------------------------------------------------------------------------------


@dataclass
class Trials:
    """Runs planted bugs, and native itself, on cases of the quick profile."""

    engine: Engine

    @cached_property
    def cases(self) -> dict[Place, Case]:
        """The cases that run."""
        return {place_of(case): case for case in Plan(Native(), "cpu", "quick").cases}

    def start(self, backend: str, places: Sequence[Place]) -> dict[Place, Step]:
        """Have the ranks of each number begin with cases, all of which they are sent together."""
        by_world: dict[int, list[Place]] = defaultdict(list)
        for place in sorted(places, key=lambda each: each[1]):  # a session lives as long as the layout does
            by_world[self.cases[place].cell.layout.world].append(place)
        steps: dict[Place, Step] = {}
        for some in by_world.values():
            workloads = [self.cases[place].workload for place in some]
            steps |= dict(zip(some, start_many(self.engine, backend, workloads, _DEADLINE_S), strict=True))
        return steps

    def seconds(self, place: Place) -> float:
        """Return half of the processor time that a case takes: that of the ranks and that of the checks."""
        list(self._judged(self.start(_NATIVE, [place])[place].outcome()))
        before = _processor_time()
        for step in [self.start(_NATIVE, [place])[place] for _ in range(_REPEATS)]:
            list(self._judged(step.outcome()))
        return (_processor_time() - before) / _REPEATS / 2

    def detects(self, name: str, step: Step) -> bool:
        """Return whether a check refuses what a bug does in a case."""
        return any(isinstance(each, Mismatch) for each in self._judged(step.outcome(), advice=name in only_advised()))

    def _judged(self, outcome: Outcome, *, advice: bool = True) -> Iterator[object]:
        """Yield what the checks say that need no equivalent runs, those of the level SHOULD for `advice` alone."""
        if refusal_of(outcome) is not None:
            return
        for check, should in alone():
            if check.reads(outcome.workload) and (advice or not should):
                try:
                    yield judge(check, outcome=outcome)
                except NotOffered:
                    continue


@cache
def alone() -> tuple[tuple[Check, bool], ...]:
    """Return each check that needs no equivalent runs, once, and whether it decides a SHOULD alone."""
    found: dict[str, tuple[Check, bool]] = {}
    for some in checks().values():
        for check in some:
            if check.needs() <= {"outcome", "reading", "tally"}:
                function = check.function
                marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "requirement"]
                found[f"{function.__module__}.{function.__qualname__}"] = check, only_should(marks[0].args)
    return tuple(found.values())


def _processor_time() -> float:
    """Return the processor time of this process and all below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])

    def below(process: int) -> bool:
        while process in parents:
            if process == os.getpid():
                return True
            process = parents[process]
        return False

    return sum(used for process, used in ticks.items() if below(process)) * _TICK_S


# ---- the tool --------------------------------------------------------------------------------------------------------


def measure(matrix: Matrix, until: float) -> bool:
    """Run what is not known yet, storing the matrix now and then; return whether it came to an end in time."""
    alike: dict[str, set[Place]] = defaultdict(set)
    for name, places in known().items():
        alike[changed(quick_plants()[name])] |= places
    order = {place: number for number, place in enumerate(matrix.order())}
    with Engine(preload=("moe_conformance.scenarios.moe_step", "self_tests.planted_bugs")) as engine:
        trials = Trials(engine)
        for place in order:
            if place not in matrix.seconds:
                if time.monotonic() > until:
                    return False
                matrix.seconds[place] = trials.seconds(place)
        matrix.store()
        order = {place: number for number, place in enumerate(matrix.order())}
        asked = [(name, some) for name in quick_plants() if (some := to_try(matrix, name, alike, order))]
        ahead: dict[Place, Step] = {}
        for number, (name, some) in enumerate(asked):
            steps = ahead or trials.start(quick_plants()[name].backend, some)
            late = time.monotonic() > until
            ahead = {}
            if number + 1 < len(asked) and not late:  # the ranks run it while this one is judged
                following, others = asked[number + 1]
                ahead = trials.start(quick_plants()[following].backend, others)
            for place, step in steps.items():
                row = matrix.detected if trials.detects(name, step) else matrix.missed
                row.setdefault(name, set()).add(place)
            if late or number % 10 == 0:
                matrix.store()
                print(f"{number + 1} of {len(asked)}: {name}", flush=True)
            if late:
                return False
    return True


def store_order(matrix: Matrix) -> None:
    """Write the order of power, and how much of it the profile smoke runs and detects."""
    order = matrix.order()
    smoke = matrix.within(order, SMOKE_S)
    lines = ["# The order of power. Written by tools/power.py.", ""]
    lines += [f"smoke = {smoke}  # cases that the profile smoke runs", f"detected = {matrix.share(order[:smoke])}"]
    lines += [f"plants = {len(matrix.detected)}", "order = ["]
    lines += [f'    "{" ".join(place)}",' for place in order] + ["]"]
    ORDER.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(order)} cases; smoke: {smoke}, {matrix.share(order[:smoke])} of {len(matrix.detected)} planted bugs")


def main() -> None:
    """Measure what is missing, and store the order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--order", action="store_true", help="measure nothing, and store the order anew")
    given = parser.parse_args()
    until = time.monotonic() + given.limit
    torch.set_num_threads(1)  # as in a run
    matrix = Matrix.read()
    for rows in (matrix.detected, matrix.missed):
        for gone in rows.keys() - quick_plants().keys():
            del rows[gone]
    for name, places in known().items():
        matrix.detected.setdefault(name, set()).update(places)
        matrix.missed.get(name, set()).difference_update(places)
    whole = given.order or measure(matrix, until)
    matrix.store()
    store_order(matrix)
    print("all was tried" if whole else "more is to be tried: run it again")


if __name__ == "__main__":
    main()
