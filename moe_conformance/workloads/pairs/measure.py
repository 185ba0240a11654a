"""Which pairs of options the workloads of a profile have, and which none has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from moe_conformance.workloads.pairs.cases import tables
from moe_conformance.workloads.pairs.options import Met, Surface
from moe_conformance.workloads.plan import Case, Plan


@dataclass
class Found:
    """The possible pairs of a surface, or triples, and those that workloads have."""

    surface: Surface
    barred: int  # pairs that a rule excludes, or several together
    possible: frozenset[Met]
    quick: set[Met] = field(default_factory=set)  # what the quick profile runs has them
    rotation: set[Met] = field(default_factory=set)  # what it leaves out has them

    @property
    def missing(self) -> frozenset[Met]:
        """Possible pairs that no workload has."""
        return self.possible - self.quick - self.rotation


def measured(plan: Plan) -> list[Found]:
    """Return what the cases of a plan of the quick profile have of every surface: those that run, and the others."""
    made = []
    for table in tables():
        every, possible = sum(1 for _ in table.surface.tuples()), table.surface.possible()
        made.append(Found(table.surface, every - len(possible), possible))
    for case, found in _of_surfaces(plan.pool, made):
        seen = found.possible & {*found.surface.met_by(found.surface.row_of(case.workload))}
        (found.quick if plan.selected(case) else found.rotation).update(seen)
    return made


def _of_surfaces(cases: Iterable[Case], made: Iterable[Found]) -> Iterator[tuple[Case, Found]]:
    """Yield each case with its surface; of cases that differ in the variant alone the first, selected ones first."""
    by_run = {run: found for found in made for run in found.surface.runs}
    for case in cases:
        if case.workload.run in by_run:
            yield case, by_run[case.workload.run]


def lines(plan: Plan) -> Iterator[str]:
    """Yield a table: pairs of each surface that are possible, met in quick, in the rotation only, and excluded."""
    yield f"{'surface':18}{'options':>9}{'possible':>10}{'quick':>8}{'rotation':>10}{'by none':>9}{'excluded':>10}"
    for found in measured(plan):
        kind = "triples" if found.surface.together == 3 else "pairs"
        yield (
            f"{found.surface.name:18}{len(found.surface.options):>9}{len(found.possible):>10}{len(found.quick):>8}"
            f"{len(found.rotation - found.quick):>10}{len(found.missing):>9}{found.barred:>10}  {kind}"
        )
