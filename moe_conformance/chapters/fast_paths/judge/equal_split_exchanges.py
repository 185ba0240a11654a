"""Judge of exchanges with equal splits, from the ledger."""

from __future__ import annotations

from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import carries_rows, exchange_phases
from moe_conformance.judging.verdict import Tally, WrongCount


def judge_equal_splits(reading: Reading, tally: Tally) -> None:
    """Decide whether all splits of every all-to-all of rows are equal, in dispatch, combine and backward.

    The ranks of a group then have the same split, since the sizes that are sent and received fit together.

    Raises:
        WrongCount: the splits of a rank differ within a call.
        WrongCollectives: the ledgers of two ranks do not fit together.
    """
    with tally.uncounted() as uncounted:
        judge_agreement(reading.outcome, uncounted)
    hidden, findings = reading.outcome.workload.config.hidden, []
    for rank in reading.ranks:
        for phase, calls in exchange_phases(rank):
            for entry in calls:
                if entry.op.startswith("all_to_all") and carries_rows(entry, hidden):
                    if len(set(found := _splits(entry))) > 1:
                        what = f"{entry.op} of {phase} has the splits {list(found)}"
                        said = f"rank {rank.rank}: {what} instead of equal ones"
                        findings.append(Finding("splits", said, (rank.rank,)))
                    tally.add(pairs=1, rank=rank.rank)
    if findings:
        fail(WrongCount, "run", findings)


def _splits(entry: Entry) -> tuple[int, ...]:
    """Return the rows sent to and received from every rank; () for even splits, which calls leave out."""
    if entry.op == "all_to_all":  # calls with lists of tensors
        return tuple(shape[0] for shape in (*entry.shapes_in, *entry.shapes_out))
    return (*(entry.in_splits or ()), *(entry.out_splits or ()))
