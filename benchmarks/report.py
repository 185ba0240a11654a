"""The figures as data for JSON, and as tables for the terminal and the docs."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import rounds
from benchmarks.contenders.roster import BARE, BLIND, CONTINUOUS, ENGINE, SPAWNED, Contender
from benchmarks.rounds import Plan, Sample


@dataclass(frozen=True)
class Results:
    """All that was measured; a list that was not asked for is empty."""

    plan: Plan
    contenders: Sequence[Contender]
    samples: Sequence[Sample]
    cold_s: Sequence[float]
    warm_s: Sequence[float]
    replaced_s: Sequence[float]


@dataclass(frozen=True)
class Table:
    """Rows of text below a heading."""

    heading: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return f"{self.heading}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def text(self) -> str:
        """Returns the table with its columns aligned."""
        widths = [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in (self.columns, *self.rows)]  # fmt: skip
        return "\n".join([self.heading, *lines])


def tables(results: Results) -> list[Table]:
    """Returns all tables: one for each world size, and the goals."""
    return [*(_contenders(results, world) for world in results.plan.worlds), _goals(results)]


def machine() -> str:
    """Says in one line what this was measured on."""
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def to_json(results: Results) -> dict[str, Any]:
    """Returns everything as dicts, lists, strings and numbers."""
    return {
        "machine": machine(),
        "plan": {**asdict(results.plan), "worlds": list(results.plan.worlds)},
        "samples": [asdict(sample) for sample in results.samples],
        "first_verdict_s": {"cold": list(results.cold_s), "warm": list(results.warm_s)},
        "world_of_4_lost_and_replaced_s": list(results.replaced_s),
    }


def _contenders(results: Results, world: int) -> Table:
    rows: list[tuple[str, ...]] = []
    for contender in results.contenders:
        samples = rounds.of(results.samples, contender.name, world)
        rows.append(
            (
                contender.title,
                summarise([sample.fixed_s for sample in samples]).text(),
                summarise([sample.cases_per_s for sample in samples]).text(),
                summarise(rounds.ratios(results.samples, contender.name, world)).text(),
            )
        )
    return Table(f"{world} ranks", ("run by", "fixed s", "cases/s", "of the bare loop"), rows)


def _goals(results: Results) -> Table:
    rows = [_goal(*entry) for entry in _measured_goals(results)]
    return Table("Goals", ("what", "goal", "measured", ""), rows)


def _goal(what: str, least: float | None, most: float | None, figures: Sequence[float]) -> tuple[str, ...]:
    summary: Summary = summarise(figures)
    met = (least is None or summary.median >= least) and (most is None or summary.median < most)
    goal = f"at least {least:g}" if least is not None else f"under {most:g}"
    return what, goal, summary.text(), "met" if met else "missed"


def _measured_goals(results: Results) -> Iterator[tuple[str, float | None, float | None, Sequence[float]]]:
    """Yields each goal that there are figures for: what, the least allowed, the most allowed, figures."""
    times_continuous = {2: 4.0, 4: 3.0}
    names = {contender.name for contender in results.contenders}
    for base, least_of in (
        (BARE, dict.fromkeys(results.plan.worlds, 0.9)),
        (CONTINUOUS, times_continuous),
        (SPAWNED, dict.fromkeys(results.plan.worlds, 200.0)),
    ):
        for world in results.plan.worlds:
            if base.name in names and world in least_of:
                figures = rounds.ratios(results.samples, ENGINE.name, world, base.name)
                yield f"rate / {base.title}, {world} ranks", least_of[world], None, figures
    if BLIND.name in names:
        for world in results.plan.worlds:
            rates = rounds.ratios(results.samples, BLIND.name, world, ENGINE.name)
            yield f"ledger: % more time for a case, {world} ranks", None, 10.0, [100 * (rate - 1) for rate in rates]
    if results.cold_s:
        yield "s from `moe-conformance run` to the first verdict, cold", None, 6.0, results.cold_s
        yield "the same with a warm page cache", None, 5.0, results.warm_s
    if results.replaced_s:
        yield "s for a world of 4 lost and replaced", None, 0.3, results.replaced_s


@dataclass(frozen=True)
class Summary:
    """The median of some figures and their span."""

    median: float
    least: float
    greatest: float

    def text(self, digits: int = 3) -> str:
        """Returns `median (least-greatest)` with that many significant digits."""
        median, least, greatest = (_figure(value, digits) for value in (self.median, self.least, self.greatest))
        return f"{median} ({least}-{greatest})"


def summarise(figures: Sequence[float]) -> Summary:
    """Puts figures together; at least one."""
    return Summary(statistics.median(figures), min(figures), max(figures))


def _figure(value: float, digits: int) -> str:
    """Returns a figure with its significant digits, or with all those before the point."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
