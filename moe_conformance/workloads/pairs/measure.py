"""Which pairs of options the workloads of a profile have, and which none has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    for case, found, runs in _of_surfaces(plan, made):
        seen = found.possible & {*found.surface.met_by(found.surface.row_of(case.workload))}
        (found.quick if runs else found.rotation).update(seen)
    return made


def _of_surfaces(plan: Plan, made: Sequence[Found]) -> Iterator[tuple[Case, Found, bool]]:
    """Yield each workload once with its surface, and whether the profile runs it with any variant."""
    by_run = {run: found for found in made for run in found.surface.runs}
    runs = {(case.workload.name, case.cell.layout) for case in plan.cases}
    first = {(case.workload.name, case.cell.layout): case for case in reversed(plan.pool)}
    for place, case in first.items():
        if case.workload.run in by_run:
            yield case, by_run[case.workload.run], place in runs


def described(name: str) -> Iterator[str]:
    """Yield the options of a surface with their values and reasons, and its rules.

    Raises:
        LookupError: no surface has that name.
    """
    surface = next((table.surface for table in tables() if table.surface.name == name), None)
    if surface is None:
        known = ", ".join(table.surface.name for table in tables())
        raise LookupError(f"no surface {name!r}; known: {known}")
    for option in surface.options:
        yield option.name
        yield from (f"    {value:16}{why}" for value, why in option.values.items())
    yield "excluded:"
    for rule in surface.rules:
        together = " with ".join(f"{option} {' or '.join(values)}" for option, values in rule.values.items())
        yield f"    {together}: {rule.why}"


def lines(plan: Plan) -> Iterator[str]:
    """Yield a table: pairs of each surface that are possible, met in quick, in the rotation only, and excluded."""
    yield f"{'surface':18}{'options':>9}{'possible':>10}{'quick':>8}{'rotation':>10}{'by none':>9}{'excluded':>10}"
    for found in measured(plan):
        kind = "triples" if found.surface.together == 3 else "pairs"
        yield (
            f"{found.surface.name:18}{len(found.surface.options):>9}{len(found.possible):>10}{len(found.quick):>8}"
            f"{len(found.rotation - found.quick):>10}{len(found.missing):>9}{found.barred:>10}  {kind}"
        )
