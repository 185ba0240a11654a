"""Judges of settings that a backend accepts and runs: right values, and options that show in what runs.

An option shows if the step with it computes or exchanges otherwise than the step without. That of a graph shows in its
replays, on a device that captures. What shows in nothing is not judged, whatever `resolve` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moe_conformance.chapters.config_rules.judge.resolved_settings import neutral
from moe_conformance.chapters.config_rules.workloads.accepted import of_rule, without
from moe_conformance.contract import Settings
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.overlapped.accepted import Accepted, accepted, words_of
from moe_conformance.judging.verdict import NotOffered, Tally, WrongForm
from moe_conformance.reference.config_rules.rules import broken

_NOTHING_SHOWS = {
    "RULE-12": "a method of recomputation that is off",
    "RULE-13": "a number of recomputed layers where recomputation is off",
    "RULE-16": "layers of multi-token prediction",
    "RULE-18": "offloading to the host",
}
_SHOWN = ("dispatcher", "recompute", "overlap_shared", "defer_weight_gradients")


def judge_accepted(reading: Reading, rule: str, tally: Tally) -> None:
    """Decide whether the settings of a rule that are accepted run as they say, with the oracle's values.

    Raises:
        NotOffered: all of them are refused; or one that breaks the rule is accepted, and is not run or shows in
            nothing: that it is accepted is no proof.
        WrongForm: an option has no effect, or no graph is replayed where capture is on.
        Mismatch: what is wrong with a step.
    """
    every, findings, reasons, judged = accepted(reading), list[Finding](), list[str](), 0
    for settings in of_rule(rule):
        found = every[settings]
        if found.refused:
            continue
        if found.mismatch is not None:
            tally.beyond = max(tally.beyond, found.tally.beyond)
            raise found.mismatch
        breaks = rule in broken(neutral([settings], ()))
        unjudged = found.why if not found.ran else _unshown(found, rule, every) if breaks else ""
        if unjudged:
            reasons += [f"{words_of(settings)} is accepted, which is not judged: {unjudged}"] if breaks else []
            continue
        judged += 1
        findings += [*_without_effect(found, every), *_without_replays(found)]
        tally.include(found.tally)
    if findings:
        fail(WrongForm, "run", findings)
    if reasons:
        raise NotOffered(reasons[0])
    if not judged:
        raise NotOffered(_why_nothing(rule, every))


def _why_nothing(rule: str, every: dict[Settings, Accepted]) -> str:
    taken = [every[settings] for settings in of_rule(rule) if not every[settings].refused]
    if not taken:
        return f"all settings of {rule} are refused on two ranks"
    return f"{words_of(taken[0].asked)} is accepted, and not run: {taken[0].why}"


def _unshown(found: Accepted, rule: str, every: dict[Settings, Accepted]) -> str:
    """Return why a run does not show the option that breaks a rule, "" if it may."""
    if rule in _NOTHING_SHOWS:
        return f"{_NOTHING_SHOWS[rule]} shows in nothing that a layer computes"
    if found.asked.capture is not None and found.ran[0].replays is None:
        return "a graph shows on a device that captures"
    for option in _options(found.asked):
        if _without(found, option, every) is None:
            return f"{words_of(without(found.asked, option))} does not run, with which it is compared"
    return ""


def _options(settings: Settings) -> Iterator[str]:
    """Yield the options that are on, and show in what is computed or exchanged."""
    for option in _SHOWN:
        shows = option != "recompute" or settings.recompute == "full" or "moe" in settings.recompute_modules
        if shows and without(settings, option) != settings:
            yield option


def _without(found: Accepted, option: str, every: dict[Settings, Accepted]) -> Accepted | None:
    """Return the run without an option, None if there is none."""
    other = every.get(without(found.asked, option))
    return other if other is not None and other.ran and other.ran[0].seen is not None else None


def _without_effect(found: Accepted, every: dict[Settings, Accepted]) -> Iterator[Finding]:
    """Yield findings for options with which every rank computes and exchanges the same as without."""
    ran = found.ran[0].ran
    for option in _options(found.asked) if ran == found.asked else ():
        other = _without(found, option, every)
        if other is None:
            continue
        ranks = [rank for rank in range(len(found.ran)) if found.seen(rank).worked]
        if ranks and all(_does(found, rank) == _does(other, rank) for rank in ranks):
            value = getattr(found.asked, option)
            without_it = f"it makes the products and collectives of {words_of(other.asked)}, in the same order"
            sentence = f"{words_of(found.asked)} is accepted and {option} = {value!r} has no effect: {without_it}"
            yield Finding("effect", f"{sentence}; expected: refused, or other ones", tuple(ranks))


def _does(found: Accepted, rank: int) -> tuple[object, object]:
    """Return the products of the step of a rank, each with the number of collectives before it, and its collectives."""
    return found.seen(rank).trace, Counter(found.calls[rank])


def _without_replays(found: Accepted) -> Iterator[Finding]:
    for rank, record in enumerate(found.ran):
        if record.asked.capture is not None and record.replays == 0 and record.ran == record.asked:
            sentence = f"{words_of(record.asked)} is accepted, and rank {rank} replays no graph in its steps"
            yield Finding("graph", f"{sentence}; expected: refused, or a replay for each microbatch", (rank,))
