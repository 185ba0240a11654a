"""The passes that each report of a load meter covers, and the exact factors that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import get_args

from moe_conformance.contract import MeteredPass
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.script import answers
from moe_conformance.judging.verdict import NotOffered, WrongCount
from moe_conformance.reference.overload.factors import Entry, entry
from moe_conformance.reference.overload.peaks import cumulative, cumulative_interval
from moe_conformance.reference.overload.timelines import (
    Alone,
    Label,
    Pass,
    Recomputed,
    since_reports,
    timeline,
)
from moe_conformance.scenarios.outcome import Outcome

_APART = 1000  # offset between microbatch numbers of different steps, larger than a step
TRAINING = ("forward", "alone")  # the kinds of forwards that make entries


@dataclass(frozen=True)
class Covered:
    """A report of a meter that is on: the number of its call, and the passes that it covers, by rank."""

    number: int  # 0, 1, ... counted over the reports of the script
    call: int
    passes: tuple[tuple[MeteredPass, ...], ...]

    @property
    def recorded(self) -> list[list[Label]]:
        """The labels of the entries of every rank."""
        return [[_label(metered) for metered in _entries(of_rank)] for of_rank in self.passes]


@dataclass(frozen=True)
class Exact:
    """The exact values of a step.

    Attributes:
        entries: The entries of all ranks.
        stages: The pipeline stage of every rank.
        peak: The cumulative factor on the first of the allowed timelines; None without entries.
        limits: The smallest and the largest cumulative factor on each of these timelines.
    """

    entries: tuple[Entry, ...]
    stages: tuple[int, ...]
    peak: Fraction | None
    limits: tuple[tuple[Fraction, Fraction], ...]


def covered(outcome: Outcome) -> tuple[Covered, ...]:
    """Return the reports of a script that finished, except those of a meter that is off."""
    require_finished(outcome)
    workload = outcome.workload
    of_ranks = [_by_report(outcome, rank) for rank in range(workload.layout.world)]
    reports = [(call, on) for call, on in _switched(outcome) if workload.calls[call].method == "report"]
    return tuple(
        Covered(number, call, passes)
        for number, ((call, on), passes) in enumerate(zip(reports, zip(*of_ranks, strict=True), strict=True))
        if on
    )


def with_factors(outcome: Outcome) -> tuple[Covered, ...]:
    """Return what `covered` does.

    Raises:
        NotOffered: no report of any rank has overload factors.
        WrongCount: some have, and some have not.
    """
    reports = covered(outcome)
    without = [
        (step.number, rank)
        for step in reports
        for rank, answer in enumerate(answers(outcome, step.call))
        if answer.values.get("values", ()) is None
    ]
    if not without:
        return reports
    if len(without) == len(reports) * len(outcome.ranks):
        raise NotOffered("this meter has no overload factors")
    number, rank = without[0]
    raise WrongCount("run", f"the report of step {number} on rank {rank} has no overload factors, others have")


def stage_by_rank(layout: Layout) -> tuple[int, ...]:
    """Return the pipeline stage of every rank."""
    pipelines = layout.groups()["pp"]
    return tuple(next(ranks.index(rank) for ranks in pipelines if rank in ranks) for rank in range(layout.world))


def uneven_groups(outcome: Outcome, step: Covered) -> list[Sequence[int]]:
    """Return the exchange groups whose ranks recorded different entries."""
    counts = [Counter(labels) for labels in step.recorded]
    return [
        group
        for group in outcome.workload.layout.groups()["ep_etp"]
        if any(counts[r] != counts[group[0]] for r in group)
    ]


@dataclass(frozen=True)
class Mistake:
    """A mistake that a meter may make in counting."""

    words: str
    padding: bool = False  # padding tokens are counted among the tokens of a rank
    kinds: tuple[str, ...] = TRAINING
    kept: bool = False  # a report does not clear earlier entries
    again: bool = False  # a forward that recomputation repeats is one more entry


MISTAKES = (
    Mistake("padding tokens are counted", padding=True),
    Mistake("forwards in evaluation are counted", kinds=(*TRAINING, "evaluation")),
    Mistake("the forward that recomputation runs again is counted too", again=True),
    Mistake("entries of earlier reports are counted again", kept=True),
)


def mistaken(outcome: Outcome, step: Covered, mistake: Mistake) -> Exact | None:
    """Return the values of a step with a mistake; None if ranks of a group would then have different entries."""
    if mistake.kept:
        before = [earlier for earlier in covered(outcome) if earlier.number <= step.number]
        kept = tuple(sum(of_rank, ()) for of_rank in zip(*(earlier.passes for earlier in before), strict=True))
        step = replace(step, passes=_renumbered(kept))
    if mistake.again:
        step = replace(step, passes=tuple(map(_repeated, step.passes)))
    counts = [len(_entries(passes, mistake.kinds)) for passes in step.passes]
    uneven = any(len({counts[rank] for rank in group}) > 1 for group in outcome.workload.layout.groups()["ep_etp"])
    return None if uneven else _exact(outcome, step, mistake)


def _repeated(passes: Sequence[MeteredPass]) -> tuple[MeteredPass, ...]:
    """Return the passes with one more forward before the backward of each recomputed pass."""
    recomputed = {_label(metered): metered for metered in passes if metered.recomputed}
    found: list[MeteredPass] = []
    for metered in passes:
        if metered.kind == "backward" and (first := recomputed.get(_label(metered))) is not None:
            found.append(replace(first, kind="alone", microbatch=first.microbatch + _APART, recomputed=False))
        found.append(metered)
    return tuple(found)


def _renumbered(passes: tuple[tuple[MeteredPass, ...], ...]) -> tuple[tuple[MeteredPass, ...], ...]:
    """Return the passes of several steps with different microbatch numbers, so that labels are unique."""
    found = []
    for of_rank in passes:
        times: Counter[tuple[str, Label]] = Counter()
        renumbered = []
        for metered in of_rank:
            kind = "backward" if metered.kind == "backward" else "forward"
            times[kind, _label(metered)] += 1
            renumbered.append(replace(metered, microbatch=metered.microbatch + _APART * times[kind, _label(metered)]))
        found.append(tuple(renumbered))
    return tuple(found)


def exact(outcome: Outcome, step: Covered) -> Exact:
    """Return the exact values of a step, computed once for all checks."""
    kept = once(outcome, _steps)
    if step.number not in kept:
        kept[step.number] = _exact(outcome, step)
    return kept[step.number]


def _steps(outcome: Outcome) -> dict[int, Exact]:
    """Return the cache of `exact`, by the number of the step."""
    return {}


def _exact(outcome: Outcome, step: Covered, mistake: Mistake | None = None) -> Exact:
    """Compute the values of a step; an entry of a group is the same training forward on all of its ranks."""
    layout, config = outcome.workload.layout, outcome.workload.config
    held = {rank.rank: rank.local_experts for rank in outcome.ranks}
    of_ranks = [_entries(of_rank, TRAINING if mistake is None else mistake.kinds) for of_rank in step.passes]
    stages = stage_by_rank(layout)
    entries: list[Entry] = []
    pairs: list[dict[Label, int]] = [{} for _ in of_ranks]
    balanced: list[dict[Label, Fraction]] = [{} for _ in of_ranks]
    for group in layout.groups()["ep_etp"]:
        sharing = [[group.index(r) for r in ranks if r in group] for ranks in layout.groups()["tp"]]
        copies = [places for places in sharing if len(places) > 1] if config.token_copies else []
        for same in zip(*(of_ranks[rank] for rank in group), strict=True):
            counted = entry(
                [metered.ids_TK for metered in same],
                [held[rank] for rank in group],
                ep=layout.ep,
                stage=stages[group[0]],
                layer=same[0].layer,
                padding_by_rank=None if mistake and mistake.padding else [metered.padding_T for metered in same],
                copies=copies,
            )
            entries.append(counted)
            for place, rank in enumerate(group):
                pairs[rank][_label(same[0])] = counted.pairs[place]
                balanced[rank][_label(same[0])] = counted.balanced
    passes = [_with_recomputation(of_rank) for of_rank in step.passes]
    choices = product(get_args(Recomputed), get_args(Alone))
    timelines = tuple(
        dict.fromkeys(
            tuple(timeline(of_rank, recomputed=recomputed, alone=alone) for of_rank in passes)
            for recomputed, alone in choices
        )
    )
    peak = cumulative(timelines[0], pairs, balanced)
    limits = tuple(cumulative_interval(events, pairs, balanced) for events in timelines)
    return Exact(tuple(entries), stages, peak, limits)


def _label(metered: MeteredPass) -> Label:
    return metered.layer, metered.microbatch


def _entries(passes: Sequence[MeteredPass], kinds: Sequence[str] = TRAINING) -> list[MeteredPass]:
    """Return the forwards of some kinds, by default those of training."""
    return [metered for metered in passes if metered.kind in kinds]


def _with_recomputation(passes: Sequence[MeteredPass]) -> list[Pass]:
    """Return passes by kind and label, with a repeated forward before the backward of each recomputed one."""
    recomputed = {_label(metered) for metered in passes if metered.recomputed}
    found: list[Pass] = []
    for metered in passes:
        if metered.kind == "backward" and _label(metered) in recomputed:
            found.append(("recomputed", _label(metered)))
        found.append((metered.kind, _label(metered)))  # type: ignore[arg-type]
    return found


def _switched(outcome: Outcome) -> list[tuple[int, bool]]:
    """Return for every call its number, and whether the meter is on."""
    on, found = True, []
    for number, call in enumerate(outcome.workload.calls):
        on = bool(call.given[0]["on"]) if call.method == "switch" else on
        found.append((number, on))
    return found


def _by_report(outcome: Outcome, rank: int) -> list[tuple[MeteredPass, ...]]:
    """Return the passes of one rank that each report covers, without those while the meter was off."""
    log: list[object] = []
    ran: dict[tuple[int, int], MeteredPass] = {}
    for number, on in _switched(outcome):
        call = outcome.workload.calls[number]
        if call.method == "report":
            log.append("report")
        for place, metered in enumerate(call.given[rank].get("passes", ()) if on else ()):
            ran[number, place] = metered
            log.append("abandon" if metered.kind == "abandon" else (metered.kind, (number, place)))
    return [tuple(ran[label] for _, label in report) for report in since_reports(log)]  # type: ignore[arg-type, index]
