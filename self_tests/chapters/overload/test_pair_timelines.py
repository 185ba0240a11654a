"""Timelines of overload, worked out twice: what counts when, and how high the accounts ever stand."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.overload import peaks as first_peaks
from moe_conformance.reference.overload import timelines as first
from self_tests.chapters.overload.second import timelines as second
from self_tests.chapters.overload.second.factors import Label
from self_tests.chapters.overload.second.timelines import Event, Pass

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Kind = first.Kind

KINDS: tuple[Kind, ...] = ("forward", "recomputed", "backward", "alone", "evaluation")
LIVES: list[tuple[Kind, ...]] = [("forward", "backward"), ("forward", "recomputed", "backward"), ("alone",)]
OPTIONS: list[tuple[Any, Any]] = [(r, a) for r in ("first", "repeated") for a in ("counted", "left_out")]


def refusal(call: Any) -> Any:
    """What a call gives, or that it refuses."""
    try:
        return call()
    except ValueError:
        return "refused"


def first_timelines(passes: Sequence[Any]) -> list[list[Event]]:
    """The first oracle's legal timelines as lists."""
    return [list(events) for events in first.legal_timelines(passes)]


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
    def test_legal_timelines_agree(self, passes: list[Any]) -> None:
        """Both keep the same timelines of lawful passes, in the same order, and one for every pair of options."""
        assert second.legal_timelines(passes) == first_timelines(passes)
        for recomputed, alone in OPTIONS:
            expected = second.timeline(passes, recomputed, alone)
            assert expected == list(first.timeline(passes, recomputed=recomputed, alone=alone))

    @settings(pairs_agree, max_examples=400)
    @given(chaos)
    def test_unlawful_lives_are_refused_alike(self, passes: list[Any]) -> None:
        """Passes in any order at all: both refuse the same, and agree on the others."""
        expected = refusal(lambda: second.legal_timelines(passes))
        assert expected == refusal(lambda: first_timelines(passes))

    @pytest.mark.parametrize(
        "life",
        [
            ["forward"],
            ["backward"],
            ["recomputed", "backward"],
            ["backward", "forward"],
            ["recomputed", "forward", "backward"],
            ["forward", "backward", "recomputed"],
            ["forward", "forward", "backward"],
            ["forward", "backward", "forward", "backward"],
            ["forward", "backward", "backward"],
            ["forward", "recomputed", "recomputed", "backward"],
            ["forward", "recomputed"],
            ["alone", "backward"],
            ["alone", "recomputed"],
            ["alone", "alone"],
            ["alone", "forward", "backward"],
            ["forward", "alone", "backward"],
            ["forward", "backward", "alone"],
            ["forwards", "backward"],
        ],
    )
    def test_what_cannot_happen_is_refused_by_both(self, life: list[Any]) -> None:
        """A backward before its forward or without one, a second one, a forward left in flight, an unknown kind."""
        passes = [("forward", "other"), *((kind, "x") for kind in life), ("backward", "other")]
        assert ("refused", "refused") == (
            refusal(lambda: second.timeline(passes)),
            refusal(lambda: first.timeline(passes)),
        )

    def test_unknown_options_are_refused_by_both(self) -> None:
        """A forward stands at its first pass or at the repeated one; alone it counts or is left out."""
        for wrong in ({"recomputed": "last"}, {"alone": "zero"}):
            with pytest.raises(ValueError, match=r"\w"):
                second.timeline([], **wrong)
            with pytest.raises(ValueError, match=r"\w"):
                first.timeline([], **wrong)  # type: ignore[arg-type]

    @pairs_agree
    @given(
        st.lists(
            st.one_of(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), st.sampled_from(["report", "abandon"]))
        )
    )
    def test_reports_cover_the_same_passes(self, log: list[Any]) -> None:
        """Both give each report what came since the one before, and abandoned attempts to none."""
        assert second.since_reports(log) == [list(passes) for passes in first.since_reports(log)]

    def test_an_unknown_word_is_refused_by_both(self) -> None:
        """A log holds passes, reports and abandoned attempts."""
        with pytest.raises(ValueError, match="pause"):
            second.since_reports([("forward", 0), "pause"])
        with pytest.raises(ValueError, match="pause"):
            first.since_reports([("forward", 0), "pause"])  # type: ignore[list-item]

    @settings(pairs_agree, max_examples=300)
    @given(chaos, st.sets(st.sampled_from(["a", "b", "c"])))
    def test_miscounts_agree(self, passes: list[Any], expected: set[Label]) -> None:
        """Both find the same labels without their one forward and one backward, and the same strangers."""
        assert second.miscounted(passes, expected) == first.miscounted(passes, expected)

    @pairs_agree
    @given(
        st.lists(
            st.lists(st.lists(st.tuples(st.just("forward"), st.integers(0, 2)), max_size=2), max_size=2), max_size=2
        )
    )
    def test_merges_agree(self, blocks: list[Any]) -> None:
        """Both find every order that simultaneous strands allow, and no other."""
        assert second.merges(blocks) == set(first.merges(blocks))


@st.composite
def accounts(draw: st.DrawFn) -> tuple[list[Any], list[Any], list[Any]]:
    """Passes of up to three ranks in lawful order, their pairs, and balanced counts, some of them 0."""
    events, pairs, balanced = [], [], []
    for _ in range(draw(st.integers(0, 3))):
        passes = draw(lives(3))
        events.append(draw(st.sampled_from(second.legal_timelines(passes))))
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
            assert second.peaks(events, pairs, balanced) == first_peaks.peaks(events, pairs, balanced)
        assert second.cumulative(*case) == first_peaks.cumulative(*case)
        assert second.cumulative_interval(*case) == first_peaks.cumulative_interval(*case)

    @pairs_agree
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, -1])), max_size=6))
    def test_peaks_of_any_events_agree(self, events: list[Event]) -> None:
        """Both look after every event, at the first as at the last, and never before the first."""
        known: tuple[Any, Any] = ({"a": 5, "b": 11}, {"a": Fraction(7), "b": Fraction(3, 2)})
        assert second.peaks(events, *known) == first_peaks.peaks(events, *known)

    @pairs_agree
    @given(st.lists(lives(2), max_size=3), st.integers(1, 99))
    def test_legal_values_agree(self, ranks: list[list[Any]], seed: int) -> None:
        """Whichever timeline each rank keeps: both find the same values of the worst one, ascending."""
        choices = [second.legal_timelines(passes) for passes in ranks]
        random = np.random.default_rng(seed)
        pairs = [{label: int(random.integers(0, 30)) for label in range(6)} for _ in ranks]
        balanced: list[Any] = [{label: Fraction(int(random.integers(0, 4)), 3) for label in range(6)} for _ in ranks]
        expected = second.legal_cumulatives(choices, pairs, balanced)
        assert expected == list(first_peaks.legal_cumulatives(choices, pairs, balanced))

    def test_a_rank_without_timelines_and_a_label_without_pairs_are_refused_by_both(self) -> None:
        """What is not known has no peak."""
        for oracle in (second, first_peaks):
            with pytest.raises(ValueError, match=r"\w"):
                oracle.legal_cumulatives([[[("a", 1)]], []], [{"a": 1}, {}], [{"a": Fraction(1)}, {}])
            with pytest.raises(ValueError, match=r"\w"):
                oracle.peaks([("a", 1)], {}, {"a": Fraction(1)})
            with pytest.raises(ValueError, match=r"\w"):
                oracle.peaks([("a", 1)], {"a": 1}, {})

    @pytest.mark.parametrize("lacking", [0, 1, 2])
    def test_a_rank_without_its_counts_is_refused(self, lacking: int) -> None:
        """All that looks at several ranks needs the events, the pairs and the balance of each."""
        for one, function in (
            ((), first_peaks.cumulative),
            ((), first_peaks.cumulative_interval),
            ([()], first_peaks.legal_cumulatives),
        ):
            known: list[list[Any]] = [[one] * 2, [{}] * 2, [{}] * 2]
            known[lacking].pop()
            with pytest.raises(ValueError, match=r"argument \d"):
                function(*known)


def cumulative(events: Sequence[Event], pairs: dict[Any, int], balanced: dict[Any, Any]) -> Fraction | None:
    """The first oracle's factor of one rank."""
    return first_peaks.cumulative([events], [pairs], [{label: Fraction(b) for label, b in balanced.items()}])


class TestByHand:
    def test_forwards_alone_are_sum_over_sum(self) -> None:
        """10, 14 and 6 pairs over 8 each, nothing taken back: 30 / 24 = 5 / 4."""
        pairs, balanced = {"0 first": 10, "0 again": 14, "1": 6}, dict.fromkeys(["0 first", "0 again", "1"], 8)
        assert Fraction(5, 4) == cumulative([(label, 1) for label in pairs], pairs, balanced)

    def test_two_in_flight_stand_twice_as_high(self) -> None:
        """F F B B of two alike has twice the peaks of F B F B, above and below, and so the same factor."""
        pairs, balanced = {0: 9, 1: 9}, {0: Fraction(6), 1: Fraction(6)}
        one_by_one: list[Event] = [(0, 1), (0, -1), (1, 1), (1, -1)]
        both: list[Event] = [(0, 1), (1, 1), (0, -1), (1, -1)]
        assert (9, 6) == first_peaks.peaks(one_by_one, pairs, balanced)
        assert (18, 12) == first_peaks.peaks(both, pairs, balanced)

    def test_one_forward_one_backward(self) -> None:
        """Warm-up of one, then one forward and one backward in turn: the peaks lie at different moments."""
        # pairs 5, 11, 2 over 4, 4, 12.   F0 F1 B0 F2 B1 B2: pairs 5 16 11 13 2 0, balanced 4 8 4 16 12 0.
        # So 16 / 16 = 1, although 16 / 8 and 13 / 16 stood side by side.
        pairs, balanced = {0: 5, 1: 11, 2: 2}, {0: 4, 1: 4, 2: 12}
        events: list[Event] = [(0, 1), (1, 1), (0, -1), (2, 1), (1, -1), (2, -1)]
        assert 1 == cumulative(events, pairs, balanced)
        # All forwards first: 18 / 20. One by one: 11 / 12.
        assert Fraction(9, 10) == cumulative([(0, 1), (1, 1), (2, 1), (2, -1), (1, -1), (0, -1)], pairs, balanced)
        assert Fraction(11, 12) == cumulative([(0, 1), (0, -1), (1, 1), (1, -1), (2, 1), (2, -1)], pairs, balanced)

    def test_the_worst_rank_of_the_world_decides(self) -> None:
        """3 / 2 on one rank, 7 / 4 on another, a third without balance: 7 / 4; the third alone: nothing."""
        events: list[Event] = [("a", 1), ("a", -1)]
        pairs, balanced = [{"a": 3}, {"a": 7}, {"a": 0}], [{"a": Fraction(2)}, {"a": Fraction(4)}, {"a": Fraction(0)}]
        assert Fraction(7, 4) == first_peaks.cumulative([events] * 3, pairs, balanced)
        assert first_peaks.cumulative([events], pairs[2:], balanced[2:]) is None

    def test_a_rank_without_balance_adds_nothing(self) -> None:
        """No tokens on any rank: 0 is the one value; beside a rank at 1 / 2 it does not show; no rank, no value."""
        events: list[Event] = [("a", 1), ("a", -1)]
        pairs, balanced = [{"a": 0}, {"a": 1}], [{"a": Fraction(0)}, {"a": Fraction(2)}]
        for oracle in (second, first_peaks):
            assert [0] == list(oracle.legal_cumulatives([[events]], pairs[:1], balanced[:1]))
            assert [Fraction(1, 2)] == list(oracle.legal_cumulatives([[events]] * 2, pairs, balanced))
            assert [] == list(oracle.legal_cumulatives([], [], []))

    def test_recomputation_and_a_forward_alone(self) -> None:
        """The forward of a recomputed pass stands at either place; one without a backward counts at once or never."""
        passes: list[Any] = [("forward", 0), ("alone", 1), ("evaluation", 2), ("recomputed", 0), ("backward", 0)]
        early, late = [(0, 1), (1, 1), (1, -1), (0, -1)], [(1, 1), (1, -1), (0, 1), (0, -1)]
        bare = [(0, 1), (0, -1)]
        assert [early, bare, late] == first_timelines(passes)
        # Pairs 4 over 3 and 2 over 5, in that order of labels: (4 + 2) / (3 + 5), 4 / 3, and max(2, 4) / max(5, 3).
        known: tuple[Any, Any] = ([{0: 4, 1: 2}], [{0: Fraction(3), 1: Fraction(5)}])
        values = first_peaks.legal_cumulatives([first.legal_timelines(passes)], *known)
        assert (Fraction(3, 4), Fraction(4, 5), Fraction(4, 3)) == values

    def test_a_forward_and_a_backward_at_once_have_six_orders(self) -> None:
        """F2 of two layers beside B1 of two: 4! / (2! 2!) = 6 merges, after what came before."""
        before: list[Pass] = [("forward", (1, 0)), ("forward", (2, 0))]
        forward: list[Pass] = [("forward", (1, 1)), ("forward", (2, 1))]
        backward: list[Pass] = [("backward", (2, 0)), ("backward", (1, 0))]
        blocks: Any = [[before], [forward, backward]]
        merged = set(first.merges(blocks))
        assert 6 == len(merged)
        assert {tuple(before)} == {merge[:2] for merge in merged}
        assert [()] == list(first.merges([]))

    def test_an_abandoned_attempt_is_in_no_report(self) -> None:
        """Report, half an attempt, abandoned, the whole attempt, report, report, and a pass that comes too late."""
        whole: list[Any] = [("forward", 0), ("backward", 0)]
        log = [*whole, "report", ("forward", 1), "abandon", *whole, "report", "report", ("forward", 2)]
        assert (tuple(whole), tuple(whole), ()) == first.since_reports(log)

    def test_a_float32_timeline_may_be_off_by_its_turnover(self) -> None:
        """3 / 2 from two events of balance 2 each: (2 + 4) 2^-23 (3 / 2) (4 / 2) = 18 / 2^23 either way."""
        case: tuple[Any, Any, Any] = ([[("a", 1), ("a", -1)]], [{"a": 3}], [{"a": Fraction(2)}])
        off = Fraction(18, 2**23)
        assert (Fraction(3, 2) - off, Fraction(3, 2) + off) == first_peaks.cumulative_interval(*case)


class TestLaws:
    @pairs_agree
    @given(lives(), st.integers(2, 5))
    def test_factors_do_not_see_the_scale(self, passes: list[Any], times: int) -> None:
        """Pairs and balance so many times larger have the same quotient."""
        pairs, balanced = {label: 3 * label + 1 for label in range(6)}, {label: 2 * label + 1 for label in range(6)}
        events = first.timeline(passes)
        more = {label: times * n for label, n in pairs.items()}, {label: times * n for label, n in balanced.items()}
        assert cumulative(events, pairs, balanced) == cumulative(events, *more)

    @pairs_agree
    @given(lives(), lives(1))
    def test_what_came_to_rest_leaves_nothing(self, before: list[Any], after: list[Any]) -> None:
        """Peaks of two parts without a pass in flight between them are the larger of each part's."""
        pairs, balanced = {label: 5 * label + 2 for label in range(6)}, {n: Fraction(7 - n, 2) for n in range(6)}
        one, two = first.timeline(before), first.timeline(after)
        (p, q), (r, s) = (first_peaks.peaks(events, pairs, balanced) for events in (one, two))
        assert (max(p, r), max(q, s)) == first_peaks.peaks([*one, *two], pairs, balanced)

    @pairs_agree
    @given(lives(), st.integers(0, 10**6), st.integers(1, 7))
    def test_float32_keeps_within_the_interval(self, passes: list[Any], seed: int, ep: int) -> None:
        """Running sums and a quotient in float32 are as near as the spec asks."""
        random = np.random.default_rng(seed)
        pairs = {label: int(random.integers(0, 10**6)) for label in range(6)}
        balanced = {label: Fraction(int(random.integers(1, 10**6)), ep) for label in range(6)}
        events = first.timeline(passes)
        low, high = first_peaks.cumulative_interval([events], [pairs], [balanced])
        if not events:
            assert (0, 0) == (low, high)
            return
        held = even = np.float32(0)
        held_peak = even_peak = np.float32(-np.inf)
        for label, sign in events:
            held = np.float32(held + np.float32(sign * pairs[label]))
            even = np.float32(
                even
                + np.float32(sign) * (np.float32(balanced[label].numerator) / np.float32(balanced[label].denominator))
            )
            held_peak, even_peak = max(held_peak, held), max(even_peak, even)
        assert low <= Fraction(float(held_peak / even_peak)) <= high
