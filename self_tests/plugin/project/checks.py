"""Checks of one workload, so that every variant of the toy ends in its verdict."""

from __future__ import annotations

from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload


def even(workload: Workload) -> bool:
    """Whether this is the one workload."""
    return workload.name == "even"


@requirement("EXCH-05", run=ExchangeStep(), when=even)
def test_outputs(reading: Reading, tally: Tally) -> None:
    """The output is right."""
    judge_outputs(reading, tally)


@requirement("EXCH-09", run=ExchangeStep(), when=even)
def test_finished(reading: Reading, tally: Tally) -> None:
    """Every rank finishes."""
    for rank in reading.ranks:
        assert "ok" == rank.status
        tally.add(pairs=1, rank=rank.rank)
