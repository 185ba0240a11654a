"""Reports of a load meter, held against the exact factors of what was routed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import require_finished
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import Tally, WrongCount
from moe_conformance.reference.overload.factors import Entry, entry
from moe_conformance.reference.overload.peaks import cumulative, cumulative_interval
from moe_conformance.reference.overload.report import Report, allowed_error, reported
from moe_conformance.reference.overload.timelines import Alone, Event, Label, since_reports, timeline
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.surfaces import MeteredPass

AVERAGE, MAXIMUM, CUMULATIVE = "avg_overload_factor", "max_overload_factor", "max_cum_overload_factor"
_NAME = re.compile(r"(avg|max|max_cum)_overload_factor(_layer_\d+)?$")


@dataclass(frozen=True)
class _Step:
    """What a step gives exactly: the entries of the world, and of every rank its timeline and its counts."""

    entries: tuple[Entry, ...]
    passes: tuple[tuple[tuple[str, Label], ...], ...]
    pairs: tuple[dict[Label, int], ...]
    balanced: tuple[dict[Label, Fraction], ...]

    def events(self, alone: Alone) -> list[tuple[Event, ...]]:
        """Return the timeline of every rank."""
        return [timeline(passes, alone=alone) for passes in self.passes]  # type: ignore[arg-type]


def judge_values(outcome: Outcome, tally: Tally, *names: str) -> None:
    """Decide whether every rank reports the values of these names, of every step.

    Args:
        outcome: Of a script of steps.
        tally: Counts a pair for each value.
        names: Without a prefix; "layers" stands for all values of layers.

    Raises:
        WrongCount: a value is missing or off, or a layer has one that recorded nothing.
    """
    findings: list[Finding] = []
    for number in range(len(outcome.workload.calls)):
        step = _exact(outcome, number)
        limits = [_limits(step, alone) for alone in ("counted", "left_out")]
        peak = cumulative(step.events("counted"), step.pairs, step.balanced)
        for rank, found in enumerate(values(outcome, number, "values")):
            seen = {match[0]: value for key, value in found.items() if (match := _NAME.search(key))}
            report = reported(step.entries, _stage(outcome, rank), cumulative=peak)
            for name in _asked(names, report, seen):
                wrong = _wrong(name, seen, report, len(step.entries), limits)
                if wrong:
                    findings.append(Finding(name, f"rank {rank}: step {number}: {name} is {wrong}", (rank,)))
                tally.add(pairs=1, rank=rank)
    if findings:
        fail(WrongCount, "run", findings)


def judge_names(outcome: Outcome, tally: Tally) -> None:
    """Decide whether reports have exactly the required names, with one prefix, and the number of their step.

    Raises:
        WrongCount: a name is missing or is one too many, prefixes differ, or another step is named.
    """
    findings = []
    for number, call in enumerate(outcome.workload.calls):
        step = _exact(outcome, number)
        peak = cumulative(step.events("counted"), step.pairs, step.balanced)
        steps = values(outcome, number, "step")
        for rank, found in enumerate(values(outcome, number, "values")):
            report = reported(step.entries, _stage(outcome, rank), cumulative=peak)
            names: dict[str, set[str]] = {_NAME.sub("", key): set() for key in found}
            for key in found:
                match = _NAME.search(key)
                names[_NAME.sub("", key)].add(match[0] if match else key)
            seen = set().union(*names.values())
            missing, odd = set(report.values) - report.may_be_absent - seen, seen - set(report.values)
            said = [f"the name {name} is missing" for name in sorted(missing)]
            said += [f"the name {name} is not one of the report's" for name in sorted(odd)]
            said += [f"the prefixes {sorted(names)} differ"] if len(names) > 1 else []
            given = call.given[rank]["number"]
            said += [f"step {steps[rank]} is named instead of {given}"] if steps[rank] != given else []
            findings += [Finding(each.split()[1], f"rank {rank}: step {given}: {each}", (rank,)) for each in said]
            tally.add(pairs=1, rank=rank)
    if findings:
        fail(WrongCount, "run", findings)


def _asked(names: Sequence[str], report: Report, seen: dict[str, float]) -> list[str]:
    layers = sorted(name for name in {*report.values, *seen} if "_layer_" in name) if "layers" in names else []
    return [name for name in names if name != "layers"] + layers


def _limits(step: _Step, alone: Alone) -> tuple[Fraction, Fraction]:
    return cumulative_interval(step.events(alone), step.pairs, step.balanced)


def _wrong(
    name: str, seen: dict[str, float], report: Report, terms: int, limits: Sequence[tuple[Fraction, Fraction]]
) -> str:
    """Say what is wrong with one value, "" if nothing is."""
    if name not in report.values:
        return f"{seen[name]:.6g} of a layer that recorded nothing on this stage"
    exact = report.values[name]
    if name not in seen:
        return "" if name in report.may_be_absent else f"absent instead of {float(exact):.6g}"
    value = seen[name]
    if isfinite(value):
        if name == CUMULATIVE and any(low <= Fraction(value) <= high for low, high in limits):
            return ""
        if name != CUMULATIVE and abs(Fraction(value) - exact) <= allowed_error(exact, terms):
            return ""
    return f"{value:.6g} instead of {float(exact):.6g}"


def _stage(outcome: Outcome, rank: int) -> int:
    return next(ranks.index(rank) for ranks in outcome.workload.layout.groups()["pp"] if rank in ranks)


def _exact(outcome: Outcome, number: int) -> _Step:
    """Work out a step: the entries of a group are its ranks' forwards in the same place."""
    require_finished(outcome)
    layout = outcome.workload.layout
    held = {rank.rank: rank.local_experts for rank in outcome.ranks}
    kept = [_kept(given["passes"]) for given in outcome.workload.calls[number].given]
    entries, pairs, balanced = [], [{} for _ in kept], [{} for _ in kept]  # type: ignore[var-annotated]
    for group in layout.groups()["ep_etp"]:
        for same in zip(*(kept[rank] for rank in group), strict=True):
            if same[0].kind in ("forward", "alone"):
                counted = entry(
                    [each.ids_TK for each in same],
                    [held[rank] for rank in group],
                    ep=layout.ep,
                    stage=_stage(outcome, group[0]),
                    layer=same[0].layer,
                    padding_by_rank=[each.padding_T for each in same],
                )
                entries.append(counted)
                for place, rank in enumerate(group):
                    label = (same[0].layer, same[0].microbatch)
                    pairs[rank][label], balanced[rank][label] = counted.pairs[place], counted.balanced
    passes = tuple(tuple((each.kind, (each.layer, each.microbatch)) for each in own) for own in kept)
    return _Step(tuple(entries), passes, tuple(pairs), tuple(balanced))


def _kept(passes: Sequence[MeteredPass]) -> tuple[MeteredPass, ...]:
    """Return the passes that the report covers: those of the last attempt."""
    log = ["abandon" if each.kind == "abandon" else (each.kind, place) for place, each in enumerate(passes)]
    (covered,) = since_reports([*log, "report"])  # type: ignore[list-item]
    return tuple(passes[place] for _, place in covered)  # type: ignore[call-overload]
