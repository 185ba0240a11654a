"""The spec: every requirement has an id, one sentence, a formula, its degenerate cases and a source.

Each chapter has a file, chapters/<chapter>/spec.toml; requirements that differ in one condition are rows of a table,
which has their common fields. A check cites the requirements that it decides, as a `Row` or with the `requirement`
decorator, which refuse an id that the spec does not have. Requirements that have a check are found by `places`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moe_conformance.discovery import FOLDER, chapters

if TYPE_CHECKING:
    import pytest

    from moe_conformance.workloads.records.runs import RunSpec
    from moe_conformance.workloads.records.workload import Workload

Check = TypeVar("Check", bound=Callable[..., Any])

_ID = re.compile(r"[A-Z]+-\d\d")
_PROFILES = ("quick", "full", "virtual")
_REASONS = ("without_check", "without_oracle", "without_native", "without_library")  # given where they are not ""


class BadSpec(ValueError):
    """A chapter is not well formed; the message names the file, the requirement and the field."""


@dataclass(frozen=True)
class Requirement:
    """One requirement of the spec."""

    id: str  # permanent: PREFIX-nn
    chapter: str  # the folder of its oracle, check, implementation and planted bugs
    level: Literal["MUST", "SHOULD"]
    profile: Literal["quick", "full", "virtual"]  # the smallest profile that decides it
    sentence: str
    formula: str
    degenerate: str  # what holds at zero tokens, one expert, K = E, ...
    source: str
    since: str  # version of the suite that added it
    without_check: str = ""  # why no check can decide it here; "" if one does or will
    without_oracle: str = ""  # why there is no correct result to compute; "" if an oracle computes it
    without_native: str = ""  # why no line of native implements it; "" if one does
    without_library: str = ""  # why no real library could be judged by it; "" if one was, or will be


@cache
def load() -> Mapping[str, Requirement]:
    """Return all requirements by id, chapters in alphabetical order.

    Raises:
        BadSpec: a field is missing, unknown or of the wrong form, or an id occurs twice.
    """
    found: dict[str, Requirement] = {}
    for chapter in chapters():
        content = tomllib.loads((FOLDER / chapter / "spec.toml").read_text(encoding="utf-8"))
        rows = [_row(table, row) for table in content.get("table", ()) for row in table["row"]]
        for entry in sorted([*content["requirement"], *rows], key=lambda entry: str(entry.get("id", ""))):
            requirement = _parse(chapter, entry)
            if requirement.id in found:
                raise BadSpec(f"{chapter}: {requirement.id} occurs twice")
            found[requirement.id] = requirement
    return found


def _row(table: Mapping[str, Any], row: Mapping[str, str]) -> Mapping[str, str]:
    """Return the requirement of a row: the fields of its table, in which `{name}` is the row's `name`."""
    shared = {field: text for field, text in table.items() if field != "row"}
    try:
        filled = {field: text if field in row else text.format_map(row) for field, text in shared.items()}
    except KeyError as missing:
        raise BadSpec(f"{row.get('id', 'a row without id')}: its table asks for {missing}, which it lacks") from None
    words = {name for text in shared.values() for name in re.findall(r"{(\w+)}", text)}
    return {**filled, **{field: text for field, text in row.items() if field not in words}}


def _parse(chapter: str, entry: Mapping[str, str]) -> Requirement:
    where = f"{chapter}/spec.toml, {entry.get('id', 'a requirement without id')}"
    known = set(Requirement.__dataclass_fields__) - {"chapter"}
    if odd := {field for field in known ^ set(entry) if field not in known or field not in _REASONS}:
        raise BadSpec(f"{where}: fields missing or unknown: {', '.join(sorted(odd))}")
    if not _ID.fullmatch(entry["id"]):
        raise BadSpec(f"{where}: an id is PREFIX-nn")
    if entry["level"] not in ("MUST", "SHOULD") or entry["level"] not in entry["sentence"]:
        raise BadSpec(f"{where}: the level is MUST or SHOULD, and the sentence says it")
    if entry["profile"] not in _PROFILES:
        raise BadSpec(f"{where}: the profile is one of {', '.join(_PROFILES)}, not {entry['profile']!r}")
    return Requirement(chapter=chapter, **entry)  # type: ignore[arg-type]  # level and profile were just checked


def requirement(*ids: str, run: RunSpec, when: Callable[[Workload], bool] | None = None) -> Callable[[Check], Check]:
    """Return a decorator that marks a check with the requirements that it decides and the run that it reads.

    The check reads the workloads whose run is equal to `run`, or draws workloads (`DrawnRuns`), or reads the groups of
    the backend (`GroupAnswers`); `when` restricts workloads to those in which the rule can be broken.

    Raises:
        BadSpec: an id is not in the spec.
    """
    mark = marked(*ids, run=run, when=when)

    def cite(check: Check) -> Check:
        cited: Check = mark(check)
        return cited

    return cite


def marked(*ids: str, run: RunSpec, when: Callable[[Workload], bool] | None) -> pytest.MarkDecorator:
    """Return the mark by which the plug-in identifies a check.

    Raises:
        BadSpec: an id is not in the spec.
    """
    import pytest  # only checks need it; the spec can be read without

    if unknown := [id for id in ids if id not in load()]:
        raise BadSpec(f"no requirement {', '.join(unknown)}; known: {', '.join(load())}")
    return pytest.mark.requirement(*ids, run=run, when=when)
