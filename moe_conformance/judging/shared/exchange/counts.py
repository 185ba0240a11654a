"""Judge of counts: the number of rows of each local expert, as the backend reports it (tokens per expert)."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, count
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered, WrongCount
from moe_conformance.workloads.records import tags


@judge(WrongCount, "dispatch")
def judge_counts(reading: Reading) -> Comparisons:
    """Decide whether the reported counts agree with the delivered rows and with the routing.

    Per rank, microbatch and local expert, summed over calls: the count lies between the number of token rows and
    that number plus the all-zero rows for that expert (padding), and without its padding it is the routed pairs. With
    padding to capacity, whose rows may hold any token, it lies between the routed pairs and the rows.

    Raises:
        NotOffered: no rank reports counts.
        WrongCount: a count disagrees with the rows, with the routing, or there is not one per local expert; or a
            rank reports none while others do.
    """
    microbatches = [seen for rank in reading.ranks for seen in rank.microbatches]
    if not any(call.counts_N is not None for seen in microbatches for call in seen.exchange.handed):
        raise NotOffered("the backend reports no tokens per expert")
    wrong_count = _wrong_with_capacity if reading.outcome.workload.config.capacity.padded else _wrong
    routed = [Counter((pair.destination, pair.expert) for pair in pairs) for pairs in reading.pairs]
    handed = Counter((e.microbatch, e.rank, e.expert, e.kind == tags.PADDING) for e in reading.entries)
    for rank in reading.ranks:
        for m, seen in enumerate(rank.microbatches):
            claimed = _claimed(rank.rank, m, [call.counts_N for call in seen.exchange.handed], len(rank.local_experts))
            if isinstance(claimed, Finding):
                yield claimed
                continue
            for expert, claim in zip(rank.local_experts if claimed else (), claimed, strict=True):
                rows, padding = handed[m, rank.rank, expert, False], handed[m, rank.rank, expert, True]
                if wrong := wrong_count(claim, rows, padding, routed[m][rank.rank, expert]):
                    sentence = f"rank {rank.rank} reports {count(claim, 'row')} for expert {expert}{_of(m)}{wrong}"
                    yield Finding("count", sentence, (rank.rank,))
                yield Comparison(rank.rank, elements=1)


def _claimed(rank: int, microbatch: int, counts: list[Tensor | None], held: int) -> list[int] | Finding:
    """Return the sum of the counts over the calls of one microbatch, [] without calls, or what is wrong with a call.

    It is wrong if it reports no counts, or another number of them than local experts.
    """
    total = [0] * held if counts else []
    for counts_N in counts:
        if counts_N is None:
            sentence = f"rank {rank} reports no tokens per expert{_of(microbatch)}, but other calls or ranks do"
            return Finding("silent", sentence, (rank,))
        if len(counts_N) != held:
            reported = f"rank {rank} reports tokens per expert for {count(len(counts_N), 'expert')}{_of(microbatch)}"
            return Finding("length", f"{reported} instead of {held}, the number of its local experts", (rank,))
        total = [a + b for a, b in zip(total, counts_N.tolist(), strict=True)]
    return total


def _wrong(claim: int, rows: int, padding: int, routed: int) -> str | None:
    if not rows <= claim <= rows + padding:
        return f" and delivers {rows}" + (f" and {padding} of padding" if padding else "")
    if rows != routed:
        zeros = f", of which {claim - rows} {'holds' if claim - rows == 1 else 'hold'} only zeros"
        return f"{zeros if claim > rows else ''}; expected: {count(routed, 'routed pair')}"
    return None


def _wrong_with_capacity(claim: int, rows: int, padding: int, routed: int) -> str | None:
    if routed <= claim <= rows + padding:
        return None
    return f"; expected: from {count(routed, 'routed pair')} to {count(rows + padding, 'delivered row')}"


def _of(microbatch: int) -> str:
    return f" in microbatch {microbatch}" if microbatch else ""
