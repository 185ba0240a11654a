"""The dated bugs of real libraries as a page of the site.

For each bug the planted ones that re-create its mechanism, with what detects them; and those that are not planted, each
with the reason, from self_tests/planted_bugs/not_planted.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from self_tests.planted_bugs import Plant, plants, plants_of_many_ranks

NOT_PLANTED = Path(__file__).parents[1] / "self_tests" / "planted_bugs" / "not_planted.toml"
FIELDS = {"project", "reference", "bug", "reason"}

_HEAD = """# Planted bugs by their source

Bugs of real libraries whose mechanism is planted into native, by project and reference; other planted bugs are of known
classes. `moe-conformance run --plant NAME` runs one.

| source | planted bugs | detected under |
|---|---|---|
"""
_OTHERS = """
## Not planted

| source | bug | why not |
|---|---|---|
"""


def page() -> str:
    """Return the page of plants that have a source, and of bugs that are not planted."""
    by_source: dict[str, list[Plant]] = {}
    for plant in (*plants(), *plants_of_many_ranks()):
        for source in filter(None, plant.real.split("; ")):
            by_source.setdefault(source, []).append(plant)
    rows = []
    for source, own in sorted(by_source.items()):
        names = ", ".join(f"`{plant.name}`" for plant in sorted(own, key=lambda plant: plant.name))
        ids = ", ".join(sorted({expected.requirement for plant in own for expected in plant.expects}))
        rows.append(f"| {source} | {names} | {ids} |\n")
    others = [f"| {bug['project']} {bug['reference']} | {bug['bug']} | {bug['reason']} |\n" for bug in not_planted()]
    return _HEAD + "".join(rows) + _OTHERS + "".join(sorted(others))


def not_planted() -> Sequence[Mapping[str, str]]:
    """Return the bugs that are not planted, with their reasons."""
    entries: Sequence[Mapping[str, str]] = tomllib.loads(NOT_PLANTED.read_text(encoding="utf-8"))["bug"]
    return entries
