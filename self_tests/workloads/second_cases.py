"""For each planted bug and requirement, the case that it names, and a second one in which it is detected as well.

A bug that one case alone detects is detected by luck. The second cases are stored; tools/second_cases.py finds them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from moe_conformance.backends.native import Native
from moe_conformance.spec import load
from moe_conformance.workloads.plan import Plan
from self_tests.checked_runs import EXPECTED, variant_for
from self_tests.planted_bugs import Expectation, Plant

FILE = Path(__file__).with_suffix(".toml")
NOT_YET = "not looked for yet"

Place = tuple[str, str, str]  # variant, layout, workload


@cache
def expectations() -> dict[str, tuple[Plant, Expectation]]:
    """Return every expectation whose case the quick profile could run.

    By a name such as `swapped-sources EXCH-01 even`.
    """
    plan = Plan(Native(), "cpu", "quick")
    quick = {(case.cell.variant, case.cell.layout.name, case.workload.name) for case in plan.pool}
    return {
        f"{plant.name} {each.requirement} {each.workload}": (plant, each)
        for plant, each in EXPECTED
        if load()[each.requirement].profile == "quick" and _case(plant, each) in quick
    }


def declared() -> dict[str, Place]:
    """Return the case that each expectation names."""
    return {name: _case(plant, each) for name, (plant, each) in expectations().items()}


def _case(plant: Plant, expected: Expectation) -> Place:
    return variant_for(plant, expected), plant.layout.name, expected.workload


def second() -> dict[str, Place]:
    """Return each expectation's second case; none of an expectation that has none."""
    found: dict[str, list[str]] = _stored()["second"]
    return {name: (variant, layout, workload) for name, (variant, layout, workload) in found.items()}


def alone() -> dict[str, str]:
    """Return the expectations that no second case is known to detect, and how far it was looked for."""
    return dict(_stored()["alone"])


@cache
def _stored() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"second": {}, "alone": {}}
