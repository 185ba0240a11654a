"""The timeline of the cumulative factor by hand: what each label lived through, and each rank's account in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from self_tests.chapters.overload.second.factors import Label, allowed_error, demand

Pass = tuple[str, Label]
Event = tuple[Label, int]
LIVES = (["forward", "backward"], ["forward", "recomputed", "backward"], ["alone"])


def since_reports(log: Sequence[Pass | str]) -> list[list[Pass]]:
    """What each report covers: the passes since the one before it, an abandoned attempt thrown away."""
    reports: list[list[Pass]] = []
    attempt: list[Pass] = []
    for line in log:
        if isinstance(line, tuple):
            attempt = [*attempt, line]
            continue
        demand(line in ("report", "abandon"), f"unknown {line}")
        if line == "report":
            reports.append(attempt)
        attempt = []
    return reports


def lives(passes: Sequence[Pass]) -> dict[Label, list[str]]:
    """What happened to each label in training, in order of time; refuse what cannot happen."""
    told: dict[Label, list[str]] = {}
    for kind, label in passes:
        demand(kind in ("forward", "recomputed", "backward", "alone", "evaluation"), f"unknown {kind}")
        if kind != "evaluation":
            told.setdefault(label, []).append(kind)
    for label, life in told.items():
        demand(life in LIVES, f"{label} cannot live {life}")
    return told


def timeline(passes: Sequence[Pass], recomputed: str = "first", alone: str = "counted") -> list[Event]:
    """Replace every pass by what it does to the account."""
    demand(recomputed in ("first", "repeated") and alone in ("counted", "left_out"), f"{recomputed}, {alone}")
    told = lives(passes)
    events: list[Event] = []
    for kind, label in passes:
        repeated = recomputed == "repeated" and kind != "evaluation" and "recomputed" in told[label]
        if kind == "backward":
            events.append((label, -1))
        elif (kind == "forward" and not repeated) or (kind == "recomputed" and repeated):
            events.append((label, +1))
        elif kind == "alone" and alone == "counted":
            events += [(label, +1), (label, -1)]
    return events


def peaks(
    events: Sequence[Event], pairs: Mapping[Label, int], balanced: Mapping[Label, Fraction]
) -> tuple[Fraction, Fraction]:
    """The highest that the two accounts of one rank ever stand after an event; (0, 0) without any."""
    heights: list[tuple[Fraction, Fraction]] = []
    held, even = Fraction(0), Fraction(0)
    for label, sign in events:
        demand(label in pairs and label in balanced, f"nothing is known of {label}")
        held += sign * pairs[label]
        even += sign * balanced[label]
        heights.append((held, even))
    if not heights:
        return Fraction(0), Fraction(0)
    return max(height for height, _ in heights), max(height for _, height in heights)


Events = Sequence[Sequence[Event]]
Pairs = Sequence[Mapping[Label, int]]
Balanced = Sequence[Mapping[Label, Fraction]]


def quotients(events: Events, pairs: Pairs, balanced: Balanced) -> dict[int, Fraction]:
    """Peak over balanced peak of every rank that has one."""
    found = {}
    for rank in range(len(events)):
        held, even = peaks(events[rank], pairs[rank], balanced[rank])
        if even > 0:
            found[rank] = held / even
    return found


def cumulative(events: Events, pairs: Pairs, balanced: Balanced) -> Fraction | None:
    """The worst rank of the world, if any has a balanced count."""
    return max(quotients(events, pairs, balanced).values(), default=None)


def cumulative_interval(events: Events, pairs: Pairs, balanced: Balanced) -> tuple[Fraction, Fraction]:
    """Where a float32 value may lie: every rank's own error first, then the maximum over ranks, at both ends."""
    lows, highs = [Fraction(0)], [Fraction(0)]
    for rank, exact in quotients(events, pairs, balanced).items():
        _, even = peaks(events[rank], pairs[rank], balanced[rank])
        turnover = Fraction(0)
        for label, _ in events[rank]:
            turnover += balanced[rank][label]
        error = allowed_error(exact, len(events[rank]), turnover / even)
        lows.append(exact - error)
        highs.append(exact + error)
    return max(lows[1:] or lows), max(highs)
