"""Failures as text: grouped by kind, so that a fault that fails two hundred checks is shown once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_conformance import spec
from moe_conformance.report.records import FAILING, FALSE_LIMIT, Record
from moe_conformance.waiving import only_should

IN_FULL = 5  # kinds of failure that the terminal shows in full
_REQUIRED = 4  # requirements of one failure whose sentence is shown
_ADVISED = 20  # lines at most on requirements of the level SHOULD that are not kept
# The part of a message that names a claim with which the observed behaviour is correct.
_CLAIMED = re.compile(r"; (?:a backend|a router|one) that [^;,]*? claims? \w+ = '\w+'")


@dataclass(frozen=True)
class Group:
    """Failures of one kind; the first is shown."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The failure that is shown."""
        return self.records[0]

    @property
    def title(self) -> str:
        """The requirements, verdict and stage, in one line."""
        first = self.first
        ids = sorted({requirement for record in self.records for requirement in record.requirements})
        shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
        stage = f" in {first.stage}" if first.stage and first.stage != "run" else ""
        return f"{shown}: {first.verdict}{stage}"


def failure(record: Record, again: str, script: str = "") -> str:
    """Return the diagnosis with its detail, the requirements, and the command that repeats only this item.

    Args:
        record: Of the item.
        again: The command that repeats the run, see `Record.reproduce`.
        script: The path of the script that repeats a failure of this kind without pytest; "" if there is none.
    """
    lines = [record.message]
    if record.detail:
        lines.append(record.detail)
    lines += required(record)
    lines.append(f"reproduce: {record.reproduce(again)}")
    lines += [f"script: {script}"] if script else []
    lines += [f"replay: {command}" for command in record.replay]
    return "\n".join(lines)


def required(record: Record) -> list[str]:
    """Return the requirements that an item violates, a line each: id and sentence, which says MUST or SHOULD."""
    known = spec.load()
    told = [
        f"{requirement}: {known[requirement].sentence}" for requirement in record.requirements if requirement in known
    ]
    if len(told) <= _REQUIRED:
        return told
    others = ", ".join(record.requirements[_REQUIRED:])
    return [*told[:_REQUIRED], f"and {others}, by which nothing could be judged"]


def groups(records: Iterable[Record]) -> list[Group]:
    """Group failing records by what went wrong: crashes, hangs, MUST, SHOULD; of each the most cases first."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record.verdict in FAILING:
            found.setdefault(kind(record), []).append(record)
    grouped = [Group(tuple(group)) for group in found.values()]
    return sorted(grouped, key=lambda group: (*_rank(group.first), -len(group.records)))


def _rank(record: Record) -> tuple[int, bool]:
    return _RANK.get(record.verdict, len(_RANK)), only_should(record.requirements)


_RANK: dict[str, int] = {"crash": 0, "hang": 1}


def kind(record: Record) -> tuple[str, ...]:
    """Return the kind of a failure; two failures of equal kind are grouped.

    A run that did not finish fails every check that reads it, whatever the requirement; so does a false limit, or a
    fault of the suite. Of an exception it does not matter on which rank and in which operation it was raised.
    """
    if record.verdict == "crash" and (raised := _RAISED.search(record.message)):
        return (record.verdict, record.kind or "", shape(raised[1]))
    if record.verdict in ("crash", "hang", "error", "infrastructure") or record.kind == FALSE_LIMIT:
        return (record.verdict, record.kind or "", shape(record.message))
    return (record.verdict, record.kind or "", record.stage or "", *record.requirements)


def shape(message: str) -> str:
    """Return the first clause without numbers and addresses: rank 1 and ranks 2, 3 that fail alike are one kind.

    >>> shape("shape '[2, 10]' is invalid at 0x7f; so did rank 1") == shape("shape '[3, 1, 5]' is invalid at 0x8e")
    True
    """
    clause = message.partition("\n")[0].partition(";")[0]
    return re.sub(r"#(, #)+", "#", re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", clause))


_RAISED = re.compile(r"rank \d+ raised in \S+: (.+)")


def texts(
    found: Sequence[Group],
    again: str,
    shown_kinds: Collection[tuple[str, ...]] = (),
    scripts: Mapping[tuple[str, ...], Path] | None = None,
) -> list[tuple[str, str]]:
    """Return (title, text) of the groups that are shown in full, and one last entry that lists the others.

    Args:
        found: All groups.
        again: The command that repeats the run, see `Record.reproduce`.
        shown_kinds: Kinds whose first failure was shown while the run went on: their detail is left out.
        scripts: The paths of scripts, by kind.
    """
    first: list[tuple[str, str]] = []
    for group in found[:IN_FULL]:
        of_kind = kind(group.first)
        first.append(
            (group.title, _in_full(group, again, of_kind in shown_kinds, str((scripts or {}).get(of_kind, ""))))
        )
    if rest := found[IN_FULL:]:
        lines = [f"{group.title}: {len(group.records)} x {_one_line(group.first)}" for group in rest]
        first.append((f"{len(rest)} more kinds of failure", "\n".join(lines)))
    return first


def not_kept(records: Iterable[Record]) -> list[str]:
    """Return a line for each requirement of the level SHOULD that is not kept, most cases first.

    It has the number of cases, the message of the first, and the claims with which the behaviour would be correct:
    those that all cases name, else those that any names.
    """
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.verdict == "not kept":
            for requirement in record.requirements:
                found.setdefault(requirement, []).append(record)
    cases = {
        requirement: sum(record.cases for record in of_requirement) for requirement, of_requirement in found.items()
    }
    ids = sorted(found, key=lambda requirement: -cases[requirement])
    shown = ids if len(ids) <= _ADVISED else ids[: _ADVISED - 1]
    lines = [_not_kept(requirement, cases[requirement], found[requirement]) for requirement in shown]
    if rest := ids[len(shown) :]:
        lines.append(f"{len(rest)} more SHOULD requirements not kept: {', '.join(rest)}")
    return lines


def _not_kept(requirement: str, cases: int, records: Sequence[Record]) -> str:
    message = records[0].message.removeprefix("SHOULD, not kept: ").partition("\n")[0]
    named = Counter(hint.strip("; ") for record in records for hint in dict.fromkeys(_CLAIMED.findall(record.message)))
    hints = [hint for hint, times in named.items() if times == len(records)] or list(named)
    sentence = _cut(_CLAIMED.sub("", message), 160)
    number = f"{cases} case" if cases == 1 else f"{cases} cases"
    return "; ".join([f"SHOULD, not kept: {requirement} in {number}: {sentence}", *hints])


def _in_full(group: Group, again: str, shown: bool, script: str) -> str:
    lines = [group.first.item, failure(replace(group.first, detail="") if shown else group.first, again, script)]
    if more := len(group.records) - 1:
        cases = sorted({record.case or record.item for record in group.records[1:]} - {group.first.case})
        also = f", on {', '.join(cases[:4])}{' ...' if len(cases) > 4 else ''}" if cases else ""
        lines.append(f"{more} more of this kind{also}")
    return "\n".join(lines)


def _one_line(record: Record) -> str:
    return _cut(record.message.partition("\n")[0], 100)


def _cut(line: str, most: int) -> str:
    return line if len(line) <= most else line[: most - 3] + "..."
