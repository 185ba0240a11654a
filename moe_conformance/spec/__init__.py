"""The written spec: every requirement has an id, one sentence, a formula, its degenerate cases and a source.

One TOML file per chapter, and unchecked.toml: the requirements that no check decides yet, and what they wait for. A
check cites the requirements it decides with the `requirement` decorator, which refuses an id that the spec does not
have.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from moe_conformance.workloads.records import Workload

Check = TypeVar("Check", bound=Callable[..., Any])

_ID = re.compile(r"[A-Z]+-\d\d")
_PROFILES = ("quick", "full", "virtual")
_UNCHECKED = "unchecked.toml"


class BadSpec(ValueError):
    """A chapter is not well formed; the message names the file, the requirement and the field."""


@dataclass(frozen=True)
class Requirement:
    """One requirement of the spec."""

    id: str  # permanent: PREFIX-nn
    chapter: str  # the name that its oracle, check, implementation and planted bugs share
    level: Literal["MUST", "SHOULD"]
    profile: Literal["quick", "full", "virtual"]  # the smallest in which it is decided
    sentence: str
    formula: str
    degenerate: str  # what holds at zero tokens, one expert, K = E, ...
    source: str
    since: str  # version of the suite that brought it
    waits_for: str = ""  # what has to be there before a check can decide it; "" where one does


@cache
def load() -> Mapping[str, Requirement]:
    """Return all requirements by id, chapters in alphabetical order.

    Raises:
        BadSpec: a field is missing, unknown or of the wrong form, or an id occurs twice.
    """
    found: dict[str, Requirement] = {}
    for path in sorted(files(__package__).iterdir(), key=lambda path: path.name):
        if not path.name.endswith(".toml") or path.name == _UNCHECKED:
            continue
        chapter = path.name.removesuffix(".toml")
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["requirement"]:
            requirement = _parse(chapter, entry)
            if requirement.id in found:
                raise BadSpec(f"{path.name}: {requirement.id} occurs twice")
            found[requirement.id] = requirement
    unchecked = files(__package__).joinpath(_UNCHECKED).read_text(encoding="utf-8")
    return _with_unchecked(found, tomllib.loads(unchecked)["waiting"])


def _with_unchecked(law: Mapping[str, Requirement], waiting: Sequence[Mapping[str, Any]]) -> Mapping[str, Requirement]:
    """Return the spec, with what each requirement without a check waits for."""
    found = dict(law)
    for entry in waiting:
        for each in entry["ids"]:
            if each not in law:
                raise BadSpec(f"{_UNCHECKED}: there is no {each}")
            if found[each].waits_for:
                raise BadSpec(f"{_UNCHECKED}: {each} occurs twice")
            found[each] = replace(found[each], waits_for=entry["waits_for"])
    return found


def _parse(chapter: str, entry: Mapping[str, str]) -> Requirement:
    said = f"{chapter}.toml, {entry.get('id', 'a requirement without id')}"
    wanted = set(Requirement.__dataclass_fields__) - {"chapter", "waits_for"}
    if odd := wanted ^ set(entry):
        raise BadSpec(f"{said}: fields missing or unknown: {', '.join(sorted(odd))}")
    if not _ID.fullmatch(entry["id"]):
        raise BadSpec(f"{said}: an id is PREFIX-nn")
    if entry["level"] not in ("MUST", "SHOULD") or entry["level"] not in entry["sentence"]:
        raise BadSpec(f"{said}: the level is MUST or SHOULD, and the sentence says it")
    if entry["profile"] not in _PROFILES:
        raise BadSpec(f"{said}: the profile is one of {', '.join(_PROFILES)}, not {entry['profile']!r}")
    return Requirement(chapter=chapter, **entry)  # type: ignore[arg-type]  # level and profile were just checked


def requirement(*ids: str, kind: str, when: Callable[[Workload], bool] | None = None) -> Callable[[Check], Check]:
    """Cite the requirements that a check decides, and say on which runs.

    `kind` is the kind of workload that the check reads ("probe", "experts", "route", "groups", or the surface of a
    script), or that it draws itself ("drawn probe", "drawn route"); `when` narrows it to those in which
    the rule can be broken.

    Raises:
        BadSpec: an id is not in the spec.
    """
    import pytest  # only checks need it; the spec can be read without

    if unknown := [each for each in ids if each not in load()]:
        raise BadSpec(f"no requirement {', '.join(unknown)}; known: {', '.join(load())}")

    def mark(check: Check) -> Check:
        marked: Check = pytest.mark.requirement(*ids, kind=kind, when=when)(check)
        return marked

    return mark
