"""The table of a drill."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .runner import Trial


def table(trials: Sequence[Trial]) -> list[str]:
    """Returns the lines of a Markdown table: one row per fault and world; times are least / median / greatest."""
    rows: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.fault.name, trial.world), []).append(trial)
    cells = [
        ("fault", "ranks", "verdict", "blamed", "report s", "next case s", "right"),
        *(_row(name, world, played) for (name, world), played in rows.items()),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _row(name: str, world: int, played: Sequence[Trial]) -> tuple[str, ...]:
    right = sum(not trial.wrong for trial in played)
    return (
        name,
        str(world),
        ", ".join(sorted({trial.verdict for trial in played})),
        _blamed(played),
        _times([trial.report_s for trial in played]),
        _times([trial.next_s for trial in played]),
        ("yes" if right else "NO") if len(played) == 1 else f"{right} of {len(played)}",
    )


def _blamed(played: Sequence[Trial]) -> str:
    """Names the ranks of one playing, and the rule of many: each has another faulty rank."""
    if len(played) == 1:
        return " and ".join(map(str, played[0].blamed)) or "nobody"
    return played[0].fault.blamed


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.2f}"
    return f"{min(seconds):.2f} / {median(seconds):.2f} / {max(seconds):.2f}"
