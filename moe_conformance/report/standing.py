"""The standing of each requirement with each variant on each layout, by which floors and runs are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_conformance.report.records import CASE_CRASHED, FAILING, Record, Verdict, overall
from moe_conformance.report.unjudged import BY_DESIGN
from moe_conformance.workloads.records.told import CONDITIONS, DTYPES, value_of_K

Place = tuple[str, str, str]  # requirement, variant, layout; "any" twice for a check without a cell

JUDGED: frozenset[Verdict] = frozenset({"pass", "waived", "not kept", *FAILING}) - {"infrastructure", "error"}


@dataclass(frozen=True)
class Standing:
    """The result of all cases of one place.

    Attributes:
        verdict: Of all of them, see `records.overall`.
        judged: The number of judged cases.
        cases: The number of cases.
        worst: The largest observed/allowed error of those that passed.
        passed: The number of cases that passed.
        told: The number of those that failed, or were not run since they crashed. A run tells these by themselves.
        traits: The number of cases that passed, by trait.
        count: The number of cases by verdict.
        too_large: Whether all cases need more ranks than the run has; what is not applicable by design is no such case.
    """

    verdict: Verdict
    judged: int
    cases: int
    worst: float
    passed: int = 0
    told: int = 0
    traits: Mapping[str, int] = field(default_factory=dict)
    count: Mapping[Verdict, int] = field(default_factory=dict)
    too_large: bool = False

    @property
    def reached(self) -> int:
        """What is compared with the number of cases that passed before."""
        return self.passed + self.told


def standings(records: Iterable[Record]) -> dict[Place, Standing]:
    """Return the standing of each place, in the order of the records.

    A failure of a check may be reported under some of the requirements that the check decides, and that of a case that
    crashed under another one (EXCH-09): it is counted as told in the places of the others too.
    """
    records = list(records)
    decided: dict[str, set[str]] = {}
    for record in records:
        decided.setdefault(_check(record), set()).update(record.requirements)
    found: dict[Place, list[Record]] = {}
    elsewhere: dict[Place, list[Record]] = {}
    for record in records:
        for requirement in record.requirements:
            found.setdefault((requirement, *cell_of(record)), []).append(record)
        if record.verdict in FAILING:
            for requirement in decided[_check(record)].difference(record.requirements):
                elsewhere.setdefault((requirement, *cell_of(record)), []).append(record)
    for place in elsewhere:
        found.setdefault(place, [])
    return {place: _standing(of_place, elsewhere.get(place, ())) for place, of_place in found.items()}


def _check(record: Record) -> str:
    return record.node.partition("[")[0]


def _standing(records: Iterable[Record], elsewhere: Sequence[Record]) -> Standing:
    """Return the standing of a place, given its records, and the failures of its checks under other requirements."""
    count: Counter[Verdict] = Counter()
    traits: Counter[str] = Counter()
    worst, told, too_large = 0.0, sum(record.cases for record in elsewhere), not elsewhere
    for record in records:
        count[record.verdict] += record.cases
        too_large &= record.verdict == "not applicable" and not record.message.startswith(BY_DESIGN)
        if record.verdict == "pass":
            worst = max(worst, record.worst)
            traits.update(dict.fromkeys(counted(record.traits), record.cases))
        elif record.verdict in FAILING or record.kind == CASE_CRASHED:
            told += record.cases
    verdict = overall(count or (record.verdict for record in elsewhere))
    judged = sum(count[each] for each in JUDGED)
    return Standing(verdict, judged, count.total(), worst, count["pass"], told, traits, count, too_large)


def counted(traits: Iterable[str]) -> list[str]:
    """Return the traits by which cases are counted: dtype, K, and the conditions that a workload may have."""
    return [trait for trait in traits if trait in DTYPES or trait in CONDITIONS or value_of_K(trait) is not None]


def cell_of(record: Record) -> tuple[str, str]:
    """Return the variant and the layout of a record; "any" for each that it has not."""
    return record.variant or "any", record.layout or "any"


def in_words(place: Place) -> str:
    """Return a place in words.

    >>> in_words(("EXCH-01", "alltoall", "ep2")), in_words(("GROUP-01", "any", "any"))
    ('EXCH-01, alltoall on ep2', 'GROUP-01')
    """
    requirement, variant, layout = place
    return requirement if variant == layout == "any" else f"{requirement}, {variant} on {layout}"


def places(records: Iterable[Record]) -> set[Place]:
    """Return the places of records."""
    return {(requirement, *cell_of(record)) for record in records for requirement in record.requirements}
