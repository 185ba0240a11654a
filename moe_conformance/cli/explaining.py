"""The lines of `moe-conformance explain ID`: what the suite has for one requirement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_conformance import spec
from moe_conformance.report import floor_file
from moe_conformance.report.floor import Floor
from moe_conformance.spec.places import Place, Places
from moe_conformance.waiving import file as waivers
from moe_conformance.waiving.records import fits

_EMBEDDED = "native"  # every other floor is that of a real library


@dataclass(frozen=True)
class Judged:
    """A backend that was judged by a requirement: the variants that pass, and the waivers of known failures."""

    backend: str
    versions: tuple[str, ...]  # of its floor: "megatron-core 0.19.2", "torch 2.13.0"
    variants: tuple[str, ...]  # those that pass on some layout
    waived: tuple[str, ...]  # ids of waivers
    found: tuple[str, ...] = ()  # ids of findings that no waiver is of: a declared limit, or a SHOULD

    def __str__(self) -> str:
        """`torchtitan 0.3.0, torch 2.13.0: passes with local, alltoall; known failures TT-01`."""
        known = [f"passes with {', '.join(self.variants)}"] if self.variants else []
        known += [f"known failures {', '.join(self.waived)}"] if self.waived else []
        known += [f"fails by {', '.join(self.found)}"] if self.found else []
        return f"{', '.join(self.versions) or self.backend}: {'; '.join(known)}"


def explain(id: str, places: Places) -> Iterator[str]:
    """Yield the lines about a requirement: its entry in the spec, and its places in the repository.

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
    yield from _part("oracles", places.oracles(id), requirement.without_oracle or "none whose result a check compares")
    yield from _part("native", places.native(id), requirement.without_native or "no line says `Implements:`")
    yield from _part("planted bugs", places.plants(id), "none")
    judged = (*libraries(id), *detected(id, places))
    yield from _part("judged in real libraries", judged, requirement.without_library or "in none yet")
    yield from _part("findings in real libraries", places.findings(id), "none")
    yield from _part("waivers", places.waivers(id), "none")


def libraries(id: str) -> tuple[Judged, ...]:
    """Return the real libraries that were judged by a requirement, from their floors and waivers."""
    return tuple(
        judged
        for backend in floor_file.backends()
        if backend != _EMBEDDED
        for held in _floors(backend)
        if (judged := _judged(backend, held, id)) is not None
    )


def detected(id: str, places: Places) -> tuple[Judged, ...]:
    """Return the real libraries in which a check of a requirement detected a finding without a waiver of it.

    A limit is declared, and a SHOULD needs no waiver: their findings are all that there is of the judgement.
    """
    waived = {waiver for judged in libraries(id) for waiver in judged.waived}
    by_backend: dict[str, list[str]] = {}
    for place in places.detected(id):
        if place.name not in waived:
            by_backend.setdefault(place.path.stem, []).append(place.name)
    return tuple(Judged(backend, (), (), (), tuple(found)) for backend, found in by_backend.items())


def native_only() -> tuple[str, ...]:
    """Return the requirements that native passes and that no real library was judged by, in the spec's order."""
    places = Places()
    return tuple(id for id in spec.load() if _passed_by_native(id) and not libraries(id) and not detected(id, places))


def _passed_by_native(id: str) -> bool:
    return any(_judged(_EMBEDDED, held, id) is not None for held in _floors(_EMBEDDED))


def _judged(backend: str, held: Floor, id: str) -> Judged | None:
    variants = tuple(sorted({variant for requirement, variant, _ in held.places if requirement == id}))
    waived = tuple(waiver for waiver, patterns in _waived(backend, held.path) if fits(patterns, id))
    if not variants and not waived:
        return None
    return Judged(backend, tuple(f"{name} {version}" for name, version in held.versions.items()), variants, waived)


@cache
def _floors(backend: str) -> tuple[Floor, ...]:
    return floor_file.of_backend(backend)


@cache
def _waived(backend: str, path_of_floor: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the ids of a backend's waivers for the versions of a floor, with the requirements that they name."""
    path = waivers.path_for(backend, "")
    return () if path is None else waivers.ids_in(path, floor_file.read(path_of_floor).versions)


def _part(title: str, found: Sequence[Place | Judged], absent: str) -> Iterator[str]:
    yield f"{title}:" + ("" if found else f" {absent}")
    for place in found:
        text = place.text if isinstance(place, Place) else ""
        yield f"  {place}" + (f"  {text}" if text else "")
