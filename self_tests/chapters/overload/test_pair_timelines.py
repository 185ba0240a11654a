"""Timelines of overload, worked out twice: what counts when, and how high the accounts ever stand."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.overload import peaks as first_peaks
from moe_conformance.reference.overload import timelines as first
from self_tests.chapters.overload.second import timelines as second
from self_tests.chapters.overload.second.timelines import Event
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Kind = first.Kind

KINDS: tuple[Kind, ...] = ("forward", "recomputed", "backward", "alone", "evaluation")
LIVES: list[tuple[Kind, ...]] = [("forward", "backward"), ("forward", "recomputed", "backward"), ("alone",)]
OPTIONS: list[tuple[Any, Any]] = [(r, a) for r in ("first", "repeated") for a in ("counted", "left_out")]


def refusal(call: Any) -> Any:
    """What a call lists, or that it refuses."""
    try:
        return list(call())
    except ValueError:
        return "refused"


@st.composite
def lives(draw: st.DrawFn, most: int = 4) -> list[Any]:
    """Labels that live in one of the lawful ways at the same time, with evaluation in between."""
    left: list[list[Any]] = []
    for label in range(draw(st.integers(0, most))):
        left.append([(kind, label) for kind in draw(st.sampled_from(LIVES))])
    left.append([("evaluation", draw(st.integers(0, 5))) for _ in range(draw(st.integers(0, 2)))])
    passes = []
    while any(left):
        passes.append(draw(st.sampled_from([life for life in left if life])).pop(0))
    return passes


chaos = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(["a", "b"])), max_size=5)


class TestTimelinePair:
    @pairs_agree
    @given(lives())
    def test_timelines_agree(self, passes: list[Any]) -> None:
        """Both keep the same timeline of lawful passes for every pair of options."""
        for recomputed, alone in OPTIONS:
            expected = second.timeline(passes, recomputed, alone)
            assert expected == list(first.timeline(passes, recomputed=recomputed, alone=alone))

    @settings(pairs_agree, max_examples=400)
    @given(chaos)
    def test_unlawful_lives_are_refused_alike(self, passes: list[Any]) -> None:
        """Passes in any order at all: both refuse the same, and agree on the others."""
        for recomputed, alone in OPTIONS:
            expected = refusal(partial(second.timeline, passes, recomputed, alone))
            assert expected == refusal(partial(first.timeline, passes, recomputed=recomputed, alone=alone))

    @pairs_agree
    @given(
        st.lists(
            st.one_of(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), st.sampled_from(["report", "abandon"]))
        )
    )
    def test_reports_cover_the_same_passes(self, log: list[Any]) -> None:
        """Both give each report what came since the one before, and abandoned attempts to none."""
        assert second.since_reports(log) == [list(passes) for passes in first.since_reports(log)]


@st.composite
def accounts(draw: st.DrawFn) -> tuple[list[Any], list[Any], list[Any]]:
    """Passes of up to three ranks in lawful order, their pairs, and balanced counts, some of them 0."""
    events, pairs, balanced = [], [], []
    for _ in range(draw(st.integers(0, 3))):
        passes = draw(lives(3))
        events.append(second.timeline(passes, *draw(st.sampled_from(OPTIONS))))
        pairs.append({label: draw(st.integers(0, 29)) for label in range(6)})
        shares = st.sampled_from([Fraction(0), Fraction(5, 3), Fraction(7), Fraction(19, 2)])
        same = draw(st.one_of(st.none(), st.just(Fraction(0))))
        balanced.append({label: draw(shares) if same is None else same for label in range(6)})
    return events, pairs, balanced


class TestPeaksPair:
    @pairs_agree
    @given(accounts())
    def test_cumulative_factors_agree(self, case: tuple[list[Any], list[Any], list[Any]]) -> None:
        """Both find the same peaks on every rank, the same worst rank, and the same room for float32."""
        for events, pairs, balanced in zip(*case, strict=True):
            assert second.peaks(events, pairs, balanced) == first_peaks.peaks(events, pairs, balanced)  # type: ignore[comparison-overlap]
        assert second.cumulative(*case) == first_peaks.cumulative(*case)
        assert second.cumulative_interval(*case) == first_peaks.cumulative_interval(*case)

    @pairs_agree
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, -1])), max_size=6))
    def test_peaks_of_any_events_agree(self, events: list[Event]) -> None:
        """Both look after every event, at the first as at the last, and never before the first."""
        known: tuple[Any, Any] = ({"a": 5, "b": 11}, {"a": Fraction(7), "b": Fraction(3, 2)})
        assert second.peaks(events, *known) == first_peaks.peaks(events, *known)  # type: ignore[comparison-overlap]


class TestLaws:
    @pairs_agree
    @given(lives(), st.integers(0, 10**6), st.integers(1, 7))
    def test_float32_keeps_within_the_interval(self, passes: list[Any], seed: int, ep: int) -> None:
        """Running sums and a quotient in float32 are as near as the spec asks."""
        random = np.random.default_rng(seed)
        pairs = {label: int(random.integers(0, 10**6)) for label in range(6)}
        balanced = {label: Fraction(int(random.integers(1, 10**6)), ep) for label in range(6)}
        events = first.timeline(passes)
        low, high = first_peaks.cumulative_interval([events], [pairs], [balanced])  # type: ignore[list-item]
        if not events:
            assert (0, 0) == (low, high)  # type: ignore[comparison-overlap]
            return
        held = even = np.float32(0)
        held_peak = even_peak = np.float32(-np.inf)
        for label, sign in events:
            held = np.float32(held + np.float32(sign * pairs[label]))  # type: ignore[index]
            even = np.float32(
                even
                + np.float32(sign) * (np.float32(balanced[label].numerator) / np.float32(balanced[label].denominator))  # type: ignore[index]
            )
            held_peak, even_peak = max(held_peak, held), max(even_peak, even)
        assert low <= Fraction(float(held_peak / even_peak)) <= high


def beside(life: str) -> list[Any]:
    """Passes of label x between a forward and a backward of another."""
    return [("forward", "other"), *((kind, "x") for kind in life.split()), ("backward", "other")]


CANNOT_HAPPEN = [
    "forward", "backward", "recomputed backward", "backward forward", "recomputed forward backward",
    "forward backward recomputed", "forward forward backward", "forward backward forward backward",
    "forward backward backward", "forward recomputed recomputed backward", "forward recomputed", "alone backward",
    "alone recomputed", "alone alone", "alone forward backward", "forward alone backward", "forward backward alone",
    "forwards backward",
]  # fmt: skip
F0, B0, F1, B1, F2, B2 = [(label, sign) for label in (0, 1, 2) for sign in (1, -1)]
WHOLE: list[Any] = [("forward", 0), ("backward", 0)]
LOG: list[Any] = [*WHOLE, "report", ("forward", 1), "abandon", *WHOLE, "report", "report", ("forward", 2)]
RECOMPUTED: list[Any] = [("forward", 0), ("alone", 1), ("evaluation", 2), ("recomputed", 0), ("backward", 0)]
UNEVEN = [{0: 5, 1: 11, 2: 2}], [{0: Fraction(4), 1: Fraction(4), 2: Fraction(12)}]
ALIKE = {0: 9, 1: 9}, {0: Fraction(6), 1: Fraction(6)}
UP_DOWN: list[Event] = [(0, 1), (0, -1)]
EMPTY = [{0: 0}, {0: 1}], [{0: Fraction(0)}, {0: Fraction(2)}]
KNOWN: tuple[Any, ...] = [[F0]] * 2, [{0: 1}] * 2, [{0: Fraction(1)}] * 2

test_by_hand = by_hand(
    *rows(first.timeline, second.timeline,
        ("at the first pass, and alone at once", (RECOMPUTED,), [F0, F1, B1, B0]),
        ("at the repeated pass", (RECOMPUTED,), {"recomputed": "repeated"}, [F1, B1, F0, B0]),
        ("alone not at all", (RECOMPUTED,), {"alone": "left_out"}, [F0, B0]),
        *((f"{life} of one label", (beside(life),), REFUSED) for life in CANNOT_HAPPEN),
        ("a forward stands at its first pass or at the repeated one", ([],), {"recomputed": "last"}, REFUSED),
        ("a forward alone counts or is left out", ([],), {"alone": "zero"}, REFUSED),
    ),
    *rows(first.since_reports, second.since_reports,
        ("an abandoned attempt is in no report", (LOG,), [WHOLE, WHOLE, []]),
        ("an unknown word", ([("forward", 0), "pause"],), REFUSED),
    ),
    *rows(first_peaks.peaks, second.peaks,
        ("two of a kind one by one", ([F0, B0, F1, B1], *ALIKE), (9, Fraction(6))),
        ("two in flight stand twice as high", ([F0, F1, B0, B1], *ALIKE), (18, Fraction(12))),
        ("a label without pairs", ([("a", 1)], {}, {"a": Fraction(1)}), REFUSED),
        ("a label without balance", ([("a", 1)], {"a": 1}, {}), REFUSED),
    ),
    *rows(first_peaks.cumulative, second.cumulative,
        ("forwards alone are sum over sum: 30 / 24",
         ([[F0, F1, F2]], [{0: 10, 1: 14, 2: 6}], [dict.fromkeys(range(3), Fraction(8))]), Fraction(5, 4)),
        # Pairs 5 16 11 13 2 0, balanced 4 8 4 16 12 0: 16 / 16, although 16 / 8 and 13 / 16 stood side by side.
        ("one forward, one backward: peaks at different moments", ([[F0, F1, B0, F2, B1, B2]], *UNEVEN), Fraction(1)),
        ("all forwards first: 18 / 20", ([[F0, F1, F2, B2, B1, B0]], *UNEVEN), Fraction(9, 10)),
        ("one by one: 11 / 12", ([[F0, B0, F1, B1, F2, B2]], *UNEVEN), Fraction(11, 12)),
        ("the worst rank of the world decides",
         ([UP_DOWN] * 3, [{0: 3}, {0: 7}, {0: 0}], [{0: Fraction(2)}, {0: Fraction(4)}, {0: Fraction(0)}]),
         Fraction(7, 4)),
        ("a rank without balance alone has no factor", ([UP_DOWN], [{0: 0}], [{0: Fraction(0)}]), None),
    ),
    *rows(first_peaks.cumulative_interval, second.cumulative_interval,
        ("two events of balance 2: (2 + 4) 2^-23 (3 / 2) (4 / 2) = 18 / 2^23 either way",
         ([UP_DOWN], [{0: 3}], [{0: Fraction(2)}]),
         (Fraction(3, 2) - Fraction(18, 2**23), Fraction(3, 2) + Fraction(18, 2**23))),
    ),
)  # fmt: skip


@pytest.mark.parametrize("lacking", [0, 1, 2])
@pytest.mark.parametrize("function", [first_peaks.cumulative, first_peaks.cumulative_interval])
def test_a_rank_without_its_counts_is_refused(function: Any, lacking: int) -> None:
    """All that looks at several ranks needs the events, the pairs and the balance of each."""
    known = [list(column) for column in KNOWN]
    known[lacking].pop()
    with pytest.raises(ValueError, match=r"argument \d"):
        function(*known)
