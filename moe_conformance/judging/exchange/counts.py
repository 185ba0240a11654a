"""Counts: what a backend claims about how many rows each local expert got."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from moe_conformance.judging.findings import Finding, count, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered, Tally, WrongCount
from moe_conformance.workloads.records import tags


def judge_counts(reading: Reading, tally: Tally) -> None:
    """Decide whether the claimed counts are those of the rows handed over, and those of the routing.

    Per rank, microbatch and local expert, summed over calls: the claim lies between the number of token rows and
    that number plus the all-zero rows for that expert (padding), and less its padding it is what is routed there.

    Raises:
        NotOffered: no rank claims counts.
        WrongCount: a claim disagrees with the rows, with the routing, or has not one number per local expert; or a
            rank claims nothing while others do.
    """
    if not any(call.counts_N is not None for rank in reading.ranks for m in rank.microbatches for call in m.handed):
        raise NotOffered("the backend claims no counts")
    findings: list[Finding] = []
    routed = [Counter((pair.destination, pair.expert) for pair in pairs) for pairs in reading.pairs]
    handed = Counter((e.microbatch, e.rank, e.expert, e.kind == tags.PADDING) for e in reading.entries)
    for rank in reading.ranks:
        for m, seen in enumerate(rank.microbatches):
            claimed = _claimed(rank.rank, m, [call.counts_N for call in seen.handed], len(rank.local_experts), findings)
            if claimed is None:
                continue
            for expert, claim in zip(rank.local_experts, claimed, strict=True):
                rows, padding = handed[m, rank.rank, expert, False], handed[m, rank.rank, expert, True]
                wrong = _wrong(claim, rows, padding, routed[m][rank.rank, expert])
                if wrong:
                    sentence = f"rank {rank.rank} claims {count(claim, 'row')} for expert {expert}{_of(m)}{wrong}"
                    findings.append(Finding("count", sentence, (rank.rank,)))
                tally.add(elements=1, rank=rank.rank)
    if findings:
        fail(WrongCount, "dispatch", findings)


def _claimed(
    rank: int, microbatch: int, counts: list[Tensor | None], held: int, findings: list[Finding]
) -> list[int] | None:
    """Sum the claims of the calls of one microbatch; None if a call claims nothing or too few numbers."""
    total = [0] * held
    for counts_N in counts:
        if counts_N is None:
            sentence = f"rank {rank} claims no counts{_of(microbatch)}, though counts are claimed elsewhere"
            findings.append(Finding("silent", sentence, (rank,)))
            return None
        claim = counts_N.tolist()
        if len(claim) != held:
            sentence = f"rank {rank} claims counts for {count(len(claim), 'expert')}{_of(microbatch)} and holds {held}"
            findings.append(Finding("length", sentence, (rank,)))
            return None
        total = [a + b for a, b in zip(total, claim, strict=True)]
    return total if counts else None


def _wrong(claim: int, rows: int, padding: int, routed: int) -> str | None:
    if not rows <= claim <= rows + padding:
        return f" and hands over {rows}" + (f" and {padding} of padding" if padding else "")
    if rows != routed:
        zeros = f", of which {claim - rows} {'holds' if claim - rows == 1 else 'hold'} only zeros,"
        return f"{zeros if claim > rows else ''} where {count(routed, 'pair')} should reach it"
    return None


def _of(microbatch: int) -> str:
    return f" in microbatch {microbatch}" if microbatch else ""
