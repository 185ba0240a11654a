"""Judges of receive buffers that refuse an overflow: when it is raised, and the results of other microbatches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.claims import padded_rows, rows_words
from moe_conformance.judging.observed.run import Reading, read
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally, WrongCount
from moe_conformance.reference.capacity import receive_budget
from moe_conformance.scenarios.outcome import Grad, Microbatch
from moe_conformance.workloads.records.workload import Batch


@judge(WrongCount, "dispatch")
def judge_overflow(reading: Reading) -> Comparisons:
    """Decide whether an overflow is reported if and only if a rank would receive more rows than its buffer holds.

    Padding of experts to the claimed multiple takes space too. All ranks of a group report the overflow of any of them.
    Counts the ranks and microbatches.

    Raises:
        WrongCount: reported though all rows fit, or not reported.
    """
    budget = reading.outcome.workload.config.receive_buffer.rows
    assert budget is not None
    multiple = reading.claims.multiple
    for m in range(len(reading.batches)):
        wanted = rows_wanted(reading, m)
        for group in reading.outcome.workload.layout.groups()["ep_etp"]:
            rows = {rank: wanted[rank] for rank in group}
            over = any(receive_budget.over_budget(rows[rank], budget, alignment=multiple) for rank in group)
            most = max(rows, key=lambda rank: padded_rows(rows[rank], multiple))
            wants = f"rank {most} would receive {rows_words(rows[most], multiple)}; the receive buffer has {budget}"
            for rank in group:
                reported = reading.seen(m, rank).exchange.overflow is not None
                says = "reports an overflow" if reported else "reports no overflow"
                wrong = Finding(says, f"rank {rank} {says} in microbatch {m}: {wants}", (rank,))
                yield Comparison(rank, wrong if reported != over else "", elements=1)


def rows_wanted(reading: Reading, microbatch: int) -> list[list[int]]:
    """Return the number of rows of a microbatch that are routed to every expert, by rank.

    Where several experts share a row, there is one number per rank: a row for each token.
    """
    shared = False  # whether several experts share a row
    for rank in reading.ranks:
        for seen in rank.microbatches:
            shared = shared or any(handed.ids_RJ.shape[1] > 1 for handed in seen.exchange.handed)
    if shared:
        rows = {(pair.destination, pair.source, pair.token) for pair in reading.pairs[microbatch]}
        of_rank = Counter(destination for destination, _, _ in rows)
        return [[of_rank[rank.rank]] for rank in reading.ranks]
    wanted = Counter((pair.destination, pair.expert) for pair in reading.pairs[microbatch])
    return [[wanted[rank.rank, expert] for expert in rank.local_experts] for rank in reading.ranks]


def judge_after_overflow(reading: Reading, tally: Tally) -> None:
    """Decide whether microbatches that fit are exact, also after a refused one, and others are refused on all ranks.

    Counts the elements of microbatches that fit.

    Raises:
        WrongCount: a microbatch is refused on some ranks of a group, and not on others.
        WrongForm, WrongOutput, AbsentGradient, WrongGradient: a microbatch that fits is not exact.
    """
    findings, kept = [], set[tuple[int, int]]()
    for m in range(len(reading.batches)):
        for group in reading.outcome.workload.layout.groups()["ep_etp"]:
            refused = [rank for rank in group if reading.seen(m, rank).exchange.overflow is not None]
            if refused and len(refused) < len(group):
                others = sorted(set(group) - set(refused))
                sentence = f"microbatch {m} is refused on ranks {refused} but not on ranks {others} of the same group"
                findings.append(Finding("split", sentence, tuple(others)))
            kept |= {(m, rank) for rank in group if not refused}
    if findings:
        fail(WrongCount, "dispatch", findings)
    rest = _without_refused(reading, kept)
    for judge_result in (judge_outputs, judge_dx, judge_dweights):
        with tally.uncounted() as uncounted:
            judge_result(rest, uncounted)
    for m, rank in kept:
        batch = reading.batches[m][rank]
        tally.add(elements=2 * batch.x_TD.numel() + batch.ids_TK.numel(), rank=rank)


def _without_refused(reading: Reading, kept: set[tuple[int, int]]) -> Reading:
    """Return the reading with empty slots and zero results in the refused microbatches."""
    outcome = reading.outcome
    batches, ranks = [], []
    for m, row in enumerate(reading.batches):
        batches.append(tuple(batch if (m, r) in kept else _unrouted(batch) for r, batch in enumerate(row)))
    for rank in reading.ranks:
        microbatches = list(rank.microbatches)
        for m, seen in enumerate(microbatches):
            if (m, rank.rank) not in kept:
                microbatches[m] = _nothing(seen, batches[m][rank.rank])
        ranks.append(replace(rank, microbatches=tuple(microbatches)))
    return read(replace(outcome, workload=replace(outcome.workload, batches=tuple(batches)), ranks=tuple(ranks)))


def _unrouted(batch: Batch) -> Batch:
    return replace(batch, ids_TK=torch.full_like(batch.ids_TK, -1))


def _nothing(seen: Microbatch, batch: Batch) -> Microbatch:
    zeros_TD, zeros_TK = torch.zeros_like(batch.x_TD), torch.zeros_like(batch.weights_TK)
    return replace(
        seen,
        y=zeros_TD,
        y_shape=tuple(zeros_TD.shape),
        y_dtype=zeros_TD.dtype,
        dx_TD=Grad(zeros_TD),
        dweights_TK=Grad(zeros_TK),
    )
