"""A waiver, the items and faults with which it is compared, and whether it excuses them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

from moe_conformance import spec
from moe_conformance.workloads import group_sizes as sizes
from moe_conformance.workloads.drawn import DRAWN_WITH

ANY, GROUPS = "any", "groups"
OF_GROUPS = {GROUPS, *(f"{GROUPS}-{kind}" for kind in sizes.KINDS)}


@dataclass(frozen=True)
class Item:
    """One check on one case, with which waivers are compared. The workload is None if the check draws workloads."""

    name: str  # test_name[alltoall-ep2-uneven]
    requirements: tuple[str, ...]
    variant: str
    layout: str
    workload: str | None

    @classmethod
    def of_groups(cls, name: str, requirements: tuple[str, ...]) -> Item:
        """Return the item of a check of groups, for which nothing runs."""
        return cls(name, requirements, ANY, ANY, group_workload(bracketed(name)) or GROUPS)


@dataclass(frozen=True)
class Fault:
    """One fault of an item: one finding of its check, also if the message of the check only counts it.

    Attributes:
        kind: The type of the mismatch: "WrongOutput", "Died", ...
        stage: "experts", "gradient", "run", ...
        message: The diagnosis, as if the check had this finding alone.
        size: The observed over the allowed error; None if no error was compared.
    """

    kind: str
    stage: str
    message: str
    size: float | None = None


@dataclass(frozen=True)
class Failure:
    """The one failure that a waiver excuses; the fields are those of its table."""

    kind: str
    stage: str
    words: tuple[str, ...]
    at_most: float | None = None

    def is_of(self, fault: Fault) -> bool:
        """Whether a fault is this failure: equal kind and stage, all words in its message, and at most `at_most`."""
        same = (self.kind, self.stage) == (fault.kind, fault.stage)
        if not same or not all(word in fault.message for word in self.words):
            return False
        return fault.size is None or (self.at_most is not None and fault.size <= self.at_most)


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
    failure: tuple[Failure, ...]
    checks: tuple[str, ...] = ()  # of these requirements, where others of them pass; none: all

    def excuses(self, faults: Sequence[Fault]) -> bool:
        """Whether all faults of an item are failures that this waiver names."""
        return bool(faults) and all(any(failure.is_of(fault) for failure in self.failure) for fault in faults)

    def matches(self, item: Item) -> bool:
        """Whether the waiver is for an item. A check of several requirements needs a waiver of all of them."""
        return (
            set(item.requirements) <= set(self.requirements)
            and fits(self.variants, item.variant)
            and fits(self.layouts, item.layout)
            and fits(self.workloads, item.workload or "drawn")
            and (not self.checks or item.name.partition("[")[0] in self.checks)
        )


@dataclass(frozen=True)
class Names:
    """The names that a waiver may use: those of every profile, and the backend's versions."""

    requirements: frozenset[str]
    variants: frozenset[str]
    layouts: frozenset[str]
    workloads: frozenset[str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Waivers:
    """The valid waivers, and sentences about the others: each of these fails the run.

    Those of other versions of the library are in neither: `elsewhere` has their ids.
    """

    path: Path | None
    held: tuple[Waiver, ...] = ()
    problems: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def leaves_out(self, item: Item, feature: str) -> bool:
        """Whether an item that draws batches must draw none with a feature."""
        return any(
            DRAWN_WITH + feature in waiver.workloads
            and set(item.requirements) & set(waiver.requirements)
            and fits(waiver.variants, item.variant)
            and fits(waiver.layouts, item.layout)
            for waiver in self.held
        )

    def match(self, item: Item, faults: Sequence[Fault] = ()) -> Waiver | None:
        """Return a waiver that matches the item: the first that excuses its faults, else the first; None if none is."""
        matching = [waiver for waiver in self.held if waiver.matches(item)]
        return next((waiver for waiver in matching if waiver.excuses(faults)), matching[0] if matching else None)

    def in_use(self, strict: bool) -> Waivers:
        """Return the waivers that can excuse a failure: without --strict not those of SHOULD requirements."""
        if strict:
            return self
        return replace(self, held=tuple(waiver for waiver in self.held if not only_should(waiver.requirements)))

    @property
    def examples(self) -> frozenset[str]:
        """Names of the items that run first."""
        return frozenset(waiver.example for waiver in self.held)

    @property
    def example_cases(self) -> frozenset[str]:
        """Ids of the cases of those items: `alltoall-ep2-even`."""
        return frozenset(map(bracketed, self.examples))

    def misnamed(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for every example whose case was selected, but with no check of that name."""
        known = set(names)
        cases = {bracketed(name) for name in known}
        for waiver in self.held:
            if waiver.example not in known and bracketed(waiver.example) in cases:
                yield f"{waiver.id}: its example {waiver.example} is no check of a requirement on that case"

    def unused(self, items: Iterable[Item], waived: Iterable[str | None], whole: bool) -> Iterator[str]:
        """Yield a sentence for every waiver that waived nothing, although items that it matches were run.

        Args:
            items: Those that were run on ranks.
            waived: Ids of the waivers that matched a failure, or a pass (which is reported elsewhere).
            whole: Every case of every profile was selected, so that a waiver without any item is unused.
        """
        ran, used = list(items), set(waived)
        for waiver in self.held:
            if waiver.id in used or all(name.startswith(DRAWN_WITH) for name in waiver.workloads):
                continue  # no batch with the feature is drawn, so that none can fail
            matched = [item for item in ran if waiver.matches(item)]
            if matched:
                yield f"{waiver.id} is unused: {matched[0].name} was selected and did not fail; delete the waiver"
            elif whole:
                yield f"{waiver.id} is unused: no check runs on what it names; delete the waiver"


def fits(patterns: Sequence[str], name: str) -> bool:
    """Whether a name fits one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def only_should(requirements: Iterable[str]) -> bool:
    """Whether all of some requirements have the level SHOULD."""
    levels = {spec.load()[requirement].level for requirement in requirements if requirement in spec.load()}
    return levels == {"SHOULD"}


def bracketed(name: str) -> str:
    """Return `alltoall-ep2-even` of `test_name[alltoall-ep2-even]`."""
    return name.partition("[")[2].removesuffix("]")


def group_workload(bracketed: str) -> str | None:
    """Return `groups-below-one` for `world-2-below-one`; None for what is no world of groups."""
    found = re.fullmatch(r"world-\d+(-.+)?", bracketed)
    workload = f"{GROUPS}{found[1] or ''}" if found else ""
    return workload if workload in OF_GROUPS else None
