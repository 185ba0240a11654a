"""Formats the ledgers of several ranks side by side, and counts calls and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .disagreement import Disagreement
from .entry import Entry

_MOST_COLUMNS = 8
_NOTHING = ["(no such call)"]

_Cell = list[str]  # its lines


@dataclass(frozen=True)
class Count:
    """Calls of one operator on one group by one rank, with the bytes that went in and out."""

    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def plus(self, entry: Entry) -> Count:
        """Returns the count with one more call."""
        return Count(self.calls + 1, self.bytes_in + entry.bytes_in, self.bytes_out + entry.bytes_out)


def count(entries: Iterable[Entry]) -> dict[tuple[tuple[int, ...], str], Count]:
    """Returns the counts of one rank's ledger, by the ranks of the group and the operator."""
    counts: dict[tuple[tuple[int, ...], str], Count] = {}
    for entry in entries:
        key = entry.ranks, entry.op
        counts[key] = counts.get(key, Count()).plus(entry)
    return counts


def table(ledgers: Mapping[int, Sequence[Entry]], disagreement: Disagreement, context: int = 2) -> str:
    """Returns a text table of the calls before and after a disagreement, with a column per rank.

    The marked row holds the call; above and below it are the `context` calls that every rank made before and after it,
    on any group. At most eight ranks are shown, those that are blamed first.
    """
    others = [rank for rank in disagreement.ranks if rank not in disagreement.blamed]
    known = [rank for rank in (*disagreement.blamed, *others) if rank in ledgers]
    ranks = sorted(known[:_MOST_COLUMNS])
    columns = [_column(ledgers[rank], disagreement.orders.get(rank), disagreement, context) for rank in ranks]
    rows: list[list[_Cell]] = [[[""], *([f"rank {rank}"] for rank in ranks)]]
    for at, row in enumerate(zip(*columns, strict=True)):
        if any(row):
            rows.append([[">" if at == context else ""], *row])
    return "\n".join(_lines(rows))


def _column(entries: Sequence[Entry], order: int | None, disagreement: Disagreement, context: int) -> list[_Cell]:
    """Returns 2 * context + 1 cells with the call in the middle; cells without a call are empty."""
    if order is not None:
        middle, after = _cell(entries[order], disagreement.ranks), order + 1
    else:
        middle, after = _NOTHING, _place_of_absent(entries, disagreement)
    before = order if order is not None else after
    above = [_cell(entry, disagreement.ranks) for entry in entries[max(0, before - context) : before]]
    below = [_cell(entry, disagreement.ranks) for entry in entries[after : after + context]]
    empty: list[_Cell] = [[]]
    return empty * (context - len(above)) + above + [middle] + below + empty * (context - len(below))


def _place_of_absent(entries: Sequence[Entry], disagreement: Disagreement) -> int:
    """Returns how many calls a rank made before the position of the call that it lacks."""
    if disagreement.sequence is None:
        return len(entries)
    earlier = (
        e.order for e in entries if e.ranks == disagreement.ranks and (e.sequence or 0) == disagreement.sequence - 1
    )
    return next(earlier, -1) + 1


def _cell(entry: Entry, ranks: tuple[int, ...]) -> _Cell:
    number = f" #{entry.sequence}" if entry.sequence is not None else f" {_route(entry)}"
    cell = [f"{entry.op}{number}"]
    if entry.ranks != ranks:
        cell.append(f"on {', '.join(map(str, entry.ranks))}")
    if entry.dtype:
        given, got = _sizes(entry.in_splits, entry.shapes_in), _sizes(entry.out_splits, entry.shapes_out)
        cell.append(f"{entry.dtype} {' > '.join(dict.fromkeys(filter(None, (given, got))))}")
    if entry.root is not None or entry.reduce is not None:
        cell.append(" ".join([entry.reduce or "", f"root {entry.root}" if entry.root is not None else ""]).strip())
    if entry.state == "issued":
        cell.append("not finished")
    return cell


def _route(entry: Entry) -> str:
    side = "to" if entry.op == "send" else "from"
    return f"{side} {'any' if entry.peer is None else entry.peer}, tag {entry.tag}"


def _sizes(splits: tuple[int, ...] | None, shapes: Sequence[Sequence[int]]) -> str:
    """Returns the text of the shapes, `3x4`, and of the splits of their rows, if there are any."""
    distinct = list(dict.fromkeys("x".join(map(str, shape)) or "scalar" for shape in shapes))
    if len(distinct) == 1 and len(shapes) > 1:
        distinct = [f"{len(shapes)} of {distinct[0]}"]
    text = ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
    if splits is None:
        return text
    return f"{text} {list(splits[:8])}" if len(splits) <= 8 else f"{text} {[*splits[:8], '...']}"


def _lines(rows: Sequence[Sequence[_Cell]]) -> list[str]:
    widths = [max(max(map(len, cell), default=0) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        for line in itertools.zip_longest(*row, fillvalue=""):
            lines.append("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    return lines
