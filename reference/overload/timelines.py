"""Overload over time: how much of the load is held at once, when forward adds and backward takes away.

A rank's passes in order of time become a timeline of events, +1 or -1 of an entry. Where the spec leaves open when an
event occurs, or whether it does, arguments of `timeline` choose.

Sources: behaviour of Megatron-Core's overload factor log; Narayanan et al. 2021 (1F1B and interleaved
schedules); Chen et al. 2016 (recomputation runs a forward twice); DeepSeek-V3, section 3.2.1 (a forward and
a backward at the same time).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

Label = Hashable  # names an entry on a rank: (layer, microbatch), say
Kind = Literal["forward", "recomputed", "backward", "alone", "evaluation"]
Pass = tuple[Kind, Label]  # "alone": a training forward that no backward follows
Event = tuple[Label, int]  # +1 or -1
Recomputed = Literal["first", "repeated"]
Alone = Literal["counted", "left_out"]


def since_reports(log: Sequence[Pass | Literal["report", "abandon"]]) -> tuple[tuple[Pass, ...], ...]:
    """Give to every report the passes that it covers (LOAD-23, LOAD-28).

    Rule: those since the report before it; "abandon" discards what there was since then. What follows the
    last report is in none.

    Decides: LOAD-23, LOAD-28. Source: arithmetic.

    >>> since_reports([("forward", "a"), "abandon", ("forward", "b"), ("backward", "b"), "report", "report"])
    ((('forward', 'b'), ('backward', 'b')), ())
    """
    reports: list[tuple[Pass, ...]] = []
    covered: list[Pass] = []
    for item in log:
        if item == "report":
            reports.append(tuple(covered))
            covered = []
        elif item == "abandon":
            covered = []
        elif isinstance(item, str):
            raise ValueError(f"{item!r} in the log is neither a pass, nor 'report' or 'abandon'")
        else:
            covered.append(item)
    return tuple(reports)


def timeline(
    passes: Sequence[Pass], *, recomputed: Recomputed = "first", alone: Alone = "counted"
) -> tuple[Event, ...]:
    """Turn the passes of one rank between two reports into events (LOAD-08, LOAD-16 to LOAD-18).

    Args:
        passes: in order of time.
        recomputed: whether a recomputed entry is added at its first or at its repeated forward.
        alone: whether a forward without a backward counts at its moment or not at all.

    Rule: a forward adds its entry once, the backward takes it away; after a forward "alone" the sum stands
    where it stood before; an evaluation pass is no event.

    Raises:
        ValueError: a pass out of order, or a second one of a kind for one label; a forward whose backward
            never comes, as a report is taken with nothing in flight.

    Decides: LOAD-15, LOAD-16, LOAD-17, LOAD-18, LOAD-20. Source: arithmetic; Chen et al. 2016.

    >>> passes = [("forward", "a"), ("alone", "b"), ("evaluation", "a"), ("recomputed", "a"), ("backward", "a")]
    >>> timeline(passes)
    (('a', 1), ('b', 1), ('b', -1), ('a', -1))
    >>> timeline(passes, recomputed="repeated", alone="left_out")
    (('a', 1), ('a', -1))
    """
    if recomputed not in ("first", "repeated") or alone not in ("counted", "left_out"):
        raise ValueError(f"no timeline has recomputed = {recomputed!r} and alone = {alone!r}")
    late = {label for kind, label in passes if kind == "recomputed" and recomputed == "repeated"}
    done: dict[Label, list[str]] = {}
    lawful: dict[str, list[list[str]]] = {  # what passes of the same label may have come before
        "forward": [[]],
        "alone": [[]],
        "recomputed": [["forward"]],
        "backward": [["forward"], ["forward", "recomputed"]],
    }
    events: list[Event] = []
    for kind, label in passes:
        if kind == "evaluation":
            continue
        before = done.setdefault(label, [])
        if before not in lawful.get(kind, []):
            raise ValueError(f"{kind!r} of {label} cannot come after {before} of the same label")
        before.append(kind)
        if kind == "alone" and alone == "counted":
            events += [(label, 1), (label, -1)]
        elif kind == ("recomputed" if label in late else "forward"):
            events.append((label, 1))
        elif kind == "backward":
            events.append((label, -1))
    flying = [label for label, kinds in done.items() if kinds[-1] not in ("backward", "alone")]
    if flying:
        raise ValueError(f"no backward of {flying}: a report is taken with nothing in flight")
    return tuple(events)
