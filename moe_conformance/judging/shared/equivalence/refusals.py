"""Judges of equivalent runs that a backend may refuse on every rank: strided inputs, a backward with a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_conformance.judging.findings import some
from moe_conformance.judging.observed.finished import place_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.deliveries import judge_same_deliveries
from moe_conformance.judging.shared.equivalence.runs import Ran, judge_alike, read_twin, those_that_ran
from moe_conformance.judging.verdict import Raised, Tally
from moe_conformance.scenarios.outcome import RankOutcome


def judge_strided(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide `judge_alike` of equivalent runs whose inputs have other strides, or whether all ranks refuse them.

    The rows that the experts receive are equal to the bit. An error counts as a refusal if every rank raised it in
    the first forward, before any collective of that forward.
    """
    present = those_that_ran([_or_refused(twin_run) for twin_run in ran])
    for twin_run in present:
        judge_same_deliveries(reading, tally, twin_run.twin, read_twin(twin_run))
    judge_alike(reading, present, tally)


def judge_with_a_graph(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide `judge_alike` of equivalent runs whose backward keeps its graph, or whether all ranks refuse it."""
    judge_alike(reading, [_or_raised_backward(twin_run) for twin_run in ran], tally)


def _or_raised_backward(ran: Ran) -> Ran:
    """Return an equivalent run as not run if every rank raised an error in its backward."""
    ranks = () if ran.outcome is None else ran.outcome.ranks
    if not ranks or not all(rank.status == "raised" and rank.reached.startswith("backward:") for rank in ranks):
        return ran
    return replace(ran, outcome=None, why_not=f"refused on every rank with {ranks[0].error}")


def _or_refused(ran: Ran) -> Ran:
    """Return an equivalent run as not run if every rank refused it in its first forward.

    Raises:
        Raised: some ranks refused, and others had begun and wait for them.
    """
    if ran.outcome is None:
        return ran
    refused = [rank for rank in ran.outcome.ranks if _refused_at_once(rank)]
    if len(refused) == len(ran.outcome.ranks):
        return replace(ran, outcome=None, why_not=f"refused with {refused[0].error}")
    if not refused:
        return ran
    numbers = tuple(rank.rank for rank in refused)
    others = some(f"rank {rank.rank}" for rank in ran.outcome.ranks if rank.rank not in numbers)
    by = some(f"rank {number}" for number in numbers)
    sentence = f"run {ran.twin.how}, {by} refused at once with {refused[0].error}, and {others} did not"
    mismatch = Raised("run", sentence, ranks=numbers)
    mismatch.place = place_of(refused[0])
    raise mismatch


def _refused_at_once(rank: RankOutcome) -> bool:
    """Return whether a rank raised in its first forward, before any collective of that forward."""
    at_once = rank.phases and len(rank.ledger) <= rank.phases[0][1]  # no collective since the phase began
    return bool(at_once) and rank.status == "raised" and rank.reached in ("forward:0", "dispatch:0")
