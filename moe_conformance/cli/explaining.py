"""What the suite holds about one requirement, as `moe-conformance explain ID` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_conformance import spec
from moe_conformance.spec.places import Place, Places


def explain(id: str, places: Places) -> Iterator[str]:
    """Yield the lines about a requirement: what the spec says, and where each part of the repository holds it.

    Raises:
        KeyError: there is no such requirement.
    """
    requirement = spec.load()[id]
    yield f"{id} ({requirement.level}, chapter {requirement.chapter}, profile {requirement.profile})"
    yield f"  {requirement.sentence}"
    yield f"  formula:    {requirement.formula}"
    yield f"  degenerate: {requirement.degenerate}"
    yield f"  source:     {requirement.source}"
    yield from _part("checks", places.checks(id), "no check yet")
    yield from _part("oracles", places.oracles(id), requirement.without_oracle or "none that a check reaches")
    yield from _part("native", places.native(id), requirement.without_native or "no line says `Implements:`")
    yield from _part("planted bugs", places.plants(id), "none")
    yield from _part("findings in real libraries", places.findings(id), "none")
    yield from _part("waivers", places.waivers(id), "none")


def _part(title: str, found: Sequence[Place], absent: str) -> Iterator[str]:
    yield f"{title}:" + ("" if found else f" {absent}")
    for each in found:
        yield f"  {each}" + (f"  {each.text}" if each.text else "")
