"""Judge of deliveries at sizes that no test machine has: rows come from the receiver's exchange group only."""

from __future__ import annotations

from moe_conformance.judging.findings import Finding, fail, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import Tally, WrongDelivery
from moe_conformance.workloads.records import tags


def judge_own_group(reading: Reading, tally: Tally) -> None:
    """Decide whether every row that a rank receives is a token of a rank of its exchange group (ep x etp).

    The tag of a row names its token; padding and rows of no token are ignored.

    Raises:
        WrongDelivery: a row comes from a rank of another group.
    """
    group_of = {rank: group for group in reading.outcome.workload.layout.groups()["ep_etp"] for rank in group}
    findings = []
    for entry in reading.entries:
        if entry.kind != tags.TAG:
            continue
        if group_of.get(entry.source) == group_of[entry.rank]:
            tally.add(pairs=1, rank=entry.rank)
            continue
        members = some(group_of[entry.rank])
        sentence = f"{entry.place} is {entry.token_name}, which is outside of that rank's exchange group ({members})"
        findings.append(Finding("another group", sentence, (entry.rank, entry.source)))
    if findings:
        fail(WrongDelivery, "dispatch", findings)
