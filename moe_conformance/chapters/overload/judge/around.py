"""Judges of what a load meter must not change, and of counters: results and collectives of passes and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.chapters.overload.judge.passes import covered, with_factors
from moe_conformance.contract import MeteredPass
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.observed.traffic import by_phase, signature
from moe_conformance.judging.verdict import (
    Costly,
    NotOffered,
    Tally,
    WrongCollectives,
    WrongCount,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.overload.counters import RoutedPass, expert_counts, trace
from moe_conformance.reference.overload.timelines import Label
from moe_conformance.scenarios.outcome import Outcome

MOST_COLLECTIVES = 5  # allowed collectives of a report (LOAD-27)


def judge_same_results(outcome: Outcome, tally: Tally) -> None:
    """Decide whether passes return the same bits with the meter on and off.

    Args:
        outcome: Of a script that runs the same passes with the meter on, then twice with it off.
        tally: Counts elements.

    Raises:
        WrongOutput, WrongGradient: a bit or the shape differs.
        NotOffered: two runs without the meter differ, so that the meter's effect is unknown, or a counter goes on.
    """
    _require_switched(outcome)
    for field, what in (("outputs", "y of forward"), ("gradients", "gradient")):
        _require_repeated(outcome, field, what)
    judge(WrongOutput, "combine")(_compare_results)(outcome, tally, "outputs", "y of forward")
    judge(WrongGradient, "gradient")(_compare_results)(outcome, tally, "gradients", "gradient")


def _require_switched(outcome: Outcome) -> None:
    """Raise `NotOffered` if a counter goes on with the meter off: both runs would be metered."""
    for run in _same_runs(outcome)[1:]:
        for rank, counts_E in enumerate(values(outcome, run + 1, "counts_E")):
            if counts_E is not None and bool(counts_E.any()):
                raise NotOffered(f"the counter cannot be switched off: on rank {rank} it goes on")


def _require_repeated(outcome: Outcome, field: str, what: str) -> None:
    """Raise `NotOffered` if two runs without the meter differ in a bit."""
    _, *without_meter = _same_runs(outcome)
    for rank, (first, second) in enumerate(zip(*(values(outcome, call, field) for call in without_meter), strict=True)):
        for number, (without, repetition) in enumerate(zip(first, second, strict=False)):
            if not _same_bits(without, repetition):
                raise NotOffered(f"{what} {number} on rank {rank} differs between two runs without the meter")


def _compare_results(outcome: Outcome, field: str, what: str) -> Comparisons:
    by_run = [values(outcome, call, field) for call in _same_runs(outcome)]
    for rank, results in enumerate(zip(*by_run, strict=True)):
        if not len(results[0]) == len(results[1]) == len(results[2]):
            counts = " and ".join(str(len(of_run)) for of_run in results)
            yield Comparison(rank, f"rank {rank} returned {counts} {field} for the same passes", kind="number")
            continue
        for number, (with_meter, without, _) in enumerate(zip(*results, strict=True)):
            same = _same_bits(with_meter, without)
            wrong = "" if same else _differs(what, number, rank, with_meter, without)
            yield Comparison(rank, wrong, elements=without.numel(), kind=field)


def judge_same_collectives(outcome: Outcome, tally: Tally) -> None:
    """Decide whether passes call the same collectives with the meter on and off, and no report is made when off.

    Args:
        outcome: As for `judge_same_results`.
        tally: Counts a pair for each run and report, and each collective of the former.

    Raises:
        WrongCollectives: a run has a call that the other lacks, or the report of a meter that is off calls a
            collective.
        WrongCount: a meter that is off reports values.
    """
    _judge_collectives(outcome, tally)
    _judge_no_values(outcome, tally)


@judge(WrongCollectives, "run")
def _judge_collectives(outcome: Outcome) -> Comparisons:
    metered, plain, again = _same_runs(outcome)
    for rank in outcome.ranks:
        phases = by_phase(rank)
        on = [signature(entry) for entry in phases.get(f"run:{metered}", ())]
        for call in (plain, again):
            off = [signature(entry) for entry in phases.get(f"run:{call}", ())]
            if on != off:
                yield Comparison(rank.rank, f"rank {rank.rank}: {_other_calls(on, off)}", kind="passes")
            if reduced := len(phases.get(f"report:{call + 1}", ())):
                wrong = f"rank {rank.rank}: a report calls {reduced} collectives with the meter off; expected 0"
                yield Comparison(rank.rank, wrong, kind="report")
            yield Comparison(rank.rank, pairs=2 + len(off))


def _other_calls(on: Sequence[tuple[object, ...]], off: Sequence[tuple[object, ...]]) -> str:
    """Return how the collectives of passes with the meter on differ from those with it off."""
    differing = (n for n, (one, other) in enumerate(zip(on, off, strict=False)) if one != other)
    place = next(differing, min(len(on), len(off)))
    seen = [
        f"{calls[place][0]} of shapes {calls[place][4]}" if place < len(calls) else "no call" for calls in (on, off)
    ]
    return (
        f"passes call {len(on)} collectives with the meter on and {len(off)} with it off; call {place} is {seen[0]} "
        f"with the meter on, expected {seen[1]}"
    )


@judge(WrongCount, "run")
def _judge_no_values(outcome: Outcome) -> Comparisons:
    _, plain, again = _same_runs(outcome)
    for call in (plain, again):
        for rank, found in enumerate(values(outcome, call + 1, "values")):
            wrong = f"rank {rank}: the report of a meter that is off has the values {', '.join(found or ())}"
            yield Comparison(rank, wrong if found else "", kind="values")


@judge(Costly, "run")
def judge_constant_collectives(outcome: Outcome) -> Comparisons:
    """Decide whether all reports call equally many collectives, if every rank has entries.

    Raises:
        Costly: a report calls more than another.
    """
    reports = [report for report in _report_calls(outcome) if min(report.entries) > 0]
    for rank in range(len(outcome.ranks)):
        least = min(report.calls[rank] for report in reports)
        for number, entries, calls in reports:
            said = f"rank {rank}: the report of step {number}, with {entries[rank]} entries, calls {calls[rank]}"
            wrong = f"{said} collectives; another report calls {least}" if calls[rank] != least else ""
            yield Comparison(rank, wrong, pairs=1, kind="more")


@judge(Costly, "run")
def judge_few_collectives(outcome: Outcome) -> Comparisons:
    """Decide whether every report calls at most `MOST_COLLECTIVES` collectives.

    Raises:
        Costly: a report calls more.
    """
    for number, _, calls in _report_calls(outcome):
        for rank, count in enumerate(calls):
            said = f"rank {rank}: the report of step {number} calls {count} collectives"
            wrong = f"{said}; at most {MOST_COLLECTIVES} are needed" if count > MOST_COLLECTIVES else ""
            yield Comparison(rank, wrong, pairs=1, kind="many")


@judge(WrongCount, "run")
def judge_counters(outcome: Outcome) -> Comparisons:
    """Decide whether a load counter has, for every expert, the routed pairs of this rank's tokens in training.

    Raises:
        WrongCount: an expert has more or fewer.
        NotOffered: there is no counter.
    """
    experts = outcome.workload.config.experts
    for step in covered(outcome):
        for rank, found_E in enumerate(values(outcome, step.call, "counts_E")):
            if found_E is None:
                raise NotOffered("this meter has no counter of pairs per expert")
            expected = expert_counts([_routed(metered) for metered in step.passes[rank]], experts).tolist()
            twice = [_routed(metered) for metered in step.passes[rank] for _ in range(1 + metered.recomputed)]
            found = found_E.tolist()
            said = f"rank {rank}: step {step.number}: the counter of pairs per expert has {found}, expected {expected}"
            if found == expert_counts(twice, experts).tolist():
                said += "; likely cause: the forward that recomputation runs again is counted too"
            yield Comparison(rank, said if found != expected else "", pairs=experts, kind="counter")


@judge(WrongCount, "run")
def judge_trace(outcome: Outcome) -> Comparisons:
    """Decide whether a router trace has exactly the ids of every training forward, as a set per token.

    Passes in evaluation mode may have a record too.

    Raises:
        WrongCount: a record is missing, superfluous, or has other ids.
        NotOffered: there is no trace.
    """
    for step in covered(outcome):
        for rank, found in enumerate(values(outcome, step.call, "trace")):
            if found is None:
                raise NotOffered("this meter has no router trace")
            passes = [_routed(metered) for metered in step.passes[rank]]
            records = trace([routed for routed in passes if routed.kind != "evaluation"])
            evaluated = {routed.label for routed in passes if routed.kind == "evaluation"}
            for said in _wrong_records(found, records, evaluated):
                wrong = f"rank {rank}: step {step.number}: the router trace has {said}"
                yield Comparison(rank, wrong, kind="trace")
            yield Comparison(rank, pairs=sum(map(len, records.values())))


def _wrong_records(
    found: Mapping[Label, Tensor], records: Mapping[Label, Sequence[frozenset[int]]], free: Collection[Label]
) -> Iterator[str]:
    """Yield what is wrong with the records of a trace; those of `free` labels may be there or not."""
    for label in records:
        if label not in found:
            yield f"no record of {_named(label)}"
    for label, ids_TK in found.items():
        sets = tuple(frozenset(e for e in ids_K if e >= 0) for ids_K in ids_TK.tolist())
        if label not in records and label not in free:
            yield f"a record of {_named(label)}, which did not run"
        if label in records and sets != records[label]:
            yield f"other experts in the record of {_named(label)} than dispatch received"


def _same_runs(outcome: Outcome) -> tuple[int, int, int]:
    """Return the numbers of the calls that run the same passes: with the meter on, and twice with it off."""
    require_finished(outcome)
    methods = [call.method for call in outcome.workload.calls]
    ran = [number for number, method in enumerate(methods) if method == "run"]
    off = methods.index("switch")
    metered, (plain, again) = ran[0], [number for number in ran if number > off][:2]
    return metered, plain, again


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _differs(what: str, number: int, rank: int, on: Tensor, off: Tensor) -> str:
    if on.shape != off.shape or on.dtype != off.dtype:
        forms = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (on, off)]
        return f"rank {rank}: {what} {number} is {forms[0]} with the meter on, {forms[1]} with it off"
    most = float((on.double() - off.double()).abs().max())
    return (
        f"rank {rank}: {what} {number} differs by up to {most:.3g} with the meter on and off; expected: the same bits"
    )


class _ReportCalls(NamedTuple):
    """A report of a meter that is on: its number, and by rank the recorded entries and the collectives it calls."""

    number: int
    entries: Sequence[int]
    calls: Sequence[int]


def _report_calls(outcome: Outcome) -> Iterator[_ReportCalls]:
    phases = [by_phase(rank) for rank in sorted(outcome.ranks, key=lambda rank: rank.rank)]
    for step in with_factors(outcome):
        calls = [len(of_rank.get(f"report:{step.call}", ())) for of_rank in phases]
        yield _ReportCalls(step.number, [len(labels) for labels in step.recorded], calls)


def _routed(metered: MeteredPass) -> RoutedPass:
    ids_TK = torch.empty(0, 1, dtype=torch.int64) if metered.ids_TK is None else metered.ids_TK
    assert metered.kind != "abandon"
    return RoutedPass(metered.kind, (metered.layer, metered.microbatch), ids_TK, metered.padding_T)


def _named(label: Label) -> str:
    assert isinstance(label, tuple)
    return f"layer {label[0]}, microbatch {label[1]}"
