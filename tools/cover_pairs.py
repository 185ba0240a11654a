"""Store rows of options in which the pairs meet that no workload has: `python -m tools.cover_pairs [SURFACE]...`.

covertable makes a covering array of each surface within its rules. Of its rows those are added, most new pairs first,
that have a pair which no workload of the quick profile's pool has. Rows that are stored stay under their names, unless
`--anew` is given; those that the options no longer have go. What a row says is held against the workload made of it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from covertable import make

from moe_conformance.backends.native import Native
from moe_conformance.workloads.pairs.cases import Table, layout_of, layouts, tables
from moe_conformance.workloads.pairs.options import Met, Row, Rule, Surface
from moe_conformance.workloads.plan import Plan


class Unmade(Exception):
    """A row cannot be made into a workload that has its values."""


def barred(rule: Rule) -> dict[str, object]:
    """Return a rule as a constraint of covertable."""
    parts = [{"operator": "in", "left": name, "values": [*values]} for name, values in rule.values.items()]
    return {"operator": "not", "condition": {"operator": "and", "conditions": parts}}


def array(surface: Surface) -> list[Row]:
    """Return rows that no rule bars, in which all possible pairs of a surface meet, or triples."""
    factors = {option.name: [*option.values] for option in surface.options}
    return [dict(row) for row in make(factors, strength=surface.together, constraints=[*map(barred, surface.rules)])]


def added(surface: Surface, met: Iterable[Met]) -> list[Row]:
    """Return the rows to add to what is met, most new pairs first."""
    missing, rows = set(surface.possible()) - {*met}, array(surface)
    news = [(row, frozenset(surface.met_by(row))) for row in rows]
    found: list[Row] = []
    while missing:
        row, new = max(news, key=lambda each: len(each[1] & missing))
        if not new & missing:
            raise Unmade(f"{surface.name}: the array has no row with {sorted(next(iter(missing)))}")
        missing -= new
        found.append(row)
    return found


def checked(table: Table, name: str, row: Row) -> Row:
    """Return a row in the order of options, if the workload made of it has its values.

    Raises:
        Unmade: it cannot be drawn, or has others.
    """
    try:
        workload = table.surface.make(name, row, layouts()[layout_of(row)])
        found = table.surface.row_of(workload)
        assert len(workload.batches[:]) == len(workload.batches)  # batches are drawn when they are looked at
    except ValueError as error:
        raise Unmade(f"{table.surface.name}: {dict(row)}: {error}") from error
    if found != row:
        apart = {key: (row[key], found.get(key)) for key in row if row[key] != found.get(key)}
        raise Unmade(f"{table.surface.name}: {dict(row)} is made into a workload with other values: {apart}")
    return {option.name: row[option.name] for option in table.surface.options}


@dataclass
class Stored:
    """The rows of a surface, by name."""

    table: Table
    rows: dict[str, Row]

    def add(self, rows: Sequence[Row]) -> None:
        """Number the rows from the first number that no stored one has.

        Raises:
            Unmade: rows that cannot be made, each with the reason.
        """
        numbers, problems = [int(name.rpartition("-")[2]) for name in self.rows], []
        for number, row in enumerate(rows, max(numbers, default=0) + 1):
            name = f"pairs-{self.table.surface.name}-{number}"
            try:
                self.rows[name] = checked(self.table, name, row)
            except Unmade as error:
                problems.append(str(error))
        if problems:
            raise Unmade("\n".join(problems))

    def write(self) -> None:
        """Write the file."""
        self.table.file.parent.mkdir(exist_ok=True)
        with self.table.file.open("w", encoding="utf-8", newline="") as file:
            names = [option.name for option in self.table.surface.options]
            writer = csv.DictWriter(file, ["name", *names], lineterminator="\n")
            writer.writeheader()
            writer.writerows({"name": name, **row} for name, row in self.rows.items())


def kept(table: Table) -> dict[str, Row]:
    """Return the stored rows that the options and rules still have."""
    values = {option.name: option.values for option in table.surface.options}
    whole = {name: row for name, row in table.rows.items() if row.keys() == values.keys()}
    known = {name: row for name, row in whole.items() if all(row[option] in values[option] for option in values)}
    return {name: row for name, row in known.items() if table.surface.barred_by(row) is None}


def main() -> None:
    """Write the rows of the named surfaces, or of all."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surfaces", nargs="*", metavar="SURFACE", help="as `moe-conformance list pairs` names them")
    parser.add_argument("--anew", action="store_true", help="forget what is stored")
    given = parser.parse_args()
    pool = [case.workload for case in Plan(Native(), "cpu", "quick").pool if not case.workload.rotates]
    for table in tables():
        surface = table.surface
        if given.surfaces and surface.name not in given.surfaces:
            continue
        stored = Stored(table, {} if given.anew else kept(table))
        first = {(each.name, each.layout): each for each in pool if each.run in surface.runs}
        read = [*map(surface.row_of, first.values()), *stored.rows.values()]
        before = len(stored.rows)
        try:
            stored.add(added(surface, {met for row in read for met in surface.met_by(row)}))
        except Unmade as error:
            parser.exit(1, f"{error}\n")
        stored.write()
        print(f"{surface.name}: {before} rows kept, {len(stored.rows) - before} added")


if __name__ == "__main__":
    main()
