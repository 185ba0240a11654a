"""Judges of counters of shortcuts: their values after each call, and that counting changes no result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import WrongCount, WrongOutput
from moe_conformance.reference.fast_paths.choices import decision_counts, equal_counts, look_up_counts
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Call

_EQUAL = "equal_counts"  # the only shortcut that is named in the contract
Pair = tuple[int, int]


@dataclass(frozen=True)
class _Segment:
    """The counts of a rank between a reset and a reading, with at most one forward between them."""

    rank: int
    number: int  # the number of the call that reads the counters
    forward: Call | None
    counting: bool
    # look-ups and changes before the forward; None if other calls may have used caches since
    before: tuple[str, ...] | None

    @property
    def words(self) -> str:
        """The call of the segment, as messages write it."""
        if self.forward is None:
            return "behind a reset"
        given = self.forward.given[self.rank]
        mode = f"under {self.forward.modes[-1]}" if self.forward.modes else "with gradients"
        return f"behind a forward {mode}, counts {list(given['counts_N'])}, call {self.number},"

    @property
    def taken(self) -> bool:
        """Whether the shortcut for equal counts may be taken."""
        assert self.forward is not None
        given = self.forward.given[self.rank]
        return equal_counts(given["counts_N"], len(given["rows_RD"]))


@judge(WrongCount, "experts")
def judge_counts(outcome: Outcome) -> Comparisons:
    """Decide whether counters are off at first, and count every decision and look-up once when they are on.

    Raises:
        WrongCount: they count while they are off or for another rank, count a call otherwise than once, call a shortcut
            taken that may not be, or a look-up a hit that has to be a miss, or the other way round.
    """
    for segment in _segments(outcome):
        decisions: Mapping[str, Pair] = values(outcome, segment.number, "decisions")[segment.rank]
        look_ups: Mapping[str, Pair] = values(outcome, segment.number, "look_ups")[segment.rank]
        for said in (*_of_decisions(segment, decisions), *_of_look_ups(segment, look_ups)):
            yield Comparison(segment.rank, f"rank {segment.rank}: {segment.words} {said}", kind="counts")
        yield Comparison(segment.rank, pairs=1)


def _of_decisions(segment: _Segment, decisions: Mapping[str, Pair]) -> Iterator[str]:
    if not segment.counting or segment.forward is None:
        why = "counters are off" if not segment.counting else "nothing was called"
        for name, (taken, left) in decisions.items():
            if taken or left:
                yield f"{name} was taken {taken} times and not taken {left} times; expected 0: {why}"
        return
    once = {decision_counts([True]), decision_counts([False])}
    for name, counted in decisions.items():
        allowed = {*once, (0, 0)} if not segment.forward.modes else once
        if name == _EQUAL and (segment.forward.modes and not segment.taken):
            allowed = {decision_counts([False])}
        if tuple(counted) not in allowed:
            expected = " or ".join(f"{taken} and {left}" for taken, left in sorted(allowed, reverse=True))
            yield f"{name} was taken {counted[0]} times and not taken {counted[1]} times; expected {expected}"
    if segment.forward.modes and not decisions:
        yield "no decision was counted; expected one for each shortcut"


def _of_look_ups(segment: _Segment, look_ups: Mapping[str, Pair]) -> Iterator[str]:
    """Yield what is wrong with the counted look-ups.

    A forward with gradients or with other counts may drop the cache; the next look-up is then a miss.
    """
    if not segment.counting or segment.forward is None:
        for name, (hits, misses) in look_ups.items():
            if hits or misses:
                yield f"{name} has {hits} hits and {misses} misses; expected 0"
        return
    for name, counted in look_ups.items():
        hits_misses = tuple(counted)
        allowed = {(1, 0), (0, 1)}
        if segment.before is not None:
            allowed = {look_up_counts([*segment.before, "reset", "look_up"])}
        if not (segment.forward.modes and segment.taken):
            allowed = {(0, 0), (1, 0), (0, 1)}  # a path that uses the cache nevertheless
        if hits_misses not in allowed:
            words = " or ".join(f"{hits} and {misses}" for hits, misses in sorted(allowed, reverse=True))
            yield f"{name} has {hits_misses[0]} hits and {hits_misses[1]} misses; expected {words}"


def _segments(outcome: Outcome) -> Iterator[_Segment]:
    for rank in range(outcome.workload.layout.world):
        on, ranks, forward = False, None, None
        events: tuple[str, ...] | None = ()
        before = events
        for number, call in enumerate(outcome.workload.calls):
            if call.method == "enable":
                on = bool(call.given[rank]["on"])
            elif call.method == "restrict" and values(outcome, number)[rank]:
                ranks = call.given[rank]["ranks"]
            elif call.method == "reset":
                forward = None
            elif call.method == "change":
                events = ("change",)
            elif call.method == "forward":
                forward, before = call, events
                events = ("look_up",) if _looks_up(call, rank) else None
            elif call.method == "counts":
                yield _Segment(rank, number, forward, on and (ranks is None or rank in ranks), before)


def _looks_up(call: Call, rank: int) -> bool:
    """Return whether a forward takes the shortcut for equal counts, so that its derived values are cached."""
    return bool(call.modes) and equal_counts(call.given[rank]["counts_N"], len(call.given[rank]["rows_RD"]))


@judge(WrongOutput, "experts")
def judge_unchanged(outcome: Outcome) -> Comparisons:
    """Decide whether counted forwards give the same bits as uncounted ones, gradients included.

    Compared only where two uncounted forwards give the same bits.

    Raises:
        WrongOutput: a counted forward gives other bits.
    """
    for rank in range(outcome.workload.layout.world):
        seen: dict[tuple[int, tuple[str, ...], tuple[int, ...]], list[tuple[bool, tuple[Tensor, ...]]]] = {}
        on, changes = False, 0
        for number, call in enumerate(outcome.workload.calls):
            if call.method == "enable":
                on = bool(call.given[rank]["on"])
            changes += call.method == "change"
            if call.method == "forward":
                key = (changes, call.modes, tuple(call.given[rank]["counts_N"]))
                seen.setdefault(key, []).append((on, _results(outcome, number, rank)))
        for (_, modes, counts), found in seen.items():
            off = [results for counted, results in found if not counted]
            for counted, results in found:
                if not counted or not off or not all(_equal(tensors, off[0]) for tensors in off):
                    continue
                mode = f"under {modes[-1]}" if modes else "with gradients"
                said = f"rank {rank}: a forward {mode}, counts {list(counts)}, gives other bits while it is counted"
                elements = sum(tensors.numel() for tensors in results)
                yield Comparison(rank, "" if _equal(results, off[0]) else said, elements=elements, kind="bits")


def _results(outcome: Outcome, number: int, rank: int) -> tuple[Tensor, ...]:
    """Return the output of a forward, the gradient of its rows, and the parameter gradients read after it."""
    answer, call = answers(outcome, number)[rank], outcome.workload.calls[number]
    found = [values(outcome, number)[rank], *(tensor for tensor in answer.gradients.values() if tensor is not None)]
    if call.upstream:
        gradients = values(outcome, number + 1)[rank]
        found += [tensor for tensor in gradients.values() if tensor is not None]
    return tuple(found)


def _equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
