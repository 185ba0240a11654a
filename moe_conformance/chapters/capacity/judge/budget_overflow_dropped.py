"""Judges of receive buffers that drop rows when full: overflow flags, dropped slots, and the remaining results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.chapters.capacity.judge.budget_overflow_refused import rows_wanted
from moe_conformance.chapters.capacity.judge.capacity_padding import judge_dropped_gradients, judge_lost_tokens
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, count, fail, some
from moe_conformance.judging.observed.claims import rows_words
from moe_conformance.judging.observed.run import Reading, read
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally, WrongCount, WrongDelivery, WrongGradient, WrongOutput
from moe_conformance.reference.capacity import receive_budget
from moe_conformance.reference.exchange.deliveries import Pair
from moe_conformance.workloads.records import tags


@judge(WrongCount, "dispatch")
def judge_flags(reading: Reading) -> Comparisons:
    """Decide whether every rank reports an overflow if and only if its receive buffer is too small.

    Counts the ranks. A rank without a flag reports no overflow. Padding of experts to the claimed multiple takes space
    too.

    Raises:
        WrongCount: a flag although all rows fit, or no flag although some did not.
    """
    lost = Counter((missing.microbatch, missing.pair.destination) for missing in reading.matching.lost)
    for m in range(len(reading.batches)):
        for rank, rows in enumerate(rows_wanted(reading, m)):
            flagged = any(handed.overflowed for handed in reading.seen(m, rank).exchange.handed)
            if flagged == _over(reading, rows):
                yield Comparison(rank, elements=1)
                continue
            dropped = count(lost[m, rank], "row") if lost[m, rank] else "nothing"
            says = "reports an overflow" if flagged else "reports no overflow"
            wanted = rows_words(rows, reading.claims.multiple)
            wants = f"it would receive {wanted}; the receive buffer has {_budget(reading)}"
            cause = _earlier_overflow(reading, m, rank) if flagged else ""
            wrong = f"rank {rank} {says} in microbatch {m} and drops {dropped}: {wants}{cause}"
            yield Comparison(rank, Finding(says, wrong, (rank,)))


def judge_dropped_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether slots are dropped only where a receive buffer is full, on all shards, and without effect.

    y and the gradients must be exactly those of the delivered slots. Counts the elements of all microbatches.

    Raises:
        CorruptRow: a row is of no token.
        WrongDelivery: more rows than the receive buffer has, a slot on some shards of its expert only, or dropped
            although it fits; rows that are not routed.
        WrongOutput, WrongForm, AbsentGradient, WrongGradient: not exactly the values of the delivered slots.
    """
    with tally.uncounted() as uncounted:
        judge_rows(reading, uncounted)
    findings = [*_too_many(reading), *_split(reading), *_without_need(reading)]
    if findings:
        fail(WrongDelivery, "dispatch", findings)
    rest = _of_the_kept(reading)
    with tally.uncounted() as uncounted:
        judge_deliveries(rest, uncounted)
    for m in range(len(reading.batches)):
        delivered, budgets, multiple = _delivered(reading, m), _budgets(reading), reading.claims.multiple
        legal = receive_budget.legal_deliveries(delivered, reading.pairs[m], budgets, alignment=multiple)
        if not all(legal):  # other judges find what the findings above do not cover
            rank = legal.index(False)
            received = f"what rank {rank} received of microbatch {m} does not fit its receive buffer of"
            raise WrongDelivery("dispatch", f"{received} {_budget(reading)} rows", ranks=(rank,))
    _require_finite(reading, rest)
    for judge_result in (judge_lost_tokens, judge_outputs, judge_dropped_gradients):
        with tally.uncounted() as uncounted:
            judge_result(rest, uncounted)
    for ranks in reading.batches:
        for rank, batch in enumerate(ranks):
            tally.add(elements=2 * batch.x_TD.numel() + batch.ids_TK.numel(), rank=rank)


@judge(WrongDelivery, "dispatch")
def judge_room_left(reading: Reading) -> Comparisons:
    """Decide whether no slot is dropped that fits the receive buffers of all its ranks.

    Counts the ranks that overflow.

    Raises:
        WrongDelivery: a receive buffer is not full, and a row was dropped that fits.
    """
    for m in range(len(reading.batches)):
        delivered, wanted = _delivered(reading, m), reading.pairs[m]
        rows = Counter(pair.destination for pair in delivered)
        owners = _owners(wanted)
        budgets, multiple = _budgets(reading), reading.claims.multiple
        for source, token, slot in receive_budget.fitting_slots(delivered, wanted, budgets, alignment=multiple):
            ranks = owners[source, token, slot]
            dropped = f"{_name(m, source, token, slot)} is dropped although it fits the receive buffer"
            has = f"rank {ranks[0]} has {rows[ranks[0]]} rows in a receive buffer of {_budget(reading)}"
            yield Comparison(None, Finding("room", f"{dropped}: {has}", ranks))
        for rank, rows_N in enumerate(rows_wanted(reading, m)):
            yield Comparison(rank, elements=1, pairs=_over(reading, rows_N))


@judge(WrongCount, "dispatch")
def judge_reported(reading: Reading) -> Comparisons:
    """Decide whether a rank that did not receive all rows routed to it raised an error or flagged an overflow.

    For receive buffers whose size the backend selects. Counts ranks and microbatches.

    Raises:
        WrongCount: rows are missing, and no overflow was reported.
    """
    lost = Counter((missing.microbatch, missing.pair.destination) for missing in reading.matching.lost)
    for (m, rank), number in lost.items():
        seen = reading.seen(m, rank)
        if seen.exchange.overflow is None and not any(handed.overflowed for handed in seen.exchange.handed):
            wrong = f"{number} rows of microbatch {m} were not delivered to rank {rank}, which reports no overflow"
            yield Comparison(rank, Finding("unsaid", wrong, (rank,)))
    for outcome in reading.ranks:
        yield Comparison(outcome.rank, elements=len(outcome.microbatches))


# ---- which slots are dropped -------------------------------------------------------------------------------------


def _too_many(reading: Reading) -> Iterator[Finding]:
    """Yield findings for ranks that received more rows, with padding, than their receive buffer holds."""
    handed = Counter((e.microbatch, e.rank, e.expert) for e in reading.entries if e.kind == tags.TAG)
    for m in range(len(reading.batches)):
        for rank in reading.ranks:
            rows_N = [handed[m, rank.rank, expert] for expert in rank.local_experts]
            if _over(reading, rows_N):
                sentence = f"rank {rank.rank} receives {rows_words(rows_N, reading.claims.multiple)} in microbatch {m}"
                yield Finding("too many", f"{sentence}; its receive buffer has {_budget(reading)}", (rank.rank,))


def _split(reading: Reading) -> Iterator[Finding]:
    """Yield findings for slots that were delivered to some shards of their expert and not to the others."""
    for m, wanted in enumerate(reading.pairs):
        reached = _owners(_delivered(reading, m))
        for slot, ranks in _owners(wanted).items():
            got = reached[slot]
            if got and (missing := tuple(rank for rank in ranks if rank not in got)):
                sentence = f"{_name(m, *slot)} was delivered to rank {some(got)} but not to rank {some(missing)}"
                yield Finding("split", f"{sentence}, although these hold shards of one expert", missing)


def _without_need(reading: Reading) -> Iterator[Finding]:
    """Yield findings for slots that were dropped though the receive buffers of all their ranks are large enough."""
    for m, wanted in enumerate(reading.pairs):
        reached, rows = _owners(_delivered(reading, m)), rows_wanted(reading, m)
        for slot, ranks in _owners(wanted).items():
            over = any(_over(reading, rows[rank]) for rank in ranks)
            if not reached[slot] and not over:
                dropped = f"{_name(m, *slot)} is dropped, but the receive buffer of rank {ranks[0]} is not exceeded"
                received = (
                    f"it would receive {rows_words(rows[ranks[0]], reading.claims.multiple)} of {_budget(reading)}"
                )
                yield Finding("needless", f"{dropped}: {received}", ranks)


def _delivered(reading: Reading, microbatch: int) -> list[Pair]:
    return [match.pair for match in reading.matching.matches if match.entry.microbatch == microbatch]


def _owners(pairs: list[Pair] | tuple[Pair, ...]) -> defaultdict[tuple[int, int, int], tuple[int, ...]]:
    """Return the ranks that the pairs of every slot are routed to."""
    owners = defaultdict[tuple[int, int, int], tuple[int, ...]](tuple)
    for pair in pairs:
        owners[pair.source, pair.token, pair.slot] += (pair.destination,)
    return owners


def _budget(reading: Reading) -> int:
    budget = reading.outcome.workload.config.receive_buffer.rows
    assert budget is not None
    return budget


def _budgets(reading: Reading) -> list[int]:
    return [_budget(reading)] * len(reading.ranks)


def _over(reading: Reading, rows_N: Sequence[int]) -> bool:
    """Return whether the rows of a rank's experts, with padding, exceed its receive buffer."""
    return receive_budget.over_budget(rows_N, _budget(reading), alignment=reading.claims.multiple)


def _earlier_overflow(reading: Reading, microbatch: int, rank: int) -> str:
    """Return a note with the latest earlier microbatch that overflowed on a rank, "" if none did."""
    for m in reversed(range(microbatch)):
        if _over(reading, rows_wanted(reading, m)[rank]):
            return f" (likely cause: the flag of microbatch {m}, which overflowed, was kept)"
    return ""


def _name(microbatch: int, source: int, token: int, slot: int) -> str:
    return f"rank {source} token {token} slot {slot} of microbatch {microbatch}"


# ---- the results of the other slots --------------------------------------------------------------------------------


def _of_the_kept(reading: Reading) -> Reading:
    """Return the reading with the dropped slots empty, as if the router had left them empty."""
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
    """Raise if y or a gradient is NaN or infinite; the message names the dropped slots of the token.

    Raises:
        WrongOutput, WrongGradient: an element is not finite.
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
        why = f", of which slot {some(lost)} was dropped at a full receive buffer" if lost else ""
        sentence = f"{name} is not finite at rank {rank} token {t} of microbatch {m}{why}"
        yield Finding(f"{name} not finite{bool(lost)}", sentence, (rank,))
