"""Judges of what a load meter must not change, and of counters: results and collectives of passes and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_conformance.chapters.overload.judge.passes import covered
from moe_conformance.contract import MeteredPass
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import require_finished
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.observed.traffic import by_phase, signature
from moe_conformance.judging.verdict import (
    Costly,
    Mismatch,
    NotOffered,
    Stage,
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
        NotOffered: two runs without the meter differ, so that the meter's effect is unknown.
    """
    metered, plain, again = _same_runs(outcome)
    fields: tuple[tuple[str, str, Stage, type[Mismatch]], ...] = (
        ("outputs", "y of forward", "combine", WrongOutput),
        ("gradients", "gradient", "gradient", WrongGradient),
    )
    for field, what, stage, kind in fields:
        on, off, repeated = (values(outcome, call, field) for call in (metered, plain, again))
        findings = []
        for rank, results in enumerate(zip(on, off, repeated, strict=True)):
            if not len(results[0]) == len(results[1]) == len(results[2]):
                counts = " and ".join(str(len(of_run)) for of_run in results)
                raise kind(stage, f"rank {rank} returned {counts} {field} for the same passes", ranks=(rank,))
            for number, (with_meter, without, repetition) in enumerate(zip(*results, strict=True)):
                if not _same_bits(without, repetition):
                    raise NotOffered(f"{what} {number} on rank {rank} differs between two runs without the meter")
                if not _same_bits(with_meter, without):
                    findings.append(Finding(field, _differs(what, number, rank, with_meter, without), (rank,)))
                tally.add(elements=without.numel(), rank=rank)
        if findings:
            fail(kind, stage, findings)


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
    metered, plain, again = _same_runs(outcome)
    findings = []
    for rank in outcome.ranks:
        phases = by_phase(rank)
        on = [signature(item) for item in phases.get(f"run:{metered}", ())]
        for call in (plain, again):
            off = [signature(item) for item in phases.get(f"run:{call}", ())]
            if on != off:
                place = next(
                    (n for n, both in enumerate(zip(on, off, strict=False)) if both[0] != both[1]),
                    min(len(on), len(off)),
                )
                seen = [
                    f"{item[place][0]} of shapes {item[place][4]}" if place < len(item) else "no call"
                    for item in (on, off)
                ]
                sentence = (
                    f"rank {rank.rank}: passes call {len(on)} collectives with the meter on and {len(off)} with it "
                    f"off; call {place} is {seen[0]} with the meter on, expected {seen[1]}"
                )
                findings.append(Finding("passes", sentence, (rank.rank,)))
            reduced = len(phases.get(f"report:{call + 1}", ()))
            if reduced:
                sentence = f"rank {rank.rank}: a report calls {reduced} collectives with the meter off; expected 0"
                findings.append(Finding("report", sentence, (rank.rank,)))
            tally.add(pairs=2 + len(off), rank=rank.rank)
    if findings:
        fail(WrongCollectives, "run", findings)
    reported = [
        Finding("values", f"rank {rank}: the report of a meter that is off has the values {', '.join(found)}", (rank,))
        for call in (plain, again)
        for rank, found in enumerate(values(outcome, call + 1, "values"))
        if found
    ]
    if reported:
        fail(WrongCount, "run", reported)


def judge_constant_collectives(outcome: Outcome, tally: Tally) -> None:
    """Decide whether all reports call equally many collectives, if every rank has entries.

    Raises:
        Costly: a report calls more than another.
    """
    counts = [(number, entries, calls) for number, entries, calls in _report_calls(outcome) if min(entries) > 0]
    for rank in range(len(outcome.ranks)):
        least = min(calls[rank] for _, _, calls in counts)
        for number, entries, calls in counts:
            if calls[rank] != least:
                raise Costly(
                    "run",
                    f"rank {rank}: the report of step {number}, with {entries[rank]} entries, calls {calls[rank]} "
                    f"collectives; another report calls {least}",
                    ranks=(rank,),
                )
            tally.add(pairs=1, rank=rank)


def judge_few_collectives(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every report calls at most `MOST_COLLECTIVES` collectives.

    Raises:
        Costly: a report calls more.
    """
    for number, _, calls in _report_calls(outcome):
        for rank, count in enumerate(calls):
            if count > MOST_COLLECTIVES:
                sentence = f"rank {rank}: the report of step {number} calls {count} collectives"
                raise Costly("run", f"{sentence}; at most {MOST_COLLECTIVES} are needed", ranks=(rank,))
            tally.add(pairs=1, rank=rank)


def judge_counters(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a load counter has, for every expert, the routed pairs of this rank's tokens in training.

    Raises:
        WrongCount: an expert has more or fewer.
        NotOffered: there is no counter.
    """
    findings = []
    for step in covered(outcome):
        for rank, found_E in enumerate(values(outcome, step.call, "counts_E")):
            if found_E is None:
                raise NotOffered("this meter has no counter of pairs per expert")
            experts = outcome.workload.config.experts
            counts_E = expert_counts([_routed(metered) for metered in step.passes[rank]], experts)
            if found_E.tolist() != counts_E.tolist():
                sentence = f"rank {rank}: step {step.number}: the counter of pairs per expert has {found_E.tolist()}"
                findings.append(Finding("counter", f"{sentence}, expected {counts_E.tolist()}", (rank,)))
            tally.add(pairs=experts, rank=rank)
    if findings:
        fail(WrongCount, "run", findings)


def judge_trace(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a router trace has exactly the ids of every training forward, as a set per token.

    Passes in evaluation mode may have a record too.

    Raises:
        WrongCount: a record is missing, superfluous, or has other ids.
        NotOffered: there is no trace.
    """
    findings = []
    for step in covered(outcome):
        for rank, found in enumerate(values(outcome, step.call, "trace")):
            if found is None:
                raise NotOffered("this meter has no router trace")
            passes = [_routed(item) for item in step.passes[rank]]
            records = trace([item for item in passes if item.kind != "evaluation"])
            free = {item.label for item in passes if item.kind == "evaluation"}
            said = [f"no record of {_named(label)}" for label in records if label not in found]
            said += [
                f"a record of {_named(label)}, which did not run" for label in found if label not in {*records, *free}
            ]
            for label, ids_TK in found.items():
                sets = tuple(frozenset(e for e in ids_K if e >= 0) for ids_K in ids_TK.tolist())
                if label in records and sets != records[label]:
                    said.append(f"other experts in the record of {_named(label)} than dispatch received")
            where = f"rank {rank}: step {step.number}: the router trace has"
            findings += [Finding("trace", f"{where} {item}", (rank,)) for item in said]
            tally.add(pairs=sum(map(len, records.values())), rank=rank)
    if findings:
        fail(WrongCount, "run", findings)


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


def _report_calls(outcome: Outcome) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    """Yield for every report its number, the entries that each rank recorded, and its number of collectives."""
    phases = [by_phase(rank) for rank in sorted(outcome.ranks, key=lambda rank: rank.rank)]
    for step in covered(outcome):
        calls = [len(of_rank.get(f"report:{step.call}", ())) for of_rank in phases]
        yield step.number, [len(labels) for labels in step.recorded], calls


def _routed(metered: MeteredPass) -> RoutedPass:
    ids_TK = torch.empty(0, 1, dtype=torch.int64) if metered.ids_TK is None else metered.ids_TK
    assert metered.kind != "abandon"
    return RoutedPass(metered.kind, (metered.layer, metered.microbatch), ids_TK, metered.padding_T)


def _named(label: Label) -> str:
    assert isinstance(label, tuple)
    return f"layer {label[0]}, microbatch {label[1]}"
