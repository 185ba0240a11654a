"""For each planted bug and requirement, the case that it names, and a second one in which it is detected as well.

A bug that one case alone detects is detected by luck. The second cases are stored; tools/second_cases.py finds them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from moe_conformance.backends.native import Native
from moe_conformance.workloads import scripts
from self_tests.planted_bugs import Expectation, Plant, plants

FILE = Path(__file__).with_suffix(".toml")

Place = tuple[str, str, str]  # variant, layout, workload


def variant_for(plant: Plant, expected: Expectation) -> str:
    """Return the variant with which a plant is tried: the suite asks no other for what variants have in common."""
    return Native.variants[0] if expected.workload in _once() else plant.variant


def trials() -> dict[str, tuple[Plant, Expectation]]:
    """Return every expectation for which something runs, by a name such as `swapped-sources EXCH-01 even`."""
    expected = [(plant, each) for plant in plants() for each in plant.expects if each.workload]
    return {f"{plant.name} {each.requirement} {each.workload}": (plant, each) for plant, each in expected}


def declared() -> dict[str, Place]:
    """Return the case that each trial names."""
    return {
        name: (variant_for(plant, each), plant.layout.name, each.workload) for name, (plant, each) in trials().items()
    }


def second() -> dict[str, Place]:
    """Return each trial's second case; none of a trial that has none."""
    found: dict[str, list[str]] = _stored()["second"]
    return {name: (variant, layout, workload) for name, (variant, layout, workload) in found.items()}


def alone() -> dict[str, str]:
    """Return the trials that no second case is known to detect, and how far it was looked for."""
    return dict(_stored()["alone"])


@cache
def _once() -> frozenset[str]:
    return frozenset(name for chapter in scripts.CHAPTERS if chapter.variants == "first" for name in chapter.names)


@cache
def _stored() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"second": {}, "alone": {}}
