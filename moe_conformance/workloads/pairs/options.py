"""The records of the options of a surface: values that behave differently, and rules for what cannot be together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.runs import Run
from moe_conformance.workloads.records.workload import Workload

Row = Mapping[str, str]  # the value of each option
Met = frozenset[tuple[str, str]]  # values of two options (three of a router) that are in one workload


@dataclass(frozen=True)
class Option:
    """An option of a surface, and how its value is read from a workload.

    `values` says of each value why it behaves unlike the others. What is read and not among them is no value: such a
    workload meets no pair of this option.
    """

    name: str
    values: Mapping[str, str]
    read: Callable[[Workload], str]


@dataclass(frozen=True)
class Rule:
    """Values of two or more options that cannot be together, and why."""

    values: Mapping[str, Collection[str]]
    why: str

    def bars(self, row: Row) -> bool:
        """Return whether a row, complete or not, has such values of all options of the rule."""
        return all(row.get(name) in values for name, values in self.values.items())


@dataclass(frozen=True)
class Surface:
    """The options of the workloads of some runs, and how a workload is made of a value for each.

    `make(name, row, layout)` returns the workload on the layout that the row's option `layout` names, or on one rank.
    With `together` 3 every three values are to meet. A surface that does not depend on the exchange runs with the first
    variant.
    """

    name: str
    runs: tuple[Run, ...]
    options: tuple[Option, ...]
    rules: tuple[Rule, ...]
    make: Callable[[str, Row, Layout], Workload]
    together: int = 2
    first_variant: bool = False

    def row_of(self, workload: Workload) -> dict[str, str]:
        """Return the values that a workload has, by option; an option of which it has none is left out."""
        read = {option.name: option.read(workload) for option in self.options}
        return {option.name: read[option.name] for option in self.options if read[option.name] in option.values}

    def barred_by(self, row: Row) -> Rule | None:
        """Return the first rule that bars a row, complete or not."""
        return next((rule for rule in self.rules if rule.bars(row)), None)

    def met_by(self, row: Row) -> Iterator[Met]:
        """Yield all pairs of a row, or triples."""
        return map(frozenset, combinations(sorted(row.items()), self.together))

    def tuples(self) -> Iterator[Met]:
        """Yield all pairs of values of different options, or triples, possible or not."""
        for options in combinations(self.options, self.together):
            for values in product(*(option.values for option in options)):
                yield frozenset(zip((option.name for option in options), values, strict=True))

    def completed(self, row: Row) -> dict[str, str] | None:
        """Return a row with the given values and one of every other option that no rule bars; None if there is none."""
        if self.barred_by(row) is not None:
            return None
        option = next((option for option in self.options if option.name not in row), None)
        if option is None:
            return dict(row)
        tried = (self.completed({**row, option.name: value}) for value in option.values)
        return next((found for found in tried if found is not None), None)

    def possible(self) -> frozenset[Met]:
        """Return the pairs, or triples, that some row has that no rule bars."""
        return frozenset(met for met in self.tuples() if self.completed(dict(met)) is not None)
