"""Prints the end of a run: failures, other problems, the matrix, the totals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_conformance import spec
from moe_conformance.report import drawn, matrix, own_word, travelled, unjudged, words
from moe_conformance.report.problems import item_of
from moe_conformance.report.records import Record, other_bits
from moe_conformance.spec.places import checked
from moe_conformance.waiving import Fault, proposal
from moe_conformance.workloads.plan import SMOKE
from moe_conformance.workloads.scripts import layout_names
from moe_conformance.workloads.selection import power


class Terminal(Protocol):
    """What the summary is written to; pytest's terminal reporter is one."""

    def write_line(self, line: str, **markup: bool) -> None:
        """Write a line."""

    def write_sep(self, sep: str, title: str | None = None, fullwidth: int | None = None, **markup: bool) -> None:
        """Write a title in a rule."""


def write(
    terminal: Terminal,
    head: Mapping[str, Any],
    records: Sequence[Record],
    *,
    width: int,
    color: bool,
    encoding: str,
    whole: bool = False,
    propose: bool = False,
    shown_kinds: Collection[tuple[str, ...]] = (),
    scripts: Mapping[tuple[str, ...], Path] | None = None,
) -> None:
    """Print a run; one that was restricted to some requirements shows no others.

    Args:
        terminal: Where to write.
        head: Of the report.
        records: Of all items.
        width: Of the matrix in columns.
        color: Whether it has colours.
        encoding: Of the terminal.
        whole: Show every requirement, what was sent between ranks, and all reasons why cases were not judged.
        propose: Print a proposal for a waiver of each kind of failure.
        shown_kinds: The kinds of failure that were shown while the run went on.
        scripts: The paths of scripts that repeat failures, by kind.
    """
    found = words.groups(records)
    for title, text in words.texts(found, head["again"], shown_kinds, scripts):
        terminal.write_sep("-", title, red=True)
        terminal.write_line(text)
    if propose:
        _propose_waivers(terminal, found, head)
    if head["stopped"]:
        terminal.write_line(f"STOPPED: {head['stopped']}", red=True)
    if lost := [record for record in records if record.verdict == "infrastructure"]:
        terminal.write_line(f"INFRASTRUCTURE: {len(lost)} items have no result, since the machine failed", red=True)
    for problem in head["problems"]:
        terminal.write_line(f"FAILS THE RUN: {problem}", red=True)
    for line in words.not_kept(records):
        terminal.write_line(line)
    requirements = spec.load()
    decidable = [requirement for requirement in requirements if requirement in checked()]
    wanted = head["only"] or decidable
    terminal.write_line("")
    terminal.write_line(own_word.line(head, records))
    terminal.write_line(matrix.judged(records, wanted, len(requirements)))
    shown = matrix.matrix(
        [requirements[requirement] for requirement in requirements if requirement in wanted],
        layout_names(),
        records,
        width=width,
        color=color,
        encoding=encoding,
        whole=whole,
    )
    terminal.write_line(shown.rstrip("\n"))
    for line in unjudged.lines(records, whole=whole):
        terminal.write_line(line)
    if whole and (cost := travelled.table(layout_names(), records, width=width, encoding=encoding)):
        terminal.write_line(cost)
    if left_out := len(decidable) - len(set(wanted)):
        terminal.write_line(f"{left_out} requirements not run: left out by --only")
    if waiting := len(requirements) - len(decidable):
        terminal.write_line(
            f"{waiting} of {len(requirements)} requirements have no check yet; "
            "`moe-conformance list requirements` has their profile in brackets"
        )
    if head["profile"] == SMOKE:
        known = power.read()
        terminal.write_line(
            f"smoke: the first {known.smoke} cases of the profile quick, which detect {known.share:.0%} of the planted "
            "bugs that it detects; held to no floor"
        )
    if head["shard"]:
        other = head["left_out"]
        terminal.write_line(
            f"shard {head['shard']}: {len(other['cells'])} cells with {other['cases']} cases are in other shards"
        )
    versions = " ".join(f"{name} {version}" for name, version in head["versions"].items())
    backend = f"native with the planted bug {head['plant']}" if head["plant"] else head["backend"]
    terminal.write_line(f"{backend} ({versions}) on {head['ranks']} ranks, {head['device']}")
    terminal.write_line(matrix.totals(records))
    if excused := matrix.waived(records):
        terminal.write_line(excused)
    if differing := other_bits_line(records):
        terminal.write_line(differing)
    if distribution := drawn.line(records):
        terminal.write_line(distribution)
    rate = head["cases"] / head["seconds"] if head["seconds"] else 0.0
    terminal.write_line(f"{head['cases']} cases in {head['seconds']:.1f} s, {rate:.1f} cases/s")


def other_bits_line(records: Iterable[Record]) -> str:
    """Return one sentence for all requirements that compare two runs within rounding; "" if none was judged so."""
    by_requirement: dict[str, list[Record]] = {}
    for record in records:
        for requirement in record.requirements if record.bits[0] else ():
            by_requirement.setdefault(requirement, []).append(record)
    other: list[str] = []
    same: list[str] = []
    for requirement, of_requirement in sorted(by_requirement.items()):
        count = other_bits(of_requirement)
        if count is not None and count["other"]:
            other.append(f"{requirement} {count['other']} of {count['elements']}")
        else:
            same.append(requirement)
    parts = [f"other bits, within rounding: {', '.join(other)} elements"] if other else []
    parts += [f"equal bits: {', '.join(same)}"] if same else []
    return "two runs compared: " + "; ".join(parts) if parts else ""


def _propose_waivers(terminal: Terminal, found: Sequence[words.Group], head: Mapping[str, Any]) -> None:
    for group in found[: words.IN_FULL]:
        items = [item_of(record) for record in group.records]
        if group.first.verdict in ("fail", "crash", "hang"):
            terminal.write_sep("-", "a waiver for this would read")
            ids = sorted({requirement for record in group.records for requirement in record.requirements})
            first, size = group.first, max(record.worst for record in group.records)
            fault = Fault(first.kind or "", first.stage or "run", first.message, size if size > 1 else None)
            terminal.write_line(proposal(ids, items, fault, head["versions"], head["backend"]))
