"""Receive budgets whose excess is dropped: what is said of it, which slots are missing, and what the others yield."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.judging.exchange.budget_overflow_refused import rows_wanted
from moe_conformance.judging.exchange.capacity_padding import judge_dropped_gradients, judge_lost_tokens
from moe_conformance.judging.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.exchange.outputs import judge_outputs
from moe_conformance.judging.findings import Finding, count, fail, some
from moe_conformance.judging.observed.row_multiple import multiple_of, told_rows
from moe_conformance.judging.observed.run import Reading, read
from moe_conformance.judging.verdict import Tally, WrongCount, WrongDelivery, WrongGradient, WrongOutput
from moe_conformance.reference.capacity import receive_budget
from moe_conformance.reference.exchange.deliveries import Pair
from moe_conformance.workloads.records import tags


def judge_flags(reading: Reading, tally: Tally) -> None:
    """Decide whether every rank says that its buffer was too small if and only if it was. Counts the ranks.

    A rank that says nothing says no. Rows that pad an expert's to the stated multiple want room too.

    Raises:
        WrongCount: a flag without need, or none where rows found no room.
        WrongForm: the stated multiple is none.
    """
    findings = []
    lost = Counter((each.microbatch, each.pair.destination) for each in reading.matching.lost)
    for m in range(len(reading.batches)):
        for rank, rows in enumerate(rows_wanted(reading, m)):
            flagged = any(handed.overflowed for handed in reading.seen(m, rank).handed)
            if flagged != _over(reading, rows):
                dropped = count(lost[m, rank], "row") if lost[m, rank] else "nothing"
                says = "reports an overflow" if flagged else "reports no overflow"
                wants = f"it wants {_told(reading, rows)}, and the budget is"
                sentence = f"rank {rank} {says} in microbatch {m} and drops {dropped}: {wants} "
                sentence += f"{_budget(reading)}{_left_over(reading, m, rank) if flagged else ''}"
                findings.append(Finding(says, sentence, (rank,)))
            tally.add(elements=1, rank=rank)
    if findings:
        fail(WrongCount, "dispatch", findings)


def judge_dropped_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether slots are dropped where a buffer is full and nowhere else, on all shards, and count for nothing.

    y and the gradients must be exactly those of the slots that were delivered. Counts the elements of all microbatches.

    Raises:
        CorruptRow: a row is no token's.
        WrongDelivery: more rows than the budget, a slot on some shards of its expert only, or dropped without need;
            rows that nobody asked for.
        WrongOutput, WrongForm, AbsentGradient, WrongGradient: a dropped slot shows there, or one that was not does not.
    """
    judge_rows(reading, Tally())
    findings = [*_too_many(reading), *_split(reading), *_without_need(reading)]
    if findings:
        fail(WrongDelivery, "dispatch", findings)
    rest = _of_the_kept(reading)
    judge_deliveries(rest, Tally())
    for m in range(len(reading.batches)):
        delivered, budgets, multiple = _delivered(reading, m), _budgets(reading), multiple_of(reading)
        legal = receive_budget.legal_deliveries(delivered, reading.pairs[m], budgets, alignment=multiple)
        if not all(legal):  # whatever the words above leave out
            sentence = f"what rank {legal.index(False)} received of microbatch {m} is not what its budget allows"
            raise WrongDelivery("dispatch", sentence, ranks=(legal.index(False),))
    _require_finite(reading, rest)
    for judge in (judge_lost_tokens, judge_outputs, judge_dropped_gradients):
        judge(rest, Tally())
    for ranks in reading.batches:
        for rank, batch in enumerate(ranks):
            tally.add(elements=2 * batch.x_TD.numel() + batch.ids_TK.numel(), rank=rank)


def judge_room_left(reading: Reading, tally: Tally) -> None:
    """Decide whether no slot is dropped that all ranks wanting it had room for. Counts the ranks that are over budget.

    Raises:
        WrongDelivery: a buffer is not full, and a row was dropped that would have fitted.
    """
    findings = []
    for m in range(len(reading.batches)):
        delivered, wanted = _delivered(reading, m), reading.pairs[m]
        rows = Counter(pair.destination for pair in delivered)
        owners = _owners(wanted)
        budgets, multiple = _budgets(reading), multiple_of(reading)
        for source, token, slot in receive_budget.fitting_slots(delivered, wanted, budgets, alignment=multiple):
            ranks = owners[source, token, slot]
            sentence = (
                f"{_name(m, source, token, slot)} is dropped, and would have fitted: rank {ranks[0]} keeps "
                f"{rows[ranks[0]]} rows in a buffer of {_budget(reading)}"
            )
            findings.append(Finding("room", sentence, ranks))
        for rank, each in enumerate(rows_wanted(reading, m)):
            tally.add(elements=1, rank=rank, pairs=_over(reading, each))
    if findings:
        fail(WrongDelivery, "dispatch", findings)


def judge_reported(reading: Reading, tally: Tally) -> None:
    """Decide whether a rank that did not get all that it wants refused or flagged it.

    Of a budget whose size the backend chooses nothing else is known. Counts ranks and microbatches.

    Raises:
        WrongCount: rows are missing, and nothing was said.
    """
    lost = Counter((each.microbatch, each.pair.destination) for each in reading.matching.lost)
    findings = []
    for (m, rank), number in lost.items():
        seen = reading.seen(m, rank)
        if seen.overflow is None and not any(handed.overflowed for handed in seen.handed):
            sentence = f"{number} rows of microbatch {m} did not reach rank {rank}, which reports no overflow"
            findings.append(Finding("unsaid", sentence, (rank,)))
    if findings:
        fail(WrongCount, "dispatch", findings)
    for outcome in reading.ranks:
        tally.add(elements=len(outcome.microbatches), rank=outcome.rank)


# ---- which slots are missing -------------------------------------------------------------------------------------


def _too_many(reading: Reading) -> Iterator[Finding]:
    """Tell the ranks that were handed more rows than their buffer holds, those that pad them among them."""
    handed = Counter((e.microbatch, e.rank, e.expert) for e in reading.entries if e.kind == tags.TAG)
    for m in range(len(reading.batches)):
        for rank in reading.ranks:
            rows_N = [handed[m, rank.rank, expert] for expert in rank.local_experts]
            if _over(reading, rows_N):
                sentence = f"rank {rank.rank} is handed {_told(reading, rows_N)} in microbatch {m}, and its budget is "
                yield Finding("too many", f"{sentence}{_budget(reading)}", (rank.rank,))


def _split(reading: Reading) -> Iterator[Finding]:
    """Tell the slots that reached some of the ranks that want them, the shards of an expert, and not the others."""
    for m, wanted in enumerate(reading.pairs):
        reached = _owners(_delivered(reading, m))
        for slot, ranks in _owners(wanted).items():
            got = reached[slot]
            if got and (missing := tuple(rank for rank in ranks if rank not in got)):
                sentence = f"{_name(m, *slot)} reached rank {some(got)} and not rank {some(missing)}"
                yield Finding("split", f"{sentence}, which hold shards of one expert", missing)


def _without_need(reading: Reading) -> Iterator[Finding]:
    """Tell the slots that are dropped though no rank that wants them is over its budget."""
    for m, wanted in enumerate(reading.pairs):
        reached, rows = _owners(_delivered(reading, m)), rows_wanted(reading, m)
        for slot, ranks in _owners(wanted).items():
            over = any(_over(reading, rows[rank]) for rank in ranks)
            if not reached[slot] and not over:
                sentence = f"{_name(m, *slot)} is dropped, and rank {ranks[0]} is not over its budget: it wants "
                yield Finding("needless", f"{sentence}{_told(reading, rows[ranks[0]])} of {_budget(reading)}", ranks)


def _delivered(reading: Reading, microbatch: int) -> list[Pair]:
    return [match.pair for match in reading.matching.matches if match.entry.microbatch == microbatch]


def _owners(pairs: list[Pair] | tuple[Pair, ...]) -> defaultdict[tuple[int, int, int], tuple[int, ...]]:
    """Return the ranks that the pairs of every slot go to."""
    owners = defaultdict[tuple[int, int, int], tuple[int, ...]](tuple)
    for pair in pairs:
        owners[pair.source, pair.token, pair.slot] += (pair.destination,)
    return owners


def _budget(reading: Reading) -> int:
    budget = reading.outcome.workload.config.row_budget
    assert budget is not None
    return budget


def _budgets(reading: Reading) -> list[int]:
    return [_budget(reading)] * len(reading.ranks)


def _over(reading: Reading, rows_N: Sequence[int]) -> bool:
    """Return whether the rows of a rank's experts, padded, are more than its buffer holds."""
    return receive_budget.over_budget(rows_N, _budget(reading), alignment=multiple_of(reading))


def _told(reading: Reading, rows_N: Sequence[int]) -> str:
    return told_rows(rows_N, multiple_of(reading))


def _left_over(reading: Reading, microbatch: int, rank: int) -> str:
    """Say which earlier microbatch was too much for a rank, if one was."""
    for m in reversed(range(microbatch)):
        if _over(reading, rows_wanted(reading, m)[rank]):
            return f" (microbatch {m} was over it)"
    return ""


def _name(microbatch: int, source: int, token: int, slot: int) -> str:
    return f"rank {source} token {token} slot {slot} of microbatch {microbatch}"


# ---- what the others yield ---------------------------------------------------------------------------------------


def _of_the_kept(reading: Reading) -> Reading:
    """Return the reading with the slots that were dropped empty, as the router would leave them."""
    outcome = reading.outcome
    batches = []
    for m, ranks in enumerate(reading.batches):
        ids = [batch.ids_TK for batch in ranks]
        kept = receive_budget.delivered_slots(_delivered(reading, m), ids)
        batches.append(
            tuple(
                replace(batch, ids_TK=torch.where(kept_TK, batch.ids_TK, -1))
                for batch, kept_TK in zip(ranks, kept, strict=True)
            )
        )
    return read(replace(outcome, workload=replace(outcome.workload, batches=tuple(batches))))


def _require_finite(reading: Reading, rest: Reading) -> None:
    """Raise where y or a gradient is NaN or infinite, and say which slot the token lost, if it lost one.

    Raises:
        WrongOutput, WrongGradient: there is one.
    """
    outputs, gradients = list[Finding](), list[Finding]()
    for m, ranks in enumerate(reading.batches):
        for rank, batch in enumerate(ranks):
            seen = reading.seen(m, rank)
            lost_TK = (batch.ids_TK >= 0) & (rest.batches[m][rank].ids_TK < 0)
            outputs += _not_finite("y", m, rank, seen.y, lost_TK)
            gradients += _not_finite("dx", m, rank, seen.dx_TD.value, lost_TK)
            gradients += _not_finite("the gradient of the weights", m, rank, seen.dweights_TK.value, lost_TK)
    if outputs:
        fail(WrongOutput, "combine", outputs)
    if gradients:
        fail(WrongGradient, "gradient", gradients)


def _not_finite(name: str, m: int, rank: int, value: Tensor | None, lost_TK: Tensor) -> Iterator[Finding]:
    if value is None or len(value) != len(lost_TK):
        return
    for t in (~torch.isfinite(value)).any(1).nonzero().flatten().tolist():
        lost = lost_TK[t].nonzero().flatten().tolist()
        why = f", which lost slot {some(lost)} to a full buffer" if lost else ""
        sentence = f"{name} is not finite at rank {rank} token {t} of microbatch {m}{why}"
        yield Finding(f"{name} not finite{bool(lost)}", sentence, (rank,))
