"""The standing of each requirement with each variant on each layout, by which floors and runs are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moe_conformance.report.records import FAILING, Record, Verdict, overall

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
    """

    verdict: Verdict
    judged: int
    cases: int
    worst: float


def standings(records: Iterable[Record]) -> dict[Place, Standing]:
    """Return the standing of each place, in the order of the records."""
    found: dict[Place, list[Record]] = {}
    for record in records:
        for requirement in record.requirements:
            found.setdefault((requirement, record.variant or "any", record.layout or "any"), []).append(record)
    return {place: _standing(of_place) for place, of_place in found.items()}


def _standing(records: Iterable[Record]) -> Standing:
    count: Counter[Verdict] = Counter()
    worst = 0.0
    for record in records:
        count[record.verdict] += record.cases
        if record.verdict == "pass":
            worst = max(worst, record.worst)
    return Standing(overall(count), sum(count[verdict] for verdict in JUDGED), count.total(), worst)


def in_words(place: Place) -> str:
    """Return a place in words.

    >>> in_words(("EXCH-01", "alltoall", "ep2")), in_words(("GROUP-01", "any", "any"))
    ('EXCH-01, alltoall on ep2', 'GROUP-01')
    """
    requirement, variant, layout = place
    return requirement if variant == layout == "any" else f"{requirement}, {variant} on {layout}"


def places(records: Iterable[Record]) -> set[Place]:
    """Return the places of records."""
    found: set[Place] = set()
    for record in records:
        for requirement in record.requirements:
            found.add((requirement, record.variant or "any", record.layout or "any"))
    return found
