"""Judges of balance biases after updates, and of load counters between updates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_conformance.chapters.balance_bias.judge.balancing_steps import (
    History,
    Point,
    Rule,
    declared,
    history_of,
    mistakes,
)
from moe_conformance.judging.compare.bounded import Worst, compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.claims import claims_of
from moe_conformance.judging.verdict import ChangedState, WrongBias, WrongCount, WrongForm
from moe_conformance.reference.balance_bias.updates import without_constant
from moe_conformance.scenarios.outcome import Outcome

_FLOAT32 = 2.0**-24


@judge(WrongBias, "finish")
def judge_updates(outcome: Outcome) -> Comparisons:
    """Decide whether every update moves every bias by the update rate against its load, up to a constant.

    Raises:
        WrongBias: a bias has another value.
        WrongForm: a bias has another shape, or is not a floating point tensor.
    """
    yield from once(outcome, _updates)


def _updates(outcome: Outcome) -> list[Comparison]:
    history, found = history_of(outcome), list[Comparison]()
    for rank in history.ranks:
        for layer in history.layers:
            found += _of_router(history, rank, layer)
    return found


def _of_router(history: History, rank: int, layer: int) -> Iterator[Comparison]:
    """Yield comparisons of a router's updates up to the first wrong one; later updates start from its result."""
    before_E = history.workload.parameters["balance_bias", layer].double()
    for point in history.points(rank, layer, declared(history.outcome)):
        bias_E = _observed(history, point, rank, layer)
        worst = _held(bias_E, point)
        if not worst.holds:
            wrong = _update_sentence(history, point, before_E, bias_E, worst, rank, layer)
            yield Comparison(rank, Finding("update", wrong, (rank,), worst.size), worst=worst.ratio)
            return
        yield Comparison(rank, elements=len(bias_E), worst=worst.ratio)
        before_E = bias_E


def _observed(history: History, point: Point, rank: int, layer: int) -> Tensor:
    bias_E: Tensor = history.seen(point.call, "updates")[rank][point.number]["now"][layer]
    shape = (history.workload.config.experts,)
    if tuple(bias_E.shape) != shape or not bias_E.is_floating_point():
        said = f"rank {rank}: the balance bias is {bias_E.dtype} {tuple(bias_E.shape)}; expected float32 {shape}"
        raise WrongForm("finish", said, ranks=(rank,))
    return bias_E.double()


def _held(bias_E: Tensor, point: Point) -> Worst:
    """Compare a bias with a point, both without their constant; an update may round once, a centred one twice."""
    allowed = 3 * (1 + point.updates) * _FLOAT32 * (1 + float(point.bias_E.abs().max()))
    expected_E = without_constant(point.bias_E)
    return compare(without_constant(bias_E), expected_E, torch.full_like(expected_E, allowed))


def _update_sentence(
    history: History, point: Point, before_E: Tensor, bias_E: Tensor, worst: Worst, rank: int, layer: int
) -> str:
    """Return a sentence about the expert whose bias is the most wrong after an update, with the likely cause."""
    e = worst.at[0]
    free_E, was_E = without_constant(bias_E), without_constant(before_E)
    moved, right = float(free_E[e] - was_E[e]), worst.expected - float(was_E[e])
    load, mean = int(point.loads_E[e]), float(point.loads_E.sum()) / len(bias_E)
    said = f"rank {rank}: {point.name} moved the bias of expert {e} in router {layer} by {moved:+.6g}"
    said = f"{said} relative to the mean bias, expected {right:+.6g}: its load is {load}, the mean load {mean:.6g}"
    return said + _cause(history, point, bias_E, e, rank, layer)


def _cause(history: History, point: Point, bias_E: Tensor, e: int, rank: int, layer: int) -> str:
    """Return the mistake that explains this update; of several, the one that explains the most updates."""
    explained: dict[str, int] = {}
    for words, rule in mistakes(history.outcome):
        points = history.points(rank, layer, rule)
        if _held(bias_E, points[point.updates - 1]).holds:
            explained[words] = sum(_held(_observed(history, other, rank, layer), other).holds for other in points)
    if not explained and len(bias_E) * point.loads_E[e] == point.loads_E.sum():
        return "; likely cause: an expert at the mean load is moved"
    still = bool((bias_E == history.bias(point.call, rank, layer).double()).all())
    said = "; it did not change" if still else ""
    return f"{said}; likely cause: {max(explained, key=lambda words: explained[words])}" if explained else said


@judge(WrongBias, "finish")
def judge_agreement(outcome: Outcome) -> Comparisons:
    """Decide whether all ranks of a router hold bitwise equal biases after every update.

    Raises:
        WrongBias: two ranks differ.
    """
    history = history_of(outcome)
    for ranks in history.routers():
        for call in history.steps:
            seen = history.seen(call, "updates")
            for number, first in enumerate(seen[ranks[0]]):
                for rank in ranks[1:]:
                    for layer in history.layers:
                        mine_E, theirs_E = first["now"][layer], seen[rank][number]["now"][layer]
                        if mine_E.dtype == theirs_E.dtype and torch.equal(mine_E, theirs_E):
                            yield Comparison(rank, elements=len(mine_E))
                            continue
                        e = int((mine_E.double() != theirs_E.double()).long().argmax())
                        said = f"after update {number} of step {call} rank {rank} holds {float(theirs_E[e]):.9g}"
                        said = f"{said} as the bias of expert {e} in router {layer}"
                        said = f"{said}, and rank {ranks[0]} {float(mine_E[e]):.9g}"
                        cause = "expected the same bits; likely cause: they were updated by different loads"
                        yield Comparison(rank, Finding("differ", f"{said}; {cause}", (rank,)))


@judge(ChangedState, "route")
def judge_steady(outcome: Outcome) -> Comparisons:
    """Decide whether biases do not change between two updates.

    Raises:
        ChangedState: a forward or a backward changed one.
    """
    history = history_of(outcome)
    for call in history.steps:
        for rank in history.ranks:
            forwards = history.seen(call, "forwards")[rank]
            for place, forward in enumerate(forwards):
                for layer in history.layers:
                    if torch.equal(forward["after"]["now"][layer], history.bias(call, rank, layer)):
                        yield Comparison(rank, elements=history.workload.config.experts)
                        continue
                    mode = history.batches(call, rank)[place].mode
                    said = f"rank {rank}: the bias of router {layer} changed in forward {place} ({mode}) of step {call}"
                    cause = "expected: in updates only; likely cause: it is updated by every forward"
                    yield Comparison(rank, Finding("steady", f"{said}; {cause}", (rank,)))


@judge(WrongCount, "finish")
def judge_counters(outcome: Outcome) -> Comparisons:
    """Decide whether counters hold the loads since the last update after a forward, and zeros after an update.

    A backend whose counters cannot be read has nothing to compare here.

    Raises:
        WrongCount: a counter holds another load.
    """
    history, rule = history_of(outcome), declared(outcome)
    for rank in history.ranks:
        for layer in history.layers:
            yield from _counters(history, rank, layer, rule)


def _counters(history: History, rank: int, layer: int, rule: Rule) -> Comparisons:
    """Yield comparisons of a router's counters up to the first wrong one."""
    reach = "rank" if claims_of(history.outcome.ranks).balance_counters == "of_rank" else "router"
    total_E = torch.zeros(history.workload.config.experts, dtype=torch.float64)
    for call in history.steps:
        for place, seen in enumerate(history.seen(call, "forwards")[rank]):
            before_E = total_E
            if history.kind(history.batches(call, rank)[place].mode, rule) == "training":
                total_E = total_E + _of_forward(history, call, place, layer, rank, rule, reach)
            if seen["after"]["loads"] is None:
                return
            counter_E = seen["after"]["loads"][layer].double()
            if not torch.equal(counter_E, total_E):
                said = _counter_sentence(history, (call, place, layer, rank), rule, reach, before_E, total_E)
                yield Comparison(rank, Finding("counter", said, (rank,)))
                return
            yield Comparison(rank, elements=len(counter_E))
        for number, seen in enumerate(history.seen(call, "updates")[rank]):
            total_E = torch.zeros_like(total_E)
            if seen["loads"] is not None and bool((seen["loads"][layer] != 0).any()):
                said = f"rank {rank}: after update {number} of step {call} the counters of router {layer}"
                said = f"{said} hold {seen['loads'][layer].tolist()}; expected zeros"
                yield Comparison(rank, Finding("left", said, (rank,)))
                return
            yield Comparison(rank, elements=len(total_E) * (seen["loads"] is not None))


def _of_forward(history: History, call: int, place: int, layer: int, rank: int, rule: Rule, reach: str) -> Tensor:
    ranks = [rank] if reach == "rank" else next(other for other in history.routers() if rank in other)
    return torch.stack([history.load(call, place, layer, other, rule) for other in ranks]).sum(0).double()


def _counter_sentence(
    history: History, at: tuple[int, int, int, int], rule: Rule, reach: str, before_E: Tensor, total_E: Tensor
) -> str:
    """Return a sentence about a wrong counter after a forward, with the likely cause."""
    call, place, layer, rank = at
    counter_E = history.seen(call, "forwards")[rank][place]["after"]["loads"][layer].double()
    mode = history.batches(call, rank)[place].mode
    said = f"rank {rank}: after forward {place} ({mode}) of step {call} the counters of router {layer} hold"
    said = f"{said} {_whole(counter_E)}, expected {_whole(total_E)}"
    load_E = _of_forward(history, call, place, layer, rank, rule, reach)
    if history.kind(mode, rule) != "training":
        forced = history.workload.config.routing.forced
        what = "forced loads" if forced else "forwards in this mode"
        words = f"{what} are counted" if torch.equal(counter_E, before_E + load_E) else ""
    elif torch.equal(counter_E, before_E + 2 * load_E):
        again = history.workload.config.balance.recompute
        words = "the forward that recomputation runs again is counted too" if again else "it is counted twice"
    else:
        words = next(
            (
                words
                for words, other in mistakes(history.outcome)
                if torch.equal(counter_E, before_E + _of_forward(history, call, place, layer, rank, other, reach))
            ),
            "",
        )
    return f"{said}; likely cause: {words}" if words else said


def _whole(loads_E: Tensor) -> list[int | float]:
    return [int(load) if load == int(load) else load for load in loads_E.tolist()]


@judge(WrongBias, "finish")
def judge_forced(outcome: Outcome) -> Comparisons:
    """Decide whether biases do not change under forced routing, or are updated if the backend claims so.

    Raises:
        WrongBias: they change, or are updated by other loads.
    """
    history = history_of(outcome)
    if declared(outcome).forced == "counted":
        yield from once(outcome, _updates)
        return
    for call in history.steps:
        for rank in history.ranks:
            for layer in history.layers:
                given_E = history.bias(history.steps[0], rank, layer)
                for number, seen in enumerate(history.seen(call, "updates")[rank]):
                    if torch.equal(seen["now"][layer], given_E):
                        yield Comparison(rank, elements=_uneven(history, call, rank, layer) * len(given_E))
                        continue
                    said = f"rank {rank}: update {number} of step {call} changed the bias of router {layer}"
                    why = "while routing is forced; expected: no change, since Claims.forced_loads is 'ignored'"
                    yield Comparison(rank, Finding("forced", f"{said} {why}", (rank,)))


def _uneven(history: History, call: int, rank: int, layer: int) -> bool:
    """Return whether the loads of a step would have moved the bias."""
    forwards = history.of_step(call, layer, rank, Rule())
    total_E = torch.stack([forward.loads_E for forward in forwards]).sum(0)
    return bool((total_E != total_E[0]).any())
