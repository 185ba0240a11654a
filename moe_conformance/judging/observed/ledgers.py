"""Judges of the collectives in the ranks' ledgers: whether ranks agree, and whether handles were waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moe_conformance.judging.findings import Finding, some
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import (
    AbandonedCollective,
    Hazardous,
    Mismatch,
    NotOffered,
    Tally,
    WrongCollectives,
)
from moe_conformance.scenarios.outcome import Outcome

_HAZARDS: dict[str, type[Mismatch]] = {
    "output touched": Hazardous,
    "output written": Hazardous,
    "sent data changed": Hazardous,
    "never waited": AbandonedCollective,
}


def judge_agreement(outcome: Outcome, tally: Tally) -> None:
    """Decide whether the ranks of every group called the same collectives, with sizes that fit together.

    Ranks that failed are judged by the calls that they made before.

    Raises:
        WrongCollectives: the ledgers of two ranks do not fit together.
        NotOffered: the ledger has no collective of any rank.
    """
    if outcome.disagreements:
        first = outcome.disagreements[0]
        more = len(outcome.disagreements) - 1
        rest = f"; {more} more disagreements, which may follow from it" if more else ""
        raise WrongCollectives("run", f"{first}{rest}", ranks=first.blamed)
    _count(outcome, tally)


def judge_hazards(outcome: Outcome, tally: Tally, *kinds: str) -> None:
    """Decide whether every rank left the buffers and handles of its asynchronous collectives alone until the wait.

    `kinds` are the hazards to look for. Blocking calls are counted too, although they cannot have a hazard.

    Raises:
        Hazardous: a buffer of a collective was read or written before its wait.
        AbandonedCollective: a handle was never waited for.
        RunFailed: there is no hazard, but a rank did not finish.
        NotOffered: the ledger has no collective of any rank.
    """
    ranks_by_hazard: dict[str, list[int]] = {}
    found = [(hazard, rank.rank) for rank in outcome.ranks for hazard in rank.hazards if hazard.kind in kinds]
    for hazard, rank in found:
        ranks_by_hazard.setdefault(str(hazard), []).append(rank)
    if found:
        sentences = [f"{hazard} ({times(ranks)})" for hazard, ranks in ranks_by_hazard.items()]
        raise _HAZARDS[found[0][0].kind]("run", some(sentences), ranks=tuple(sorted({rank for _, rank in found})))
    require_finished(outcome)
    _count(outcome, tally)


def early_read(reading: Reading, findings: Sequence[Finding]) -> str:
    """Return a note that the wrong values were read before `wait()`, or without one, if that is known, else "".

    It is known if the ledger recorded the read, or if outputs of asynchronous collectives are NaN until the wait
    ("poisoned") and a finding is of a value that is not finite. A handle without any wait is known of every run.
    """
    abandoned = [found for rank in reading.ranks for found in rank.hazards if found.kind == "never waited"]
    if abandoned:
        return f"; likely cause: {abandoned[0]}"
    touched = [found for rank in reading.ranks for found in rank.hazards if found.kind == "output touched"]
    if touched:
        return f"; likely cause: {touched[0]}"
    spoilt = any(found.kind == "not finite" or "(not finite)" in found.sentence for found in findings)
    if reading.outcome.workload.asynchrony == "poisoned" and spoilt:
        return "; likely cause: the output of an asynchronous collective was read before wait(), until which it is NaN"
    return ""


def times(ranks: list[int]) -> str:
    """Return the ranks on which something happened, with how often if more than once on one rank.

    >>> times([0, 1, 1])
    'on rank 0, 2 times on rank 1'
    """
    said = [(f"{count} times " if count > 1 else "", rank) for rank, count in sorted(Counter(ranks).items())]
    return ", ".join(f"{often}on rank {rank}" for often, rank in said)


def _count(outcome: Outcome, tally: Tally) -> None:
    for rank in outcome.ranks:
        tally.add(pairs=len(rank.ledger), rank=rank.rank)
    if not any(rank.ledger for rank in outcome.ranks):
        raise NotOffered("the ledger has no collective of any rank")
