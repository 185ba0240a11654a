"""Find for every planted bug a second case that detects it: `python -m tools.second_cases [--journal FILE]`.

Each bug that has none yet is run on the selected cases that a check of its requirement reads, until one other than its
own detects it. Where none does, cases that are left out are tried, and what detects it there is to be selected: run
tools/select_cases.py afterwards, which adds it. Takes about half an hour for all bugs. What is found is noted in the
journal at once, and a run that was ended goes on from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from moe_conformance import shards
from moe_conformance.backends.native import Native
from moe_conformance.engine import Engine
from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plan import Case, Plan
from moe_conformance.plugin.trial import refusal_of
from self_tests.checks import checks
from self_tests.planted_bugs import Expectation, Plant
from self_tests.planted_bugs.second_cases import FILE, Place, declared, second, trials
from self_tests.test_planted_bugs import Court
from tools.select_cases import open_cases, place_of

_ELSEWHERE = 4  # other workloads to try on the layout of a bug before its own workload on other layouts
_SELECTED, _LEFT_OUT = 30, 30  # cases to try for one bug


def detects(court: Court, plant: Plant, expected: Expectation, case: Case) -> bool:
    """Return whether a check of the requirement refuses what a planted bug does in a case."""
    asked = plant.backend, case.cell.variant, case.cell.layout, case.workload.name
    verdicts = court.verdicts(asked[0], expected.requirement, *asked[1:])
    return refusal_of(court.outcomes[asked]) is None and any(isinstance(each, Mismatch) for each in verdicts)


def in_order(cases: Sequence[Case], own: Place) -> list[Case]:
    """Return cases, the likeliest first to detect a bug that its own case detects: names that are alike, small worlds.

    A few other workloads on its own layout come before its own workload elsewhere: they say more.
    """

    def unlike(case: Case) -> tuple[float, bool, int]:
        alike = SequenceMatcher(None, case.workload.name, own[2], autojunk=False).ratio()
        return -alike, case.cell.layout.name != own[1], case.cell.layout.world

    ordered = sorted(cases, key=unlike)
    first = [case for case in ordered if case.cell.layout.name == own[1]][:_ELSEWHERE]
    taken = {case.id for case in first}
    return [*first, *(case for case in ordered if case.id not in taken)]


def look(court: Court, plan: Plan, plant: Plant, expected: Expectation, own: Place) -> tuple[Place | None, int]:
    """Return a second case that detects a bug, or None, and how many were tried."""
    asked = checks()[expected.requirement]
    cases = [case for case in open_cases(plan) if case.cell.variant == own[0] and place_of(case) != own]
    read = [case for case in cases if any(check.reads(case.workload) for check in asked)]
    chosen = in_order([case for case in read if plan.selected(case)], own)
    others = in_order([case for case in read if not plan.selected(case)], own)
    tried = 0
    for case in (*chosen[:_SELECTED], *others[:_LEFT_OUT]):
        tried += 1
        if detects(court, plant, expected, case):
            return place_of(case), tried
    return None, tried


def store(found: dict[str, Place], alone: dict[str, str]) -> None:
    """Write the file that self_tests/planted_bugs/second_cases.py reads."""
    lines = ["# A second case that detects each planted bug. Written by tools/second_cases.py.", "", "[second]"]
    lines += [f'"{name}" = {json.dumps(list(place))}' for name, place in sorted(found.items())]
    lines += ["", "# No other case that was tried detects these.", "[alone]"]
    lines += [f'"{name}" = "{why}"' for name, why in sorted(alone.items())]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Look for what is missing, and store all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, default=Path(".report/second_cases.jsonl"))
    parser.add_argument("--part", type=shards.parse, default="1/1", metavar="I/N", help="of the bugs; needs a journal")
    journal, part = vars(parser.parse_args()).values()
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.touch()
    noted = {entry["trial"]: entry for entry in map(json.loads, journal.read_text(encoding="utf-8").splitlines())}
    plan, own, known = Plan(Native(), "cpu", "quick"), declared(), second()
    with Engine(preload=("moe_conformance.scenarios.moe_step", "self_tests.planted_bugs")) as engine:
        court, last = Court(engine), ""
        for number, (name, (plant, expected)) in enumerate(trials().items()):
            if name in noted or name in known or number * part.count // len(own) != part.index - 1:
                continue
            if plant.backend != last:
                court.outcomes.clear()
                last = plant.backend
            place, tried = look(court, plan, plant, expected, own[name])
            noted[name] = {"trial": name, "place": place, "tried": tried}
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(noted[name]) + "\n")
    found = known | {name: entry["place"] for name, entry in noted.items() if entry["place"] and name in own}
    alone = {name: f"{e['tried']} tried" for name, e in noted.items() if not e["place"] and name in own}
    store({name: place for name, place in found.items() if name in own}, alone)
    print(f"{len(found)} of {len(own)} have a second case; alone: {', '.join(alone) or 'none'}")


if __name__ == "__main__":
    main()
