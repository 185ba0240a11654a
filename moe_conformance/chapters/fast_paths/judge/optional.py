"""Judge of the optional dependencies that a backend names as in use."""

from __future__ import annotations

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered, Tally, WrongForm


def judge_optional_named(reading: Reading, tally: Tally) -> None:
    """Decide whether every rank names the optional dependencies that it uses, and no hidden one.

    Raises:
        NotOffered: none was hidden, and none that can be hidden is named.
        WrongForm: a hidden one is named as in use; or one was hidden, and none is named at all.
    """
    findings = []
    for rank in reading.ranks:
        used = {name.strip() for names in rank.optional for name in names.split(",")} - {"none"}
        for name in sorted(used & {*rank.hidden}):
            sentence = f"rank {rank.rank} was built without {name}, and names it in resolved['optional']"
            findings.append(Finding("hidden", sentence, (rank.rank,)))
        if rank.hidden and not rank.optional:
            sentence = (
                f"rank {rank.rank} was built without {', '.join(rank.hidden)}, and names nothing in "
                "resolved['optional']; expected: what took their place, or 'none'"
            )
            findings.append(Finding("unnamed", sentence, (rank.rank,)))
        tally.add(pairs=len(rank.optional), rank=rank.rank)
    if findings:
        fail(WrongForm, "experts", findings)
    if not any(rank.hidden or rank.optional for rank in reading.ranks):
        raise NotOffered("nothing is named in resolved['optional']")
