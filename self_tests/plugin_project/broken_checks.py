"""Checks that are at fault themselves."""

from __future__ import annotations

from moe_conformance.judging.reading import Reading
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records import Workload


def right(workload: Workload) -> bool:
    """Whether this is the one workload of the variant that is right."""
    return workload.name == "even" and workload.config.variant == "right"


@requirement("EXCH-07", kind="probe", when=right)
def test_nothing(reading: Reading, tally: Tally) -> None:
    """Nothing is compared."""
    del reading, tally


@requirement("EXCH-08", kind="probe", when=right)
def test_broken(reading: Reading, tally: Tally) -> None:
    """The suite itself fails."""
    tally.add(elements=len(reading.outcome.ranks) // 0)
