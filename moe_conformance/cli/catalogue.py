"""The lines of `list`: requirements, checks, backends and whether they can run here, surfaces, pairs of options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc, isfunction

from moe_conformance import spec
from moe_conformance.backends import registry
from moe_conformance.cli import explaining
from moe_conformance.discovery import CHECKS, modules
from moe_conformance.plugin.options import Unusable
from moe_conformance.plugin.run import open_backend
from moe_conformance.spec.checks import checks
from moe_conformance.spec.places import Places, checked
from moe_conformance.workloads.pairs import measure
from moe_conformance.workloads.plan import Plan


@dataclass(frozen=True)
class Found:
    """A registered backend: its versions and variants, or the reason why it cannot run here."""

    name: str
    versions: Mapping[str, str]
    variants: tuple[str, ...]
    problem: str | None = None


def backends() -> list[Found]:
    """Return every registered backend."""
    found = []
    for name in registry.names():
        try:
            backend, versions = open_backend(name)
        except Unusable as error:
            found.append(Found(name, {}, (), str(error)))
        else:
            found.append(Found(name, versions, tuple(backend.variants)))
    return found


def backend_lines(importable: bool) -> Iterator[str]:
    """Yield a line per backend; with `importable` only the names of those that can run here."""
    for backend in backends():
        if importable:
            if backend.problem is None:
                yield backend.name
        elif backend.problem is None:
            versions = " ".join(f"{name} {version}" for name, version in backend.versions.items())
            yield f"{backend.name}: {versions}; variants {', '.join(backend.variants)}"
        else:
            yield f"{backend.name}: {backend.problem}"


def requirement_lines() -> Iterator[str]:
    """Yield a line per requirement with level and profile; the profile is in brackets if no check decides it yet."""
    yield from map(_line, spec.load().values())


def native_only_lines() -> Iterator[str]:
    """Yield a line per requirement that only native was judged by, the reason, and a last line with their number."""
    found = explaining.native_only()
    for id in found:
        requirement = spec.load()[id]
        yield _line(requirement)
        yield f"{'':8}  {requirement.without_library or 'no reason given'}"
    places = Places()
    judged = sum(1 for id in spec.load() if explaining.libraries(id) or explaining.detected(id, places))
    yield f"{len(found)} requirements are judged on native alone, {judged} in a real library as well"


def _line(requirement: spec.Requirement) -> str:
    profile = f"({requirement.profile})" if requirement.id not in checked() else requirement.profile
    return f"{requirement.id:8}  {requirement.level:6}  {profile:9}  {requirement.sentence}"


def check_lines() -> Iterator[str]:
    """Yield a line per check."""
    for check in checks():
        name = check.name.replace(".", "::")
        yield f"{CHECKS}.{check.file}::{name}  {', '.join(check.requirements)}  ({check.run})"


def surface_lines() -> Iterator[str]:
    """Yield a line per method of `Session` that a chapter adds: its name, the chapter, and what it builds."""
    for module in modules("surface"):
        for name, method in vars(vars(module).get("SessionPart", object)).items():
            if isfunction(method):
                summary = cleandoc(method.__doc__ or "").partition("\n")[0]
                yield f"{name:20}  {module.__name__.split('.')[2]:20}  {summary}"


def pair_lines(surface: str | None) -> Iterator[str]:
    """Yield the table of pairs of options on native, or the options, values and rules of one surface.

    Raises:
        LookupError: no surface has that name.
    """
    if surface is None:
        yield from measure.lines(Plan(registry.load("native"), "cpu", "quick"))
    else:
        yield from measure.described(surface)
