"""Waivers: known failures of a real backend, each with an owner, evidence and an end.

One TOML file per backend, `waivers/<name>.toml`, with one `[[waiver]]` table per known fault:

    id = "TT-01"
    requirements = ["EXCH-06"]
    variants = ["alltoall"]                  # variants, layouts, workloads: exact names or patterns with * and ?
    layouts = ["*"]
    workloads = ["dropped-*"]
    reason = "what the backend does instead"
    evidence = "where that can be seen"
    owner = "who answers for it"
    expires = 2026-12-31
    versions = ["torchtitan>=0.3,<0.4"]      # of the packages that the backend reports
    example = "test_empty_slots_add_nothing[alltoall-ep2-dropped-even]"   # runs first
    checks = ["test_empty_slots_add_nothing"]  # optional: where other checks of the requirements pass

    [[waiver.failure]]
    kind = "WrongOutput"                     # and stage, as result.json has them
    stage = "combine"
    words = ["as if an empty slot"]          # all of them are in one finding, with what is before and behind it
    at_most = 100                            # times the allowed error, where it was bounded; 1e300 for NaN too

An item all of whose findings are among these is shown as waived and does not fail the run. A finding is what a message
tells of one token, tensor, rank or setting; each one counts, also those that the message only counts ("12 more of the
same kind"), and those of the judges that the first failure kept from being called. A crash or a hang is a kind of its
own ("Raised", "Died", "Hung"); it violates EXCH-09, and is waived under that id or under those of
the checks that meet it. A waiver fails the run if it is expired, incomplete, misspelt or unused, or if an item that it
matches passes. One of other versions than those installed is not applied.

Checks that draw their batches have the workload "drawn". Where `workloads` names "drawn with float64", or with another
feature of drawn batches, none with it is drawn, so that the search can find other faults.

Checks of groups, for which nothing runs, have the variant and the layout "any" and the workload "groups"; an example is
called `test_groups_fold_as_declared[world-2]`. A check of several kinds of sizes has one workload per kind:
`test_sizes_are_taken_if_and_only_if_they_make_a_layout[world-2-below-one]` is of "groups-below-one".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from moe_conformance import reading
from moe_conformance.judging import verdict
from moe_conformance.waiving.records import (
    ANY,
    OF_GROUPS,
    Failure,
    Names,
    Waiver,
    Waivers,
    bracketed,
    fits,
    group_workload,
)

FOLDER = Path(__file__).parents[1] / "waivers"  # a link in a checkout, a folder where a wheel is installed
_MOST_BYTES = 1 << 20  # of a file
LONGEST = timedelta(days=400)  # from today to the date of the next review
_LETTERS = 10  # that the words of a failure have together, at least
_PLACEHOLDERS = frozenset({"?", "todo", "tbd", "xxx", "none", "nobody", "unknown"})


class Unreadable(ValueError):
    """There is no such file, or it is not TOML with [[waiver]] tables."""


def path_for(target: str, given: str) -> Path | None:
    """Return the file of a backend: the one given, the installed one of that name, or None if there is none."""
    if given:
        return Path(given)
    path = FOLDER / f"{target}.toml"
    return path if ":" not in target and path.is_file() else None


def load(path: Path | None, names: Names, today: date) -> Waivers:
    """Read a file; return its valid waivers, and the problems of the others.

    Raises:
        Unreadable: the file cannot be read, or is not TOML with [[waiver]] tables.
    """
    if path is None:
        return Waivers(None)
    try:
        text = reading.text_of(path, _MOST_BYTES)
        return valid(path, text, reading.toml_from(text), names, today)
    except reading.Unreadable as error:
        raise Unreadable(f"the waivers {path} cannot be used: {error}") from error


def valid(path: Path, text: str, tables: Mapping[str, Any], names: Names, today: date) -> Waivers:
    """Return the waivers in the tables of a file with some text, as `load`."""
    entries = _entries(tables)
    held: list[Waiver] = []
    elsewhere: list[str] = []
    problems: list[str] = []
    for position, entry in enumerate(entries):
        found = list(_problems(entry, names, today))
        name = entry.get("id", f"waiver {position + 1}")
        if name in (*(waiver.id for waiver in held), *elsewhere):
            found.append(Problem("id", "its id occurs twice"))
        problems += [f"{path.name}, line {_line(text, position, field)}, {name}: {what}" for field, what in found]
        if not found and is_of(entry["versions"], names.versions):
            held.append(waiver_of(entry))
        elif not found:
            elsewhere.append(entry["id"])
    return Waivers(path, tuple(held), tuple(problems), tuple(elsewhere))


def ids_in(path: Path, versions: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the ids of a file's waivers for some versions, with the requirements that they name.

    Raises:
        Unreadable: the file cannot be read, or a waiver has none of these.
    """
    try:
        return tuple(
            (entry["id"], tuple(entry["requirements"]))
            for entry in _entries(reading.toml_of(path, _MOST_BYTES))
            if is_of(entry["versions"], versions)
        )
    except (reading.Unreadable, KeyError, TypeError, InvalidRequirement) as error:
        raise Unreadable(f"the waivers {path} cannot be used: {error}") from error


def _entries(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries: Any = tables.get("waiver", [])
    alike = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not alike or set(tables) - {"waiver"}:
        raise reading.Unreadable("it holds something else than [[waiver]] tables")
    return [*entries]


def waiver_of(entry: Mapping[str, Any]) -> Waiver:
    """Return the waiver that a table holds.

    Raises:
        TypeError: fields are missing or unknown.
    """
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    failures = tuple(Failure(**(table | {"words": tuple(table["words"])})) for table in entry["failure"])
    return Waiver(**(values | {"failure": failures}))


class Problem(NamedTuple):
    """What is wrong with a waiver, and the field that is wrong."""

    field: str
    sentence: str


def _line(text: str, position: int, field: str) -> int:
    """Return the line, counted from 1, of a field of the waiver at a position; its first line if there is no field."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip().startswith("[[waiver]]")]
    start, *others = starts[position:] or [0]
    for number in range(start, others[0] if others else len(lines)):
        if re.match(rf"\s*(\[\[waiver\.)?{re.escape(field)}\b", lines[number]):
            return number + 1
    return start + 1


def _problems(entry: Mapping[str, Any], names: Names, today: date) -> Iterator[Problem]:
    """Yield what is wrong with one table; names are checked only if its form is correct."""
    shape = list(_misshapen(entry))
    if shape:
        yield from shape
        return
    for id in entry["requirements"]:
        if id not in names.requirements:
            yield Problem("requirements", f"requirements: {id!r} names none of {_some(names.requirements)}")
    for field, known in (
        ("variants", names.variants | {ANY}),
        ("layouts", names.layouts | {ANY}),
        ("workloads", names.workloads | {"drawn"} | OF_GROUPS),
    ):
        for pattern in entry[field]:
            if not any(fnmatchcase(name, pattern) for name in known):
                yield Problem(field, f"{field}: {pattern!r} names none of {_some(known - {ANY} - OF_GROUPS)}")
    if not _is_case(entry, names):
        what = f"example: {entry['example']!r} is no test_name[variant-layout-workload] that the waiver matches"
        yield Problem("example", what)
    if entry["expires"] < today:
        yield Problem("expires", f"expired on {entry['expires']}; check it, then delete it or set a new date")
    if entry["expires"] > today + LONGEST:
        what = f"expires on {entry['expires']}, more than {LONGEST.days} days ahead; set the day of its next review"
        yield Problem("expires", what)
    for wanted in entry["versions"]:
        yield from (Problem("versions", what) for what in _version_problem(wanted, names.versions))


def _is_case(entry: Mapping[str, Any], names: Names) -> bool:
    """Whether the patterns of the waiver match the case of its example; item names do not contain `drawn`."""
    if workload := group_workload(bracketed(entry["example"])):
        return all(fits(entry[field], name) for field, name in zip(_PLACE, (ANY, ANY, workload), strict=True))
    variants = [variant for variant in names.variants if fits(entry["variants"], variant)]
    layouts = [layout for layout in names.layouts if fits(entry["layouts"], layout)]
    workloads = [workload for workload in names.workloads | {"drawn"} if fits(entry["workloads"], workload)]
    cases = {"-".join(case).partition("-drawn")[0] for case in itertools.product(variants, layouts, workloads)}
    return bracketed(entry["example"]) in cases


_PLACE = ("variants", "layouts", "workloads")


def _misshapen(entry: Mapping[str, Any]) -> Iterator[Problem]:
    kinds = {field.name: str(field.type) for field in fields(Waiver)}
    if unknown := sorted(set(entry) - set(kinds)):
        yield Problem(unknown[0], f"unknown fields {', '.join(unknown)}; known: {', '.join(kinds)}")
    for name, kind in kinds.items():
        value = entry.get(name)
        if name == "checks" and name not in entry:
            continue
        if name not in entry:
            yield Problem(name, _MISSING_FAILURE if name == "failure" else f"{name} is missing")
        elif name == "failure":
            yield from (Problem(name, what) for what in _wrong_failures(value))
        elif kind == "date" and type(value) is not date:
            yield Problem(name, f"{name} is a date such as 2026-12-31, not {value!r}")
        elif kind == "str" and not (isinstance(value, str) and value.strip()):
            yield Problem(name, f"{name} is a sentence, not {value!r}")
        elif kind == "str" and (_says_nothing(value) if name in _SENTENCES else _is_placeholder(value)):
            yield Problem(name, f"{name} is {value!r}, which says nothing; {_REQUESTS.get(name, 'fill it in')}")
        elif kind.startswith("tuple") and not _texts(value):
            yield Problem(name, f"{name} is a list of strings, not {value!r}")


_MISSING_FAILURE = "[[waiver.failure]] is missing: the kind, stage and words of the failure, as result.json has them"
_SENTENCES = ("reason", "evidence", "owner")
_REQUESTS = {"evidence": "say where the failure can be seen", "owner": "name who answers for it"}


def _wrong_failures(tables: Any) -> Iterator[str]:
    """Yield what is wrong with the failures that a waiver names."""
    if not (isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)):
        yield "failure is a list of [[waiver.failure]] tables"
        return
    for table in tables:
        if odd := sorted((set(table) - {"at_most"}) ^ {"kind", "stage", "words"}):
            yield f"failure: it has kind, stage, words and at_most; {', '.join(odd)} is missing or unknown"
            continue
        if not isinstance(table["kind"], str) or table["kind"] not in _kinds():
            yield f"failure: kind {table['kind']!r} is none of {', '.join(sorted(_kinds()))}"
        if table["stage"] not in get_args(verdict.Stage):
            yield f"failure: stage {table['stage']!r} is none of {', '.join(get_args(verdict.Stage))}"
        if not _texts(table["words"]) or any(map(_says_nothing, table["words"])):
            yield f"failure: words is a list of pieces of the message, not {table['words']!r}"
        elif len(re.findall(r"[^\W\d_]", "".join(table["words"]))) < _LETTERS:
            yield f"failure: words {table['words']!r} are in many messages; give more of the one that is meant"
        at_most = table.get("at_most", 1.0)
        if type(at_most) not in (int, float) or not 1 <= at_most <= verdict.MOST:
            yield f"failure: at_most is a number of allowed errors, 1 to {verdict.MOST:g}, not {at_most!r}"


def _says_nothing(text: Any) -> bool:
    """Whether a text is a placeholder, or has no two letters."""
    return _is_placeholder(text) or len(re.findall(r"[^\W\d_]", text)) < 2


def _is_placeholder(text: Any) -> bool:
    return text.strip().lower() in _PLACEHOLDERS


def _kinds() -> set[str]:
    """Return the names of all kinds of mismatches."""
    found, new = set[type[verdict.Mismatch]](), {verdict.Mismatch}
    while new:
        found |= new
        new = {subclass for kind in new for subclass in kind.__subclasses__()} - found
    return {kind.__name__ for kind in found - {verdict.Mismatch}}


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, str) and part for part in value)


def is_of(wanted: Iterable[str], versions: Mapping[str, str]) -> bool:
    """Whether versions are within all bounds such as "torchtitan>=0.3,<0.4"; a checkout counts as what it declares."""
    installed = {canonicalize_name(name): version for name, version in versions.items()}
    bounds = map(Requirement, wanted)
    return all(
        bound.specifier.contains(installed.get(canonicalize_name(bound.name), "0"), prereleases=True)
        for bound in bounds
    )


def _version_problem(wanted: str, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the bounds of a package's versions."""
    try:
        requirement = Requirement(wanted)
    except InvalidRequirement as error:
        yield f"versions: {wanted!r} is not of the form 'package>=1,<2' ({str(error).splitlines()[0]})"
        return
    if canonicalize_name(requirement.name) not in map(canonicalize_name, versions):
        yield f"versions: the backend reports no {requirement.name}, only {', '.join(sorted(versions))}"
    elif not requirement.specifier:
        yield f"versions: {wanted!r} sets no bounds"


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
