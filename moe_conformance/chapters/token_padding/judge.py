"""Judges of padding to a common token count: the count, the group of its reduction, and exceeded bounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import count, some, unequal
from moe_conformance.judging.observed.claims import padded_rows
from moe_conformance.judging.observed.probe_expected import expect
from moe_conformance.judging.observed.run import Entry as Row
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.observed.traffic import carries_rows, dispatches, parted, rows_leaving
from moe_conformance.judging.verdict import (
    NotOffered,
    Raised,
    Tally,
    Unrefused,
    WrongCollectives,
    WrongCount,
    WrongDelivery,
    WrongForm,
    WrongOutput,
)
from moe_conformance.reference.token_padding import bounds, padding
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from moe_conformance.workloads.records import tags


@judge(WrongCount, "dispatch")
def judge_padded_counts(outcome: Outcome) -> Comparisons:
    """Decide whether every rank pads to its group's largest token count, rounded up, or to the bound.

    Raises:
        WrongForm: a rank returns no integer.
        WrongCount: a rank pads to another number.
    """
    groups = outcome.workload.layout.groups()
    for number, tokens in enumerate(_tokens(outcome)):
        expected = _expected(outcome, tokens, groups["ep_etp"])
        for rank, P in enumerate(_counts(outcome, number)):
            if P == expected[rank]:
                yield Comparison(rank, pairs=1)
                continue
            mistaken = [name for name in groups if _expected(outcome, tokens, groups[name])[rank] == P]
            cause = f"; likely cause: the maximum was taken over its {mistaken[0]} group" if mistaken else ""
            of = next(group for group in groups["ep_etp"] if rank in group)
            counts = ", ".join(str(tokens[other]) for other in of)
            padded = f"rank {rank} pads {tokens[rank]} tokens to {P} rows instead of {expected[rank]}"
            yield Comparison(rank, f"{padded}, for {counts} tokens in its exchange {group_words(of)}{cause}")


@judge(WrongCount, "dispatch")
def judge_alignment(outcome: Outcome) -> Comparisons:
    """Decide whether every padded count is a multiple of the configured alignment, which is claimed too.

    Raises:
        WrongForm: the backend claims another alignment, or none, or a rank returns no integer.
        WrongCount: a count is not a multiple.
    """
    A = outcome.workload.config.padding.alignment
    for of_rank in outcome.ranks:
        if (claimed := of_rank.claims.alignment) != A:
            sentence = f"rank {of_rank.rank} claims alignment = {claimed} instead of the configured {A}"
            raise WrongForm("dispatch", sentence, ranks=(of_rank.rank,))
    for number, tokens in enumerate(_tokens(outcome)):
        for rank, P in enumerate(_counts(outcome, number)):
            wrong = f"rank {rank} pads {tokens[rank]} tokens to {P} rows, not a multiple of the alignment {A}"
            yield Comparison(rank, wrong if padding.aligned(P, alignment=A) != P else "", pairs=1)


@judge(WrongForm, "dispatch")
def judge_stated_padding(reading: Reading) -> Comparisons:
    """Decide whether the exchange claims the configured padding and alignment.

    Raises:
        WrongForm: the exchange claims another alignment or padding, or none.
    """
    config = reading.outcome.workload.config
    for rank in reading.ranks:
        claims = rank.claims
        for name, claimed, configured in (
            ("alignment", claims.alignment, config.padding.alignment),
            ("padding", claims.padding, config.padding.tokens),
        ):
            if claimed != configured:
                claim = f"the exchange of rank {rank.rank} claims {name} = {claimed!r}"
                yield Comparison(rank.rank, f"{claim} instead of the configured {configured!r}")
        yield Comparison(rank.rank, pairs=1)


@judge(WrongCount, "dispatch")
def judge_dispatched_rows(reading: Reading) -> Comparisons:
    """Decide whether a dispatch of all rows to all ranks has P rows per rank, or T without padding.

    For an exchange that claims padding without being configured, P is the largest count, rounded up to the claimed
    alignment. If only routed rows are sent, no call shows the number of added rows, and nothing is compared.

    Raises:
        WrongCount: a rank dispatches another number of rows.
        WrongForm: the exchange claims padding that is not configured, and no alignment.
    """
    workload = reading.outcome.workload
    groups, hidden = workload.layout.groups()["ep_etp"], workload.config.hidden
    W = len(groups[0])
    if reading.claims.wire != "all" or W == 1:
        return
    unasked = _alignment_unasked(reading) if _pads_unasked(reading) else None
    for rank in reading.ranks:
        for phase, calls in dispatches(rank):
            tokens = [len(batch.x_TD) for batch in reading.batches[int(phase.partition(":")[2])]]
            expected: Sequence[int] = tokens
            if unasked is not None:
                expected = padding.padded_counts(tokens, groups, alignment=unasked)
            elif workload.config.padding.tokens != "no":
                expected = _expected(reading.outcome, tokens, groups)
            leaving = sum(rows_leaving(entry, rank.rank, hidden) for entry in calls if carries_rows(entry, hidden))
            rows = f"{leaving / (W - 1):g} rows instead of {expected[rank.rank]}"
            wrong = f"rank {rank.rank} dispatches {rows} for {tokens[rank.rank]} tokens in {phase}"
            yield Comparison(rank.rank, wrong if leaving != expected[rank.rank] * (W - 1) else "", pairs=1)


@judge(WrongCollectives, "dispatch")
def judge_group_of_maximum(reading: Reading) -> Comparisons:
    """Decide whether the largest token count is reduced over the exchange group, and over no other.

    Raises:
        WrongCollectives: the collective is over other ranks.
        NotOffered: the ledger has no such call; the count is computed in another way.
    """
    groups, calls = reading.outcome.workload.layout.groups(), 0
    for rank in reading.ranks:
        of = next(group for group in groups["ep_etp"] if rank.rank in group)
        for phase, entry in _number_calls(reading, rank):
            calls += 1
            name = next((name for name in groups if entry.ranks in groups[name]), "no")
            over = f"{_op(entry)} over {group_words(entry.ranks)}, its {name} group, for the largest token count"
            wrong = f"rank {rank.rank} calls {over} in {phase}; its rows are exchanged in {group_words(of)}"
            yield Comparison(rank.rank, wrong if entry.ranks != of else "", pairs=1)
    if not calls:
        raise NotOffered("the ledger has no collective for the largest token count before the rows are sent")


@judge(WrongCollectives, "dispatch")
def judge_no_maximum(reading: Reading) -> Comparisons:
    """Decide whether a dispatch has no collective for the largest token count.

    One such call is allowed, before the rows are sent, for an exchange that delivers a fixed number of rows on every
    rank of a group, or that pads without being configured: its ranks must agree on a number. So is one for an exchange
    that sends as many rows as the capacity of any rank (`Claims.wire`, verified by COST-04), which is not a token
    count. Calls after the rows, such as whether all rows fit, have another purpose. So has a sum in which no other rank
    of the exchange takes part, as over the replicas of experts.

    Raises:
        WrongCollectives: a dispatch has such a call, or more than are allowed.
        WrongCount: the exchange claims a fixed number of rows, and the ranks receive different numbers.
    """
    static = reading.claims.handed == "static"
    if static:
        _judge_static(reading)
    free = 1 if static or reading.claims.wire.startswith("capacity") or _pads_unasked(reading) else 0
    only_capacity = not free
    for rank in reading.ranks:
        for phase, calls in dispatches(rank):
            first, rest = parted(
                [entry for entry in calls if not _sums_elsewhere(reading, rank, entry)],
                reading.outcome.workload.config.hidden,
            )
            before, behind = list(_questions(reading, first)), list(_questions(reading, rest, behind=True))
            late: list[Entry] = [] if free else behind
            only_capacity &= [entry.reduce for entry in (*before, *late)] == ["MAX"]
            for entries, when in ((before[free:], "before the rows are sent"), (late, "after the rows are sent")):
                if entries:
                    times = f"{len(entries) + free} times instead of {free}" if free else "instead of not at all"
                    over = f"{_op(entries[0])} over {group_words(entries[0].ranks)} for a largest number"
                    where = f"in {phase}, {when} ({entries[0].where})"
                    yield Comparison(rank.rank, f"rank {rank.rank} calls {over} {where}, {times}")
        yield Comparison(rank.rank, pairs=len(reading.batches))
    if only_capacity:
        yield Note("; a backend that sends every rank's capacity to every expert by design claims wire = 'capacity'")


def _judge_static(reading: Reading) -> None:
    """Raise unless the ranks of a group receive equal numbers of rows in every microbatch."""
    for m in range(len(reading.batches)):
        for group in reading.outcome.workload.layout.groups()["ep_etp"]:
            rows = [sum(len(call.rows_RD) for call in reading.seen(m, rank).exchange.handed) for rank in group]
            if len(set(rows)) > 1:
                words = (
                    f"the ranks of {group_words(tuple(group))} receive {rows} rows in microbatch {m}; expected equal"
                )
                why = "the backend claims handed = 'static'"
                raise WrongCount("dispatch", f"{words} numbers, since {why}", ranks=tuple(group))


def _pads_unasked(reading: Reading) -> bool:
    """Return whether the exchange claims padding without being configured, as it needs equal token counts."""
    return reading.outcome.workload.config.padding.tokens == "no" and reading.claims.padding != "no"


def _alignment_unasked(reading: Reading) -> int:
    claims = reading.claims
    if claims.alignment is None:
        sentence = f"the backend claims padding = {claims.padding!r}, which is not configured, and no alignment"
        raise WrongForm("dispatch", f"{sentence}; expected a positive integer")
    return claims.alignment


@judge(WrongDelivery, "dispatch")
def judge_added_rows(reading: Reading) -> Comparisons:
    """Decide whether no expert receives an added token (a row of zeros), except as padding of its rows.

    Padding fills an expert's rows up to the multiple that the backend reports, or to the most of an expert of its rank
    with `Claims.handed` "batched"; an expert without rows may have one multiple. A rank without any rows may have one
    row of zeros, so that its experts run forward and backward. If a buffer of places is delivered without counts, rows
    of zeros are not judged.

    Raises:
        WrongDelivery: an expert receives an added token.
    """
    multiple, excess = reading.claims.multiple, Counter[tuple[int, int]]()
    rows = Counter(_whose(entry) for entry in reading.entries if entry.kind != tags.PADDING)
    zeros = Counter(_whose(entry) for entry in reading.entries if entry.kind == tags.PADDING)
    received = Counter((m, holder, call) for m, holder, call, _ in rows.elements())
    added = Counter((m, holder, call) for m, holder, call, _ in zeros.elements())
    most = Counter[tuple[int, int, int]]()  # rows of an expert, by call
    if reading.claims.handed == "batched":
        for (m, holder, call, _), number in rows.items():
            most[m, holder, call] = max(most[m, holder, call], number)
    for whose, number in zeros.items():
        (m, holder, call, expert), routed = whose, rows[whose]
        handed = reading.seen(m, holder).exchange.handed[call]
        in_places = len(handed.shape) == 3 and handed.counts_N is None
        if not received[m, holder, call] and added[m, holder, call] == 1:
            continue
        largest = max(routed, most[m, holder, call], 1 if multiple > 1 else 0)
        if number > padded_rows([largest], multiple) - routed and not in_places:
            excess[holder, expert] += number - (padded_rows([largest], multiple) - routed)
    for (rank, expert), number in excess.items():
        yield Comparison(rank, f"rank {rank} receives {count(number, 'row')} of zeros for expert {expert}")
    filled = f" in addition to the padding to multiples of {multiple}" if multiple > 1 else ""
    yield Note(f"{filled}; likely cause: padding tokens were routed")
    for of_rank in reading.ranks:
        yield Comparison(of_rank.rank, pairs=len(of_rank.microbatches))


def _whose(entry: Row) -> tuple[int, int, int, int]:
    return entry.microbatch, entry.rank, entry.call, entry.expert


def judge_broken_bound(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a step raises on all ranks of a group if and only if some T exceeds the bound.

    If no rank raises, y is right, also after a refused step.

    Raises:
        Unrefused: some rank returned.
        Raised: a rank raised although the bound holds, or its error does not name the numbers.
        WrongOutput: a rank that did not refuse has another y.
    """
    config, groups = outcome.workload.config, outcome.workload.layout.groups()["ep_etp"]
    bound = config.padding.bound
    assert bound is not None
    expected = expect(outcome.workload, [1.0]).y
    for number, call in enumerate(outcome.workload.calls):
        tokens = [len(given["x"]) for given in call.given]
        found = answers(outcome, number)
        refused = [answer.raised for answer in found]
        legal = bounds.legal_refusals(refused, tokens, groups, bound, alignment=config.padding.alignment)
        for group, well in zip(groups, legal, strict=True):
            if not well:
                _tell_refusals(group, tokens, refused, [answer.error for answer in found], bound)
        for rank, answer in enumerate(found):
            named = {str(tokens[rank]), str(bound)} <= set(re.findall(r"\d+", answer.error))
            if answer.raised and tokens[rank] > bound and not named:
                sentence = (
                    f"rank {rank} has {tokens[rank]} tokens and the bound is {bound}; its error does not name both"
                )
                raise Raised("dispatch", f"{sentence}: {answer.error}", ranks=(rank,))
            if not answer.raised:
                _judge_answered(answer.values.get(""), expected[number][rank], rank, number)
            tally.add(pairs=1, rank=rank)


def _judge_answered(y_TD: Any, expected_TD: Tensor, rank: int, number: int) -> None:
    right = isinstance(y_TD, Tensor) and y_TD.shape == expected_TD.shape and torch.equal(y_TD.double(), expected_TD)
    if not right:
        words = unequal(y_TD, expected_TD) if isinstance(y_TD, Tensor) else f"is {y_TD!r}"
        sentence = f"rank {rank} accepts all tokens in step {number}, and its y {words}"
        raise WrongOutput("combine", sentence, ranks=(rank,))


def _tell_refusals(
    group: Sequence[int], tokens: Sequence[int], refused: Sequence[bool], errors: Sequence[str], bound: int
) -> None:
    largest = max(tokens[rank] for rank in group)
    ranks = tuple(rank for rank in group if refused[rank] is (largest <= bound))
    if largest <= bound:
        sentence = (
            f"rank {ranks[0]} raises, although no rank of {group_words(tuple(group))} has more than {bound} tokens"
        )
        raise Raised("dispatch", f"{sentence}: {errors[ranks[0]]}", ranks=ranks)
    whose = next(rank for rank in group if tokens[rank] == largest)
    answered = some([f"rank {rank}" for rank in ranks])
    words = f"rank {whose} has {largest} tokens and the bound is {bound}"
    sentence = f"{words}; expected an error on every rank, but the step returned on {answered}"
    raise Unrefused("dispatch", sentence, ranks=ranks)


def _counts(outcome: Outcome, number: int) -> tuple[int, ...]:
    """Return the number of rows that every rank pads to in a call.

    Raises:
        WrongForm: a rank returns no integer.
    """
    counts = values(outcome, number)
    for rank, P in enumerate(counts):
        if not isinstance(P, int):
            raise WrongForm("dispatch", f"rank {rank} pads to {P!r} rows, which is not an integer", ranks=(rank,))
    return counts


def _tokens(outcome: Outcome) -> list[list[int]]:
    return [[given["tokens"] for given in call.given] for call in outcome.workload.calls]


def _expected(outcome: Outcome, tokens: Sequence[int], groups: Sequence[Sequence[int]]) -> Sequence[int]:
    config = outcome.workload.config
    if config.padding.tokens == "bound":
        assert config.padding.bound is not None
        return [bounds.bounded_count(config.padding.bound, alignment=config.padding.alignment)] * len(tokens)
    return padding.padded_counts(tokens, groups, alignment=config.padding.alignment)


def _number_calls(reading: Reading, rank: RankOutcome) -> Iterator[tuple[str, Entry]]:
    """Yield the collectives for a largest number before the rows of a dispatch, each with its phase."""
    for phase, calls in dispatches(rank):
        before, _ = parted(calls, reading.outcome.workload.config.hidden)
        yield from ((phase, entry) for entry in _questions(reading, before))


def _questions(reading: Reading, calls: Sequence[Entry], *, behind: bool = False) -> Iterator[Entry]:
    """Yield calls that can give ranks a largest number: reductions except of rows, gathers of one number per rank.

    A reduction may be a sum of W numbers, each of which is nonzero on one rank only. A reduction to a single rank
    followed by a broadcast counts too. An exchange or an adapter that gathers all tokens on all ranks may gather the
    number of tokens once, before they are sent. An exchange that gathers buffers of capacity may gather each of their
    sizes, none of which is the number of tokens.
    """
    free = not behind and reading.claims.wire not in ("pairs", "tokens")
    sizes = reading.claims.wire == "capacity_all"
    hidden = reading.outcome.workload.config.hidden
    for entry in calls:
        reduced = entry.op.startswith(("all_reduce", "reduce")) and not entry.op.startswith("reduce_scatter")
        gathered = entry.op.startswith("all_gather") and _single(entry)
        if gathered and (free or sizes):
            free = False
        elif gathered or (reduced and not carries_rows(entry, hidden)) or (entry.op in _TELLING and _single(entry)):
            yield entry


def _sums_elsewhere(reading: Reading, rank: RankOutcome, entry: Entry) -> bool:
    exchanging = next(group for group in reading.outcome.workload.layout.groups()["ep_etp"] if rank.rank in group)
    return entry.reduce == "SUM" and {*entry.ranks} & {*exchanging} == {rank.rank}


_TELLING = ("broadcast", "gather", "scatter")  # of one number: nothing else in a dispatch has a root rank


def _op(entry: Entry) -> str:
    return entry.op if entry.reduce is None else f"{entry.op} ({entry.reduce})"


def _single(entry: Entry) -> bool:
    return sum(map(prod, entry.shapes_in)) == 1
