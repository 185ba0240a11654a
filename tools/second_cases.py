"""Find for every planted bug a second case that detects it: `python -m tools.second_cases`.

Each bug that has none yet is run on the selected cases that a check of its requirement reads, until one other than its
own detects it. Where none does, cases that are left out are tried, and what detects it there is to be selected: run
tools/select_cases.py afterwards, which adds it. At last come selected cases of other variants. For all bugs together it
takes long. What is found is stored at once, and a run that was ended goes on from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial

import torch

from moe_conformance.backends import registry
from moe_conformance.backends.native import Native
from moe_conformance.engine import Engine
from moe_conformance.judging.verdict import Mismatch, NotOffered
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.reproducing.examining import refusal_of
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec.checks import by_requirement
from moe_conformance.workloads.plan import Case, Plan
from self_tests.checks import judge
from self_tests.planted_bugs import Plant
from self_tests.workloads.second_cases import FILE, NOT_YET, Place, alone, declared, expectations, second
from tools.select_cases import open_cases, place_of

_ELSEWHERE = 4  # other workloads to try on the layout of a bug before its own workload on other layouts
_DEADLINE_S = 20.0
_SELECTED, _LEFT_OUT, _OTHER_VARIANTS = 30, 30, 10  # cases to try for one bug


@dataclass
class Trial:
    """Runs one planted bug, each case once."""

    engine: Engine
    plant: Plant
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def detects(self, requirement: str, case: Case) -> bool:
        """Return whether a check of the requirement refuses what the bug does in a case."""
        step = partial(moe_step, self.engine, self.plant.backend, deadline_s=_DEADLINE_S)
        if case.id not in self.outcomes:
            self.outcomes[case.id] = step(case.workload)
        outcome = self.outcomes[case.id]
        if refusal_of(outcome) is not None:
            return False
        backend = registry.load(self.plant.backend)
        twins = Twins(backend, "cpu", lambda some: [step(each) for each in some], self.engine.renew)
        asked = [check for check in by_requirement()[requirement] if check.reads(case.workload)]
        try:
            return any(isinstance(judge(check, outcome=outcome, twins=twins), Mismatch) for check in asked)
        except NotOffered:
            return False


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


def look(trial: Trial, plan: Plan, requirement: str, own: Place) -> tuple[Place | None, int]:
    """Return a second case in which a bug is detected, or None, and how many were tried."""
    asked = by_requirement()[requirement]
    cases = [case for case in open_cases(plan) if place_of(case) != own]
    read = [case for case in cases if any(check.reads(case.workload) for check in asked)]
    own_variant = [case for case in read if case.cell.variant == own[0]]
    chosen = in_order([case for case in own_variant if plan.selected(case)], own)
    others = in_order([case for case in own_variant if not plan.selected(case)], own)
    elsewhere = in_order([case for case in read if case.cell.variant != own[0] and plan.selected(case)], own)
    tried = 0
    for case in (*chosen[:_SELECTED], *others[:_LEFT_OUT], *elsewhere[:_OTHER_VARIANTS]):
        tried += 1
        if trial.detects(requirement, case):
            return place_of(case), tried
    return None, tried


def store(found: Mapping[str, Place], alone: Mapping[str, str]) -> None:
    """Write the file that self_tests/workloads/second_cases.py reads, without expectations that are gone."""
    known = expectations()
    lines = ["# A second case that detects each planted bug. Written by tools/second_cases.py.", "", "[second]"]
    lines += [f'"{name}" = {json.dumps(list(place))}' for name, place in sorted(found.items()) if name in known]
    lines += ["", "# Those that no other case is known to detect.", "[alone]"]
    lines += [f'"{name}" = "{why}"' for name, why in sorted(alone.items()) if name in known]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Look for what is missing, and store each as it is found."""
    torch.set_num_threads(1)  # drawing asks small oracles, which take longer on several
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plan, own, found, without = Plan(Native(), "cpu", "quick"), declared(), second(), alone()
    without |= {name: NOT_YET for name in own if name not in found and name not in without}
    trial: Trial | None = None
    with Engine(preload=("moe_conformance.scenarios.moe_step", "self_tests.planted_bugs")) as engine:
        for name, (plant, expected) in expectations().items():
            if without.get(name) != NOT_YET:
                continue
            if trial is None or trial.plant != plant:
                trial = Trial(engine, plant)
            place, tried = look(trial, plan, expected.requirement, own[name])
            without[name] = f"{tried} tried"
            if place:
                found[name] = place
                del without[name]
            store(found, without)
    store(found, without)
    print(f"{len(found)} of {len(own)} have a second case; alone: {', '.join(without) or 'none'}")


if __name__ == "__main__":
    main()
