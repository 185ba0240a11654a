"""Judges of the reports of a load meter, compared with the exact factors of the routing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from moe_conformance.chapters.overload.judge.passes import (
    MISTAKES,
    Covered,
    Exact,
    exact,
    mistaken,
    stage_by_rank,
    uneven_groups,
    with_factors,
)
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import ratio_names, ratio_words
from moe_conformance.judging.observed.script import answers, judge_no_slip, values
from moe_conformance.judging.verdict import WrongCount
from moe_conformance.reference.overload.report import Empty, Report, allowed_error, ends, reported
from moe_conformance.scenarios.outcome import Answer, Outcome

AVERAGE, MAXIMUM, CUMULATIVE = "avg_overload_factor", "max_overload_factor", "max_cum_overload_factor"
ALL = (AVERAGE, MAXIMUM, CUMULATIVE, "layers")
_NAME = re.compile(r"(avg|max|max_cum)_overload_factor(_layer_\d+)?$")


@dataclass(frozen=True)
class _Wrong:
    """A wrong value: its rank, name and description, and its error divided by the bound (0 without a bound)."""

    rank: int
    name: str
    words: str
    size: float = 0.0
    value: float | None = None


@judge(WrongCount, "run")
def judge_values(outcome: Outcome, *names: str) -> Comparisons:
    """Decide whether every rank reports the right values of these names in every step.

    Entries without tokens count as 0 or are left out, in the same way for a whole report.

    Args:
        outcome: Of a script of steps.
        names: Without a prefix; "layers" stands for all values of layers.

    Raises:
        WrongCount: a value is missing or wrong, or a layer without entries has a value.
    """
    for step in with_factors(outcome):
        found = values(outcome, step.call, "values")
        yield from _compare_step(outcome, step, dict(enumerate(found)), names)


@judge(WrongCount, "run")
def judge_names(outcome: Outcome) -> Comparisons:
    """Decide whether reports have exactly the required names, with one prefix, and the number of their step.

    Raises:
        WrongCount: a name is missing or superfluous, prefixes differ, or the number of the step is wrong.
    """
    for step in with_factors(outcome):
        worked_out = exact(outcome, step)
        steps = values(outcome, step.call, "step")
        given = outcome.workload.calls[step.call].given
        for rank, found in enumerate(values(outcome, step.call, "values")):
            report = reported(worked_out.entries, worked_out.stages[rank], cumulative=worked_out.peak)
            number = given[rank]["number"]
            said = list(_wrong_names(found, report))
            said += [f"step {steps[rank]} is named instead of {number}"] if steps[rank] != number else []
            for sentence in said:
                yield Comparison(rank, f"rank {rank}: step {number}: {sentence}", kind=sentence.split()[1])
            yield Comparison(rank, pairs=1)


def _wrong_names(found: Collection[str], report: Report) -> Iterator[str]:
    seen: set[str] = set()
    for key in found:
        match = _NAME.search(key)
        seen.add(match[0] if match else key)
    yield from (f"the name {name} is missing" for name in sorted({*report.values} - report.may_be_absent - seen))
    yield from (f"the name {name} is not one of the report's" for name in sorted(seen - {*report.values}))
    prefixes = {_NAME.sub("", key) for key in found}
    if len(prefixes) > 1:
        yield f"the prefixes {sorted(prefixes)} differ"


@judge(WrongCount, "run")
def judge_uneven(outcome: Outcome) -> Comparisons:
    """Decide whether reports of ranks with different numbers of entries raise an error or have right values.

    Args:
        outcome: Of a script in which a report may raise.

    Raises:
        WrongCount: a rank reports although a rank of its group recorded other entries; ranks of a stage end
            differently; a rank raises without a reason, or reports a wrong value.
        Raised: a rank raised an internal error, such as a NameError.
        Hung: some ranks wait for others.
    """
    layout = outcome.workload.layout
    stages = stage_by_rank(layout)
    for step in with_factors(outcome):
        judge_no_slip(outcome, step.call)
        found = answers(outcome, step.call)
        expected = ends(step.recorded, layout.groups()["ep_etp"], stages)
        for rank, (end, answer) in enumerate(zip(expected, found, strict=True)):
            of_stage = {other.raised for other, stage in zip(found, stages, strict=True) if stage == stages[rank]}
            words = _wrong_end(end, answer, of_stage)
            wrong = f"rank {rank}: step {step.number} ends with {words}" if words else ""
            yield Comparison(rank, wrong, pairs=1, kind=end)
        if not uneven_groups(outcome, step):
            seen = {rank: answer.values["values"] for rank, answer in enumerate(found) if not answer.raised}
            yield from _compare_step(outcome, step, seen, ALL)


def _wrong_end(expected: str, answer: Answer, raised_of_stage: Collection[bool]) -> str:
    """Return how a report ends that should end otherwise, "" if it ends as expected."""
    if expected == "error" and not answer.raised:
        return "a report although the ranks of its exchange group recorded different entries; expected: an error"
    if expected == "values" and answer.raised:
        return f"{answer.error_type}: {answer.error}; expected: a report"
    if expected == "either" and len(raised_of_stage) > 1:
        return f"{'an error' if answer.raised else 'a report'}, and other ranks of its stage end differently"
    return ""


def _compare_step(
    outcome: Outcome, step: Covered, found: Mapping[int, Mapping[str, float]], names: Sequence[str]
) -> Comparisons:
    """Compare the values of a step, with empty entries counted or left out, whichever fits better."""
    worked_out = exact(outcome, step)
    wrong, compared = _off(worked_out, "zero", found, names)
    if wrong:
        left_out = _off(worked_out, "left_out", found, names)
        wrong, compared = min((wrong, compared), left_out, key=lambda by: len(by[0]))
    for rank, pairs in compared.items():
        of_rank = [value for value in wrong if value.rank == rank]
        cause = _cause(outcome, step, of_rank)
        for value in of_rank:
            said = f"rank {rank}: step {step.number}: {value.name} is {value.words}"
            sentence = f"{said}{cause or _ratio(outcome, worked_out, value)}"
            yield Comparison(rank, sentence, worst=value.size, kind=value.name)
        yield Comparison(rank, pairs=pairs)


def _cause(outcome: Outcome, step: Covered, wrong: Sequence[_Wrong]) -> str:
    """Return the mistake that explains all wrong values of a rank, "" if there is none."""
    if not wrong or any(value.value is None or not isfinite(value.value) for value in wrong):
        return ""
    for mistake in MISTAKES:
        other = mistaken(outcome, step, mistake)
        if other is None:
            continue
        report = reported(other.entries, other.stages[wrong[0].rank], cumulative=other.peak)
        seen = {value.name: value.value for value in wrong if value.value is not None}
        if not any(_wrong(name, seen, report, _limits(other, wrong[0].rank, name, report))[0] for name in seen):
            return f"; likely cause: {mistake.words}"
    return ""


def _ratio(outcome: Outcome, worked_out: Exact, wrong: _Wrong) -> str:
    """Return the size of the layout or the config that a value is wrong by, "" if there is none."""
    right = reported(worked_out.entries, worked_out.stages[wrong.rank], cumulative=worked_out.peak).values
    if wrong.value is None or not right.get(wrong.name):
        return ""
    layout, config = outcome.workload.layout, outcome.workload.config
    sizes = {"K": config.top_k, "ep": layout.ep, "etp": layout.etp, "tp": layout.tp, "edp": layout.edp}
    words = ratio_words(wrong.value / float(right[wrong.name]), ratio_names(sizes))
    return f"; likely cause: it is {words}" if ":" in words else ""


def _off(
    step: Exact, empty: Empty, found: Mapping[int, Mapping[str, float]], names: Sequence[str]
) -> tuple[list[_Wrong], dict[int, int]]:
    """Return the wrong values with empty entries counted or left out, and the number compared on every rank."""
    wrong, compared = [], {}
    for rank, by_key in found.items():
        seen = {match[0]: value for key, value in by_key.items() if (match := _NAME.search(key))}
        report = reported(step.entries, step.stages[rank], cumulative=step.peak, empty=empty)
        required = _required_names(names, report, seen)
        compared[rank] = len(required)
        for name in required:
            words, size = _wrong(name, seen, report, _limits(step, rank, name, report))
            wrong += [_Wrong(rank, name, words, size, seen.get(name))] if words else []
    return wrong, compared


def _required_names(names: Sequence[str], report: Report, seen: Mapping[str, float]) -> list[str]:
    layers = sorted(name for name in {*report.values, *seen} if "_layer_" in name) if "layers" in names else []
    return [name for name in names if name != "layers"] + layers


def _limits(step: Exact, rank: int, name: str, report: Report) -> Sequence[tuple[Fraction, Fraction]]:
    """Return the limits of a value; an average is over the entries of its stage or layer."""
    if name == CUMULATIVE:
        return step.limits
    if name not in report.values:
        return ()
    of_layer = int(name.rpartition("_")[2]) if "_layer_" in name else None
    entries = [entry for entry in step.entries if entry.stage == step.stages[rank] and of_layer in (None, entry.layer)]
    error = allowed_error(report.values[name], len(entries) if name.startswith("avg") else 1)
    return ((report.values[name] - error, report.values[name] + error),)


def _wrong(
    name: str, seen: Mapping[str, float], report: Report, bounds: Sequence[tuple[Fraction, Fraction]]
) -> tuple[str, float]:
    """Return what is wrong with one value, "" if nothing is, and its error divided by the bound."""
    if name not in report.values:
        return f"{seen[name]:.6g} of a layer that recorded nothing on this stage", 0.0
    right = float(report.values[name])
    if name not in seen:
        return ("" if name in report.may_be_absent else f"absent instead of {right:.6g}"), 0.0
    value = seen[name]
    if not isfinite(value):
        return f"{value:.6g} instead of {right:.6g}", 1e300
    if any(low <= Fraction(value) <= high for low, high in bounds):
        return "", 0.0
    nearest = min(bounds, key=lambda both: min(abs(Fraction(value) - end) for end in both))
    middle, allowed = (nearest[0] + nearest[1]) / 2, (nearest[1] - nearest[0]) / 2
    size = float(abs(Fraction(value) - middle) / allowed) if allowed else 0.0
    return f"{value:.9g} instead of {right:.9g}", min(size, 1e300)
