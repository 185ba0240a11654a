"""Calls the second oracle of overload as the recipe of its golden calls the first."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from self_tests.chapters.overload.second import counters, factors, timelines
from self_tests.goldens.second_oracles import second_oracle


class Report(NamedTuple):
    """Values by name, and which names may be absent."""

    values: dict[str, Fraction]
    may_be_absent: set[str]


def entry(ids: Any, held: Any, *, ep: int, padding_by_rank: Any, copies: Any) -> factors.Entry:
    """The entry of an exchange group."""
    padding = [None] * len(ids) if padding_by_rank is None else padding_by_rank
    return factors.entry(factors.Group(ids, held, ep, padding, copies))


def peaks(*timeline: Any) -> tuple[int, Fraction]:
    """The peak of a rank's pairs, which are whole, and of balanced counts."""
    P, Q = timelines.peaks(*timeline)
    return int(P), Q


ORACLE = second_oracle(
    counters,
    factors,
    timelines,
    entry=entry,
    peaks=peaks,
    reported=lambda *entries, **how: Report(*factors.reported(*entries, **how)),
)
