"""Comparison of the experts and weights that a router selects in a run and in an equivalent run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from moe_conformance.judging.compare.bounded import note_beyond
from moe_conformance.judging.comparisons import Comparison, Comparisons, Start, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.equivalence.runs import (
    Ran,
    judge_alike,
    judge_same_gradients,
    read_twin,
    those_that_ran,
)
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import NotOffered, Tally, WrongSelection, WrongWeight
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.twins import picked


class Routes(NamedTuple):
    """The selected experts and weights of some tokens, by ascending expert, and their bounds."""

    ids_TK: Tensor
    weights_TK: Tensor
    allowed_TK: Tensor
    legal_T: Tensor


def judge_same_routes(reading: Reading, ran: Sequence[Ran], tally: Tally, *, to_the_bit: bool) -> None:
    """Decide whether every token of an equivalent run has the experts and weights of the original, in any slot order.

    With `to_the_bit` they are equal to the bit, ties included. Otherwise within rounding: where scores differ by less
    than that, both choices are legal, and weights may differ by the errors of both runs.

    Raises:
        NotOffered: none of the equivalent runs was run.
        WrongForm, WrongSelection: other experts were selected.
        WrongWeight: the same experts have other weights.
    """
    world = range(len(reading.ranks))
    before = [[_routes(reading, (m, rank)) for rank in world] for m in range(len(reading.batches))]
    for twin_run in those_that_ran(ran):
        other, origin = read_twin(twin_run), twin_run.twin.origin
        chosen, weighed = list[Finding](), list[Finding]()
        for m, ranks in enumerate(origin):
            for rank, rows in enumerate(ranks):
                was = Routes(*(picked(rows.source_T3, columns) for columns in _columns(before)))
                now = _routes(other, (m, rank))
                chosen += _other_choices(now, was, rank, to_the_bit)
                weighed += _other_weights(now, was, rank, to_the_bit, tally)
                tally.add(pairs=now.ids_TK.numel(), rank=rank)
        if chosen:
            fail(WrongSelection, "route", chosen, start=f"run {twin_run.twin.how}, ")
        if weighed:
            fail(WrongWeight, "route", weighed, start=f"run {twin_run.twin.how}, ")


def judge_repeated_routes(ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether all runs but the first equal the first one to the bit: ids by slot, weights and gradients.

    The gradients are those of the tokens and of the router.

    Raises:
        NotOffered: the first was not run, or none of the others.
        As `judge_same_routes` and `judge_same_gradients`.
        WrongSelection: the experts are the same, in another order.
    """
    judge_same_bits(*_first_of(ran), tally)


def judge_same_bits(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether equivalent runs equal the original to the bit: ids slot by slot, weights and gradients.

    Raises:
        NotOffered: none of the equivalent runs was run.
        As `judge_same_routes` and `judge_same_gradients`.
        WrongSelection: the experts are the same, in another order.
    """
    judge_same_routes(reading, ran, tally, to_the_bit=True)
    for twin_run in those_that_ran(ran):
        _judge_slots(twin_run, tally, expected_of(reading).ids)
    judge_same_gradients(reading, ran, tally)


def judge_recomputed(ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether a run with recomputation equals the first, which has none, to the bit: routes and all gradients.

    Outputs are compared too if there are experts.

    Raises:
        NotOffered: the first or the other was not run.
        As `judge_repeated_routes` and `judge_alike`.
    """
    original, others = _first_of(ran)
    if isinstance(original.outcome.workload.run, RouterStep):
        judge_repeated_routes(ran, tally)
    else:
        judge_alike(original, others, tally)


def judge_choices_behind_draws(ran: Sequence[Ran], tally: Tally) -> None:
    """Decide `judge_same_choices` of all runs but the first, compared with the first instead of the original.

    Raises:
        NotOffered: the first was not run, or none of the others.
        As `judge_same_choices`.
    """
    judge_same_choices(*_first_of(ran), tally)


def _first_of(ran: Sequence[Ran]) -> tuple[Reading, list[Ran]]:
    """Return the first run, with which the others are compared, and the others.

    Raises:
        NotOffered: the first was not run.
    """
    first, *others = ran
    if first.outcome is None:
        raise NotOffered(first.why_not)
    return read_twin(first), others


def judge_same_choices(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether every token has the same experts as in the original, whatever their weights.

    Raises:
        NotOffered: none of the equivalent runs was run.
        WrongForm, WrongSelection: other experts were selected.
    """
    before = expected_of(reading).ids
    for twin_run in those_that_ran(ran):
        _judge_choices(twin_run, tally, before)


@judge(WrongSelection, "route")
def _judge_choices(ran: Ran, before: Mapping[Place, Tensor]) -> Comparisons:
    yield Start(f"run {ran.twin.how}, ")
    for (m, rank), now_TK in expected_of(read_twin(ran)).ids.items():
        was_TK = before[m, rank]
        for t in (now_TK.sort(1).values != was_TK.sort(1).values).any(1).nonzero().flatten().tolist():
            yield Finding("choice", _selected(rank, t, now_TK, was_TK), (rank,))
        yield Comparison(rank, pairs=now_TK.numel())


def _routes(reading: Reading, place: Place) -> Routes:
    expected = expected_of(reading)
    ids_TK, order_TK = expected.ids[place].sort(dim=1)
    weights_TK = reading.seen(*place).router.weights_TK
    assert weights_TK is not None  # present, since ids are, which `expected_of` requires
    allowed_TK = expected.weights(place).allowed.gather(1, order_TK)
    return Routes(ids_TK, weights_TK.gather(1, order_TK), allowed_TK, expected.legal(place))


def _columns(routes: Sequence[Sequence[Routes]]) -> list[list[list[Tensor]]]:
    """Return for each field of `Routes` its tensors by [microbatch][rank]."""
    columns = []
    for field in range(len(Routes._fields)):
        columns.append([[of_rank[field] for of_rank in ranks] for ranks in routes])
    return columns


def _other_choices(now: Routes, was: Routes, rank: int, to_the_bit: bool) -> Iterator[Finding]:
    other_T = (now.ids_TK != was.ids_TK).any(1)
    if not to_the_bit:
        other_T = other_T & ~(now.legal_T & was.legal_T)
    for t in other_T.nonzero().flatten().tolist():
        yield Finding("choice", _selected(rank, t, now.ids_TK, was.ids_TK), (rank,))


def _selected(rank: int, t: int, now_TK: Tensor, was_TK: Tensor) -> str:
    return f"rank {rank} token {t} selected {now_TK[t].tolist()} instead of {was_TK[t].tolist()} in the original run"


@judge(WrongSelection, "route")
def _judge_slots(ran: Ran, before: Mapping[Place, Tensor]) -> Comparisons:
    """Decide whether the experts of all tokens, which are the same, are in the same slots."""
    yield Start(f"run {ran.twin.how}, ")
    for (m, rank), now_TK in expected_of(read_twin(ran)).ids.items():
        was_TK = before[m, rank]
        for t in (now_TK != was_TK).any(1).nonzero().flatten().tolist():
            sentence = (
                f"rank {rank} token {t} has its experts in the order {now_TK[t].tolist()} instead of "
                f"{was_TK[t].tolist()} in the original run: sums over slots then round differently"
            )
            yield Finding("slots", sentence, (rank,))


def _other_weights(now: Routes, was: Routes, rank: int, to_the_bit: bool, tally: Tally) -> Iterator[Finding]:
    """Yield findings for tokens that selected the same experts with other weights; the tally records the errors."""
    off_TK = (now.weights_TK.double() - was.weights_TK.double()).abs()
    allowed_TK = (now.allowed_TK + was.allowed_TK) * (not to_the_bit)
    same_TK = (now.ids_TK == was.ids_TK).all(1, keepdim=True).expand_as(off_TK)
    wrong_TK = ~(off_TK <= allowed_TK) & same_TK
    note_beyond(tally, now.weights_TK[same_TK], was.weights_TK.double()[same_TK], allowed_TK[same_TK])
    for t in wrong_TK.any(1).nonzero().flatten().tolist():
        k = int((off_TK[t] * wrong_TK[t]).argmax())
        is_, had = float(now.weights_TK[t, k]), float(was.weights_TK[t, k])
        weights = f"{is_:.9g} instead of {had:.9g} in the original run"
        sentence = f"rank {rank} token {t} has for expert {int(now.ids_TK[t, k])} the weight {weights}"
        yield Finding("weight", sentence, (rank,), float(off_TK[t, k]))
