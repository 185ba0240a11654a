"""Judges of exchanges that pad experts to a capacity: numbers of rows, no effect of padding, and dropped slots.

The judges of dropped slots decide the results of tokens of which some or all slots were dropped and are empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from moe_conformance.contract import Claims
from moe_conformance.engine.ledger.entry import group_words
from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import Finding, count, fail
from moe_conformance.judging.observed.drop_rule import DropRule
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import carries_rows, dispatches, parted
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import (
    MOST,
    AbsentGradient,
    NotOffered,
    Tally,
    WrongCollectives,
    WrongCount,
    WrongDelivery,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.capacity import limits, receive_budget
from moe_conformance.workloads.records import tags

# ---- padding to the capacity ---------------------------------------------------------------------------------------


def judge_filled(reading: Reading, tally: Tally) -> None:
    """Decide whether every expert receives as many rows as its capacity, and the padding changes no result.

    Counts those rows; y, dx and the gradients of the weights are exactly those without them.

    Raises:
        WrongCount: an expert receives another number of rows, or another number of tokens of one rank.
        WrongForm, WrongOutput, AbsentGradient, WrongGradient: a padding row changed something.
    """
    _judge_rows(reading, tally)
    for judge_result in (judge_outputs, judge_dx, judge_dweights):
        judge_result(reading, tally)


def judge_lossless_capacity(reading: Reading, tally: Tally) -> None:
    """Decide whether a capacity without drops is the largest load of any rank of the group for any expert.

    Raises:
        WrongCount: an expert receives another number of rows.
        WrongDelivery: a pair was not delivered.
    """
    _judge_rows(reading, tally)
    lost = []
    for _, pair in reading.matching.lost:
        to = f"expert {pair.expert} on rank {pair.destination}"
        sentence = f"rank {pair.source} token {pair.token} was not delivered to {to}"
        lost.append(Finding("lost", sentence, (pair.destination,)))
    if lost:
        fail(WrongDelivery, "dispatch", lost)


@judge(WrongCollectives, "dispatch")
def judge_reduced_once(reading: Reading) -> Comparisons:
    """Decide whether the maximum for a capacity without drops is reduced once, over the ranks that exchange rows.

    Compared are the reductions with MAX of a dispatch, except of rows, before the first rows are sent. Operation, shape
    and dtype of a call distinguish the capacity from other numbers. An exchange that delivers a fixed number of rows on
    every rank may have one more call of the same form. An exchange that gathers counts needs no reduction; having none
    is right.

    Raises:
        WrongCollectives: two reductions of one form, or none of them over the group that exchanges rows.
    """
    groups, hidden = reading.outcome.workload.layout.groups(), reading.outcome.workload.config.hidden
    allowed = 2 if reading.claims.handed == "static" else 1
    for rank in reading.ranks:
        group_of_rank = next(group for group in groups["ep_etp"] if rank.rank in group)
        for phase, calls in dispatches(rank):
            before, _ = parted(calls, hidden)
            reduced = [entry for entry in before if entry.reduce == "MAX" and not carries_rows(entry, hidden)]
            forms = Counter((entry.op, entry.shapes_in, entry.dtype) for entry in reduced)
            sentence = f"before the rows of {phase} are sent, rank {rank.rank} all-reduces (MAX)"
            if (times := max(forms.values(), default=0)) > allowed:
                numbers = f"numbers of one shape and dtype {times} times instead of {allowed} ({reduced[-1].where})"
                yield Comparison(rank.rank, f"{sentence} {numbers}")
            if reduced and all(set(entry.ranks) != set(group_of_rank) for entry in reduced):
                among = group_words(reduced[0].ranks)
                right = f"{group_words(group_of_rank)}, in which its rows are exchanged"
                yield Comparison(rank.rank, f"{sentence} over {among} instead of {right}")
            yield Comparison(rank.rank, pairs=1)


@judge(WrongCount, "dispatch")
def _judge_rows(reading: Reading) -> Comparisons:
    """Decide whether every expert receives as many rows as its capacity, and as many of one rank; counts the rows."""
    yield from _rows(reading, reading.claims)
    yield Note(lambda: _by_design(reading))


def _by_design(reading: Reading) -> str:
    """Return a note with the claim under which the rows are right, "" if there is none."""
    tp, claims = reading.outcome.workload.layout.tp, reading.claims
    rounded = replace(claims, capacity_over="tp")
    if rounded == claims or any(compared.findings() for compared in _rows(reading, rounded)):
        return ""
    return f"; a backend that rounds the capacity up to a multiple of tp = {tp} by design claims capacity_over = 'tp'"


def _rows(reading: Reading, claims: Claims) -> Iterator[Comparison]:
    """Yield for every expert a comparison of its rows with the capacity, and for its tokens of every rank."""
    handed = Counter((entry.microbatch, entry.rank, entry.expert) for entry in reading.entries)
    tagged = Counter((e.microbatch, e.rank, e.expert, e.source) for e in reading.entries if e.kind == tags.TAG)
    for m in range(len(reading.batches)):
        for group in reading.outcome.workload.layout.groups()["ep_etp"]:
            fewest, most = _capacities(reading, m, group, claims)
            for rank in group:
                for expert in reading.ranks[rank].local_experts:
                    got = handed[m, rank, expert]
                    right = sum(fewest) <= got <= sum(most)
                    wrong = "" if right else _count_finding(m, rank, expert, got, fewest, most)
                    yield Comparison(rank, wrong, pairs=got)
                    for place, source in enumerate(group):
                        if (tokens := tagged[m, rank, expert, source]) > most[place]:
                            sentence = f"rank {rank} receives {tokens} tokens of rank {source} for expert {expert}"
                            words = f"{sentence}; the capacity for a rank is {most[place]}"
                            yield Comparison(rank, Finding("source", words, (rank,)))


def _count_finding(m: int, rank: int, expert: int, got: int, fewest: list[int], most: list[int]) -> Finding:
    of = f" in microbatch {m}" if m else ""
    right = f"{sum(most)}" if fewest == most else f"{sum(fewest)} to {sum(most)}"
    same = len(set(most)) == 1
    capacities = f"{most[0]} of each rank" if same else f"{' + '.join(map(str, most))} of the ranks of its group"
    sentence = f"rank {rank} receives {got} rows for expert {expert}{of} instead of {right}, {capacities}"
    return Finding("rows", sentence, (rank,), abs(got - sum(most)))


def _capacities(reading: Reading, m: int, group: tuple[int, ...], claims: Claims) -> tuple[list[int], list[int]]:
    """Return the smallest and the largest legal number of rows for one expert, by rank of a group.

    Where experts are padded with tokens that are not routed to them, there are no more rows than tokens.
    """
    config = reading.outcome.workload.config
    ids = [reading.batches[m][rank].ids_TK for rank in group]
    if config.capacity.factor is None:
        room = limits.lossless_capacity(ids, config.experts, minimum=config.capacity.minimum)
        if claims.capacity_over == "tp":  # places are divided among the ranks of an expert
            tp = reading.outcome.workload.layout.tp
            room = -(-room // tp) * tp
        return [room] * len(group), [room] * len(group)
    legal = [DropRule.of(claims).capacities(config, len(ids_TK)) for ids_TK in ids]
    fewest = [limits.padded_rows(len(ids_TK), rooms[0])[0] for rooms, ids_TK in zip(legal, ids, strict=True)]
    most = [limits.padded_rows(len(ids_TK), rooms[-1])[-1] for rooms, ids_TK in zip(legal, ids, strict=True)]
    return fewest, most


# ---- slots that were dropped ---------------------------------------------------------------------------------


@judge(WrongOutput, "combine")
def judge_lost_tokens(reading: Reading) -> Comparisons:
    """Decide whether the output of a token without any slot is exactly zero in every element.

    Raises:
        WrongOutput: an element of such a token is not zero, or the output is missing.
    """
    for m, ranks in enumerate(reading.batches):
        for rank, batch in enumerate(ranks):
            y = reading.seen(m, rank).y
            if y is None or len(y) != len(batch.x_TD):
                got = "is None" if y is None else f"has {len(y)} rows"
                missing = f"y of rank {rank}{_of(reading, m)} {got} instead of {count(len(batch.x_TD), 'row')}"
                yield Comparison(rank, Finding("missing", missing, (rank,)))
                continue
            for t in (batch.ids_TK < 0).all(1).nonzero().flatten().tolist():
                columns = (y[t] != 0).nonzero().flatten().tolist()
                wrong: str | Finding = ""
                if columns:
                    value = float(y[t, columns[0]])
                    dropped = f"rank {rank} token {t}{_of(reading, m)} had all slots dropped"
                    sentence = f"{dropped}; its output is {value:g} instead of 0 in column {columns[0]}"
                    wrong = Finding("output", sentence, (rank,), min(abs(value), MOST))
                yield Comparison(rank, wrong, elements=batch.x_TD.shape[1])


def judge_dropped_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether a dropped slot has the weight gradient zero, and adds nothing to the gradient of its token.

    Counts the dropped slots. A token without any slot has a gradient of exactly zero, not None.

    Raises:
        AbsentGradient: the gradient of a token or of a weight is None.
        WrongGradient, WrongForm: an element differs.
    """
    _judge_dropped_slots(reading, tally)
    for judge_gradient in (judge_dx, judge_dweights):
        with tally.uncounted() as uncounted:
            judge_gradient(reading, uncounted)


@judge(WrongGradient, "gradient")
def _judge_dropped_slots(reading: Reading) -> Comparisons:
    """Decide whether dropped slots have the weight gradient zero, and tokens any gradient."""
    for m, ranks in enumerate(reading.batches):
        if not reading.goes_backward(m):
            continue
        for rank, batch in enumerate(ranks):
            seen = reading.seen(m, rank)
            if seen.dx_TD.value is None and len(batch.x_TD):
                raise AbsentGradient("gradient", f"the gradient of x on rank {rank} is None", ranks=(rank,))
            dropped_TK = batch.ids_TK < 0
            yield Comparison(rank, pairs=int(dropped_TK.sum()))
            dweights = seen.dweights_TK.value
            if dweights is None or dweights.shape != batch.ids_TK.shape:
                continue  # `judge_dweights` decides whether it may be
            for t, k in (dropped_TK & (dweights != 0)).nonzero().tolist():
                value = float(dweights[t, k])
                whose = f"the gradient of the routing weight of rank {rank} token {t} slot {k}{_of(reading, m)}"
                wrong = f"{whose} is {value:g} instead of 0; the slot was dropped"
                yield Comparison(rank, Finding("dropped slot", wrong, (rank,), min(abs(value), MOST)))


def _of(reading: Reading, microbatch: int) -> str:
    return f" of microbatch {microbatch}" if len(reading.batches) > 1 else ""


# ---- the worst case ------------------------------------------------------------------------------------------


@judge(WrongDelivery, "dispatch")
def judge_worst_case(reading: Reading) -> Comparisons:
    """Decide whether a rank received all rows in the worst case: all tokens are routed to its experts.

    In the worst case as many slots of every token as possible are routed to the rank. Counts the rows of such ranks.

    Raises:
        WrongDelivery: a row was not delivered, or more rows than the worst case were.
        NotOffered: redundant experts share the rows, so that no rank is in the worst case.
    """
    workload, full = reading.outcome.workload, 0
    lost = Counter((undelivered.microbatch, undelivered.pair.destination) for undelivered in reading.matching.lost)
    received = Counter((e.microbatch, e.rank) for e in reading.entries if e.kind == tags.TAG)
    wanted = Counter((m, pair.destination) for m, pairs in enumerate(reading.pairs) for pair in pairs)
    for m, ranks in enumerate(reading.batches):
        for group in workload.layout.groups()["ep_etp"]:
            tokens = [len(ranks[rank].x_TD) for rank in group]
            for rank in group:
                held = len(reading.ranks[rank].local_experts)
                most = receive_budget.worst_case_rows(tokens, workload.config.top_k, held)
                if received[m, rank] > most:
                    more = f"rank {rank} received {received[m, rank]} rows; worst case: {most}"
                    yield Comparison(rank, Finding("more", more, (rank,)))
                full += wanted[m, rank] == most
                if wanted[m, rank] == most:
                    missing = f"{lost[m, rank]} of {most} rows were not delivered to rank {rank}"
                    wrong = Finding("lost", f"{missing}, to which all tokens are routed", (rank,))
                    yield Comparison(rank, wrong if lost[m, rank] else "", pairs=most)
    if not full and reading.claims.placement == "replicas":
        raise NotOffered("the backend claims placement = 'replicas', and no rank received all that may be routed to it")
