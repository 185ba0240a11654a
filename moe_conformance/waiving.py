"""Waivers: known failures of a real backend, each with an owner, evidence and an end.

One TOML file per backend, `waivers/<name>.toml`, with one `[[waiver]]` table per known fault:

    id = "TT-01"
    requirements = ["EXCH-06"]
    variants = ["alltoall"]                  # exact names or patterns with * and ?
    layouts = ["*"]
    workloads = ["dropped-*"]
    reason = "what the backend does instead"
    evidence = "where that can be seen"
    owner = "who answers for it"
    expires = 2026-12-31
    versions = ["torchtitan>=0.3,<0.4"]      # of the packages that the backend reports
    example = "test_empty_slots_add_nothing[alltoall-ep2-dropped-even]"   # runs first

A waived item that fails is shown as waived and does not fail the run. A waiver does if it is expired, misspelt, unused
or outside its versions, or if an item that it matches passes.

Checks that draw their batches have the workload "drawn". Where `workloads` names "drawn with float64", or with another
feature of drawn batches, none with it is drawn, so that the search goes on beside the known fault.

Checks of groups, for which nothing runs, have the variant and the layout "any" and the workload "groups"; an example is
called `test_groups_fold_as_declared[world-2]`. Of one that looks at several kinds of sizes each kind has a workload of
its own: `test_sizes_are_taken_if_and_only_if_they_make_a_layout[world-2-below-one]` is of "groups-below-one".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from moe_conformance.workloads.corpus.groups import sizes

DRAWN_WITH = "drawn with "
ANY, GROUPS = "any", "groups"
_OF_GROUPS = {GROUPS, *(f"{GROUPS}-{kind}" for kind in sizes.KINDS)}
FOLDER = Path(__file__).parent / "waivers"  # a link in a checkout, a folder where a wheel is installed


class Unreadable(ValueError):
    """There is no such file, or it is not TOML with [[waiver]] tables."""


@dataclass(frozen=True)
class Item:
    """What a waiver is compared with: one check on one case. The workload is None where a check draws its own."""

    name: str  # test_name[alltoall-ep2-uneven]
    requirements: tuple[str, ...]
    variant: str
    layout: str
    workload: str | None

    @classmethod
    def of_groups(cls, name: str, requirements: tuple[str, ...]) -> Item:
        """Return a check for which nothing runs."""
        return cls(name, requirements, ANY, ANY, _group_workload(_bracketed(name)) or GROUPS)


@dataclass(frozen=True)
class Waiver:
    """One known fault; the fields are those of the file."""

    id: str
    requirements: tuple[str, ...]
    variants: tuple[str, ...]
    layouts: tuple[str, ...]
    workloads: tuple[str, ...]
    reason: str
    evidence: str
    owner: str
    expires: date
    versions: tuple[str, ...]
    example: str

    def matches(self, item: Item) -> bool:
        """Whether a failure of the item is waived. A check of several requirements needs a waiver for all of them."""
        return (
            set(item.requirements) <= set(self.requirements)
            and _any(self.variants, item.variant)
            and _any(self.layouts, item.layout)
            and _any(self.workloads, item.workload or "drawn")
        )


@dataclass(frozen=True)
class Names:
    """What a waiver may speak of: every name of every profile, and the backend's versions."""

    requirements: frozenset[str]
    variants: frozenset[str]
    layouts: frozenset[str]
    workloads: frozenset[str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Waivers:
    """The waivers that hold, and sentences about those that do not: each of these fails the run."""

    path: Path | None
    held: tuple[Waiver, ...] = ()
    problems: tuple[str, ...] = ()

    def leaves_out(self, item: Item, feature: str) -> bool:
        """Whether an item that draws its batches is not to draw any with that feature."""
        return any(
            DRAWN_WITH + feature in waiver.workloads
            and set(item.requirements) & set(waiver.requirements)
            and _any(waiver.variants, item.variant)
            and _any(waiver.layouts, item.layout)
            for waiver in self.held
        )

    def match(self, item: Item) -> Waiver | None:
        """Return the first waiver that matches the item, or None."""
        return next((waiver for waiver in self.held if waiver.matches(item)), None)

    @property
    def examples(self) -> frozenset[str]:
        """Names of the items that run first."""
        return frozenset(waiver.example for waiver in self.held)

    @property
    def example_cases(self) -> frozenset[str]:
        """Ids of the cases of those items: `alltoall-ep2-even`."""
        return frozenset(map(_bracketed, self.examples))

    def misnamed(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for every example whose case was selected, but with no check of that name."""
        known = set(names)
        cases = {_bracketed(name) for name in known}
        for waiver in self.held:
            if waiver.example not in known and _bracketed(waiver.example) in cases:
                yield f"{waiver.id}: its example {waiver.example} is no check of a requirement on that case"

    def unused(self, items: Iterable[Item], waived: Iterable[str | None], whole: bool) -> Iterator[str]:
        """Yield a sentence for every waiver that waived nothing, though what it matches was run.

        Args:
            items: What was run on ranks.
            waived: Ids of the waivers that matched a failure, or a pass (which is told elsewhere).
            whole: Every case of every profile was selected, so that a waiver without any item waives nothing at all.
        """
        ran, used = list(items), set(waived)
        for waiver in self.held:
            if waiver.id in used or all(name.startswith(DRAWN_WITH) for name in waiver.workloads):
                continue  # what is not drawn cannot be seen to fail
            matched = [item for item in ran if waiver.matches(item)]
            if matched:
                yield f"{waiver.id} is unused: {matched[0].name} was selected and did not fail; delete the waiver"
            elif whole:
                yield f"{waiver.id} is unused: no check runs on what it names; delete the waiver"


def path_for(target: str, given: str) -> Path | None:
    """Return the file of a backend: the one given, the installed one of that name, or None if there is none."""
    if given:
        return Path(given)
    path = FOLDER / f"{target}.toml"
    return path if ":" not in target and path.is_file() else None


def load(path: Path | None, names: Names, today: date) -> Waivers:
    """Read a file and sort its waivers into those that hold and problems.

    Raises:
        Unreadable: the file cannot be read, or is not TOML with [[waiver]] tables.
    """
    if path is None:
        return Waivers(None)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"the waivers {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"the waivers {path} are not TOML: {error}") from error
    entries = tables.get("waiver", [])
    if set(tables) - {"waiver"} or not isinstance(entries, list):
        raise Unreadable(f"the waivers {path} hold something else than [[waiver]] tables")
    held: list[Waiver] = []
    problems: list[str] = []
    for position, entry in enumerate(entries, 1):
        said = f"{path.name}, {entry.get('id', f'waiver {position}')}"
        found = list(_problems(entry, names, today))
        if entry.get("id") in [waiver.id for waiver in held]:
            found.append("its id occurs twice")
        problems += [f"{said}: {problem}" for problem in found]
        if not found:
            held.append(_waiver(entry))
    return Waivers(path, tuple(held), tuple(problems))


def _waiver(entry: Mapping[str, Any]) -> Waiver:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Waiver(**values)


def _problems(entry: Mapping[str, Any], names: Names, today: date) -> Iterator[str]:
    """Yield what is wrong with one table; the names are looked at only if its form is right."""
    shape = list(_misshapen(entry))
    if shape:
        yield from shape
        return
    for field, known in (
        ("requirements", names.requirements),
        ("variants", names.variants | {ANY}),
        ("layouts", names.layouts | {ANY}),
        ("workloads", names.workloads | {"drawn"} | _OF_GROUPS),
    ):
        for pattern in entry[field]:
            if not any(fnmatchcase(name, pattern) for name in known):
                yield f"{field}: {pattern!r} names none of {_some(known - {ANY} - _OF_GROUPS)}"
    if not _is_case(entry, names):
        yield f"example: {entry['example']!r} is no test_name[variant-layout-workload] that the waiver matches"
    if entry["expires"] < today:
        yield f"expired on {entry['expires']}; check it, then delete it or set a new date"
    for wanted in entry["versions"]:
        yield from _version_problem(wanted, names.versions)


def _is_case(entry: Mapping[str, Any], names: Names) -> bool:
    """Whether the example lies on a case that the waiver's own patterns match; `drawn` has no name in an item's."""
    if workload := _group_workload(_bracketed(entry["example"])):
        return all(_any(entry[field], name) for field, name in zip(_PLACE, (ANY, ANY, workload), strict=True))
    return _bracketed(entry["example"]) in {
        "-".join((variant, layout, workload)).partition("-drawn")[0]
        for variant in names.variants
        for layout in names.layouts
        for workload in names.workloads | {"drawn"}
        if _any(entry["variants"], variant) and _any(entry["layouts"], layout) and _any(entry["workloads"], workload)
    }


_PLACE = ("variants", "layouts", "workloads")


def _bracketed(name: str) -> str:
    """Return `alltoall-ep2-even` of `test_name[alltoall-ep2-even]`."""
    return name.partition("[")[2].removesuffix("]")


def _group_workload(bracketed: str) -> str | None:
    """Return `groups-below-one` of `world-2-below-one`, None of what is no world of groups."""
    found = re.fullmatch(r"world-\d+(-.+)?", bracketed)
    workload = f"{GROUPS}{found[1] or ''}" if found else ""
    return workload if workload in _OF_GROUPS else None


def _misshapen(entry: Mapping[str, Any]) -> Iterator[str]:
    kinds = {field.name: str(field.type) for field in fields(Waiver)}
    if unknown := sorted(set(entry) - set(kinds)):
        yield f"unknown fields {', '.join(unknown)}; known: {', '.join(kinds)}"
    for name, kind in kinds.items():
        value = entry.get(name)
        if name not in entry:
            yield f"{name} is missing"
        elif kind == "date" and type(value) is not date:
            yield f"{name} is a date such as 2026-12-31, not {value!r}"
        elif kind == "str" and not (isinstance(value, str) and value.strip()):
            yield f"{name} is a sentence, not {value!r}"
        elif kind.startswith("tuple") and not _texts(value):
            yield f"{name} is a list of strings, not {value!r}"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, str) and part for part in value)


def _version_problem(wanted: str, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield why the installed versions are not those that the waiver was written for."""
    try:
        requirement = Requirement(wanted)
    except InvalidRequirement as error:
        yield f"versions: {wanted!r} is not of the form 'package>=1,<2' ({str(error).splitlines()[0]})"
        return
    installed = {canonicalize_name(name): version for name, version in versions.items()}
    found = installed.get(canonicalize_name(requirement.name))
    if found is None:
        yield f"versions: the backend reports no {requirement.name}, only {', '.join(sorted(versions))}"
    elif not requirement.specifier:
        yield f"versions: {wanted!r} sets no bounds"
    elif not requirement.specifier.contains(found, prereleases=True):
        yield f"holds for {wanted}, and {found} is installed; check it, then change its versions or delete it"


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def proposal(
    requirements: Sequence[str], items: Sequence[Item], reason: str, versions: Mapping[str, str], backend: str
) -> str:
    """Return a waiver for failing items, as TOML to be completed by hand: nobody but a person may waive."""
    version = versions.get(backend)
    wanted = f"{backend}=={version}" if version else " ".join(f"{name}=={v}" for name, v in versions.items())

    def listed(values: Iterable[str]) -> str:
        return "[" + ", ".join(_quoted(value) for value in sorted(set(values))) + "]"

    return "\n".join(
        [
            "[[waiver]]",
            'id = "?"',
            f"requirements = {listed(requirements)}",
            f"variants = {listed(item.variant for item in items)}",
            f"layouts = {listed(item.layout for item in items)}",
            f"workloads = {listed(item.workload or 'drawn' for item in items)}",
            f"reason = {_quoted(reason)}",
            'evidence = "?"',
            'owner = "?"',
            "expires = ?",
            f"versions = {listed([wanted])}",
            f"example = {_quoted(items[0].name)}",
        ]
    )


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
