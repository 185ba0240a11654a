"""What there is to list: requirements, checks, backends and whether they can run here, and surfaces of the contract."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc, isclass, isfunction
from types import ModuleType

from moe_conformance import spec
from moe_conformance.backends import registry
from moe_conformance.cli import explaining
from moe_conformance.discovery import modules
from moe_conformance.plugin import collecting
from moe_conformance.plugin.options import Unusable
from moe_conformance.plugin.run import open_backend
from moe_conformance.spec.places import checked
from moe_conformance.workloads.records.runs import Asked


@dataclass(frozen=True)
class Found:
    """A registered backend: its versions and variants, or the problem that keeps it from running here."""

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
    """Yield a line per backend: the bare names if only the importable are wanted."""
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
    """Yield a line per requirement, with level and profile, the profile in brackets where no check decides it yet."""
    yield from map(_line, spec.load().values())


def native_only_lines() -> Iterator[str]:
    """Yield a line per requirement that native passes and no real library was judged by, and how many these are."""
    found = explaining.native_only()
    yield from (_line(spec.load()[id]) for id in found)
    judged = sum(1 for id in spec.load() if explaining.libraries(id))
    yield f"{len(found)} requirements are judged on native alone, {judged} in a real library as well"


def _line(each: spec.Requirement) -> str:
    profile = f"({each.profile})" if each.id not in checked() else each.profile
    return f"{each.id:8}  {each.level:6}  {profile:9}  {each.sentence}"


@dataclass(frozen=True)
class Check:
    """A check as it stands in its file: where, what it decides, and on which kind of run."""

    module: str
    name: str  # of the function, after its class if it has one: `TestDispatch::test_rows_arrive_unchanged`
    requirements: tuple[str, ...]
    run: Asked


def checks() -> Iterator[Check]:
    """Yield every check."""
    package = importlib.import_module(collecting.PACKAGE)
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("test_"):
            yield from _of_module(importlib.import_module(f"{collecting.PACKAGE}.{info.name}"))


def check_lines() -> Iterator[str]:
    """Yield a line per check."""
    for check in checks():
        yield f"{check.module}::{check.name}  {', '.join(check.requirements)}  ({check.run})"


def surface_lines() -> Iterator[str]:
    """Yield a line per method of `Session` that a chapter adds: its name, the chapter, and what it builds."""
    for module in modules("surface"):
        for name, method in vars(vars(module).get("SessionPart", object)).items():
            if isfunction(method):
                summary = cleandoc(method.__doc__ or "").partition("\n")[0]
                yield f"{name:20}  {module.__name__.split('.')[2]:20}  {summary}"


def _of_module(module: ModuleType) -> Iterator[Check]:
    for holder_name, holder in vars(module).items():
        members = vars(holder).items() if isclass(holder) else [(None, holder)]
        for name, function in members:
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "requirement" and getattr(function, "__module__", None) == module.__name__:
                    where = "::".join(part for part in (holder_name, name) if part)
                    yield Check(module.__name__, where, mark.args, mark.kwargs["run"])
