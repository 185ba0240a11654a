"""Rows at sizes that no test machine has: whoever owns an expert serves its own exchange group alone."""

from __future__ import annotations

from moe_conformance.judging.findings import Finding, fail, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import Tally, WrongDelivery
from moe_conformance.workloads.records import tags


def judge_own_group(reading: Reading, tally: Tally) -> None:
    """Decide whether every row that a rank is handed is a token of a rank of its own exchange group (ep x etp).

    Rows say themselves whose they are; padding, and rows that are no token's, say nothing.

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
        own = some(group_of[entry.rank])
        sentence = f"{entry.place} is {entry.token_name}, which is not of that rank's exchange group ({own})"
        findings.append(Finding("another group", sentence, (entry.rank, entry.source)))
    if findings:
        fail(WrongDelivery, "dispatch", findings)
