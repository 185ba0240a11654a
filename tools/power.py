"""Measure which planted bugs each case detects, and store the order of power: `python -m tools.power`.

A matrix of planted bugs and cases is stored in self_tests/workloads/power.toml. What a bug expects, and its second case
(tools/second_cases.py), are known from the start. Beyond these each bug runs on the cases on which bugs in the same
class of native are detected, those first that come first in the order, and every check that reads the case judges it.
Two kinds are left out, so that what is stored is the least that is detected: bugs that hang or end ranks run nowhere
else, and checks that compare a case with equivalent runs are not asked. What is not known counts as not detected.

The order is greedy: next comes what detects most bugs, of those that nothing before detects, for its seconds. Those of
a case are those of its runs: its own and the equivalent ones that its checks ask for, which `--report DIR` counts in a
report of native's quick profile. What a run on so many ranks takes is a figure below; by these the whole profile takes
what it takes on two processors that have nothing else to do, the start aside.

A run that was ended, or stopped by `--limit SECONDS`, goes on from where it was. `--limit 0` runs nothing and stores
the order anew.
"""

from __future__ import annotations

import argparse
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
from moe_conformance.spec.checks import Check, checks
from moe_conformance.waiving import only_should
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.selection.power import FILE as ORDER
from moe_conformance.workloads.selection.power import Place
from self_tests.checks import judge
from self_tests.planted_bugs import Plant
from self_tests.workloads.second_cases import declared, expectations, second
from tools.select_cases import place_of, reported

MATRIX = Path(__file__).parents[1] / "self_tests" / "workloads" / "power.toml"
_NO_REPORT = "# 0.000: no report was read of the case; one run is assumed."
SMOKE_S = 6.0  # by the figures below; measured, with judging and the drawing of workloads, it is ten
_DEADLINE_S = 20.0
_CASES = 10  # beyond those that are known, for one bug
_RUN_S, _RUN_OF_FOUR_S = {"single": 0.015, "ep2": 0.022}, 0.036  # by layout


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

        seconds = zip(places, stored["seconds"].values(), strict=True)
        return cls({place: each for place, each in seconds if each}, rows(stored["detected"]), rows(stored["missed"]))

    def store(self) -> None:
        """Write the file; rows hold the numbers of cases, counted from 0. Cases that no report tells of have 0.0 s."""
        places = sorted(_union(self.detected) | _union(self.missed))
        numbers = {place: number for number, place in enumerate(places)}
        lines = [
            "# Which planted bugs cases detect: rows of numbers of cases. Written by tools/power.py.",
            _NO_REPORT,
            "",
        ]
        lines += ["[seconds]", *(f'"{" ".join(each)}" = {self.seconds.get(each, 0.0):.3f}' for each in places)]
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
        """Return the seconds of a case; of one that no report was read of, those of one run."""
        return self.seconds.get(place) or run_seconds(place)

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


def run_seconds(place: Place) -> float:
    """Return what one run takes on the ranks of a case's layout."""
    return _RUN_S.get(place[1], _RUN_OF_FOUR_S)


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


def latest(matrix: Matrix, order: Mapping[Place, int]) -> list[str]:
    """Return the names of bugs, those first that the order detects last: of these it says most where else they are."""

    def first(name: str) -> int:
        return min((order[place] for place in matrix.detected[name] if place in order), default=len(order))

    return sorted(quick_plants(), key=first, reverse=True)


# ---- trying ----------------------------------------------------------------------------------------------------------


@dataclass
class Trials:
    """Runs planted bugs on cases of the quick profile."""

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
    own = {"outcome", "reading", "tally"}
    return tuple((check, only_should(check.requirements)) for check in checks() if check.arguments <= own)


def counted(folder: Path) -> dict[Place, float]:
    """Return the seconds of all cases of a report: those of a run, times the runs that are reported of the case."""
    runs: dict[Place, int] = defaultdict(int)
    for ran in reported(folder):
        runs[ran.place] += ran.runs
    return {place: count * run_seconds(place) for place, count in runs.items() if count}


# ---- the tool --------------------------------------------------------------------------------------------------------


def measure(matrix: Matrix, until: float) -> bool:
    """Run what is not known yet, storing the matrix now and then; return whether it came to an end in time."""
    if time.monotonic() > until:
        return False
    alike: dict[str, set[Place]] = defaultdict(set)
    for name, places in known().items():
        alike[changed(quick_plants()[name])] |= places
    order = {place: number for number, place in enumerate(matrix.order())}
    with Engine(preload=("moe_conformance.scenarios.moe_step", "self_tests.planted_bugs")) as engine:
        trials = Trials(engine)
        asked = [(name, some) for name in latest(matrix, order) if (some := to_try(matrix, name, alike, order))]
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
    parser.add_argument("--report", type=Path, help="folder of a report of native's quick profile on 4 ranks")
    given = parser.parse_args()
    until = time.monotonic() + given.limit
    torch.set_num_threads(1)  # as in a run
    matrix = Matrix.read()
    running = {place_of(case) for case in Plan(Native(), "cpu", "quick").cases}
    for rows in (matrix.detected, matrix.missed):
        for gone in rows.keys() - quick_plants().keys():
            del rows[gone]
        for row in rows.values():
            row &= running
    for name, places in known().items():
        matrix.detected.setdefault(name, set()).update(places)
        matrix.missed.get(name, set()).difference_update(places)
    if given.report:
        matrix.seconds = counted(given.report)
    whole = measure(matrix, until)
    matrix.store()
    store_order(matrix)
    print("all was tried" if whole else "more is to be tried: run it again")


if __name__ == "__main__":
    main()
