"""Reports of overload, worked out twice: which entries make which value, and how a report may end."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.overload import factors as first_entries
from moe_conformance.reference.overload import report as first
from self_tests.chapters.overload.second import factors as second
from self_tests.chapters.overload.second.factors import Entry, Label

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Empty = Literal["zero", "left_out"]


def first_reported(
    entries: Sequence[Entry], stage: int, cumulative: Fraction | None, empty: Empty = "zero", prefix: str = ""
) -> tuple[dict[str, Fraction], set[str]]:
    """The first oracle's report of longhand entries."""
    made = first.reported(
        [first_entries.Entry(*one) for one in entries], stage, cumulative=cumulative, empty=empty, prefix=prefix
    )
    return dict(made.values), set(made.may_be_absent)


def at(stage: int, layer: int | None, pairs: Sequence[int], balanced: int | Fraction) -> Entry:
    """An entry, shortly."""
    return Entry(stage, layer, tuple(pairs), Fraction(balanced))


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    """Entries of up to three stages; layers of two stages' own, some without number; groups without tokens."""
    found = []
    for _ in range(draw(st.integers(0, 9))):
        stage = draw(st.integers(0, 2))
        layer = draw(st.sampled_from([None, 3 * stage, 3 * stage + 1, 3 * stage + 2]))
        balanced = draw(st.sampled_from([Fraction(0), Fraction(7, 2), Fraction(3), Fraction(11, 3), Fraction(13)]))
        largest = 0 if balanced == 0 else 23
        found.append(at(stage, layer, draw(st.lists(st.integers(0, largest), min_size=1, max_size=3)), balanced))
    return found


class TestReportPair:
    @pairs_agree
    @given(
        entries(),
        st.integers(0, 2),
        st.sampled_from([None, Fraction(0), Fraction(17, 5)]),
        st.sampled_from(["zero", "left_out"]),
        st.sampled_from(["", "moe/"]),
    )
    def test_reports_agree(
        self, world: list[Entry], stage: int, cumulative: Fraction | None, empty: Empty, prefix: str
    ) -> None:
        """Both report the same values under the same names, and let the same of them be absent."""
        expected = second.reported(world, stage, cumulative, empty, prefix)
        assert expected == first_reported(world, stage, cumulative, empty, prefix)

    @pairs_agree
    @given(st.fractions(-30, 30, max_denominator=41), st.integers(0, 50), st.fractions(0, 9, max_denominator=7))
    def test_allowed_errors_agree(self, exact: Fraction, terms: int, growth: Fraction) -> None:
        """Both allow the same rounding, for a value of either sign."""
        expected = second.allowed_error(exact, terms, growth)
        assert expected == first.allowed_error(exact, terms, growth=growth)

    @pytest.mark.parametrize("wrong", [at(0, 1, [], 3), at(1, 0, [3, -1], 2)])
    def test_an_entry_without_ranks_or_with_less_than_nothing_is_refused_by_both(self, wrong: Entry) -> None:
        """Whatever stage it belongs to."""
        with pytest.raises(ValueError, match=r"\w"):
            second.reported([at(0, 0, [1], 1), wrong], 0, None)
        with pytest.raises(ValueError, match=r"\w"):
            first_reported([at(0, 0, [1], 1), wrong], 0, None)

    def test_a_way_with_empty_entries_that_is_none_is_refused_by_both(self) -> None:
        """They count as zero or are left out."""
        with pytest.raises(ValueError, match="skip"):
            second.reported([], 0, None, "skip")
        with pytest.raises(ValueError, match="skip"):
            first_reported([], 0, None, "skip")  # type: ignore[arg-type]


@st.composite
def records(draw: st.DrawFn) -> tuple[list[list[Label]], list[list[int]], list[int]]:
    """What every rank of up to four groups recorded: mostly alike within a group, sometimes not."""
    groups, stages, recorded = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 2))
        groups.append(list(range(len(stages), len(stages) + size)))
        stages += [draw(st.integers(0, 1))] * size
        labels = draw(st.lists(st.sampled_from(["a", "b"]), max_size=2))
        recorded += [list(draw(st.permutations(labels))) for _ in range(size)]
    if draw(st.booleans()):
        one = draw(st.integers(0, len(stages) - 1))
        recorded[one] = draw(st.lists(st.sampled_from(["a", "b"]), max_size=2))
    order = draw(st.permutations(range(len(stages))))  # ranks of a group are not neighbours
    return (
        [recorded[order.index(rank)] for rank in range(len(stages))],
        [[order[rank] for rank in group] for group in groups],
        [stages[order.index(rank)] for rank in range(len(stages))],
    )


class TestEndsPair:
    @pairs_agree
    @given(records())
    def test_ends_agree(self, case: tuple[list[list[Label]], list[list[int]], list[int]]) -> None:
        """Both let every rank end its report in the same way."""
        assert second.ends(*case) == list(first.ends(*case))

    @pytest.mark.parametrize(
        ("groups", "stages"),
        [([[0], [2]], [0, 0, 0]), ([[0, 1], [1, 2]], [0, 0, 0]), ([[0, 1, 2]], [0, 0, 1]), ([[0, 1, 2]], [0, 0])],
    )
    def test_groups_that_do_not_cover_the_world_are_refused_by_both(
        self, groups: list[list[int]], stages: list[int]
    ) -> None:
        """A rank in no group or in two, a group over two stages, a rank without a stage."""
        with pytest.raises(ValueError, match=r"\w"):
            second.ends([["a"]] * 3, groups, stages)
        with pytest.raises(ValueError, match=r"\w"):
            first.ends([["a"]] * 3, groups, stages)


class TestByHand:
    def test_layers_with_different_numbers_of_entries(self) -> None:
        """10 / 8 and 14 / 8 of one layer, 6 / 8 of another: 1.25 on average, 1.75 at most; each layer for itself."""
        # (10 + 14 + 6) / (3 * 8) = 30 / 24 = 5 / 4, not the mean of the layers' means, (3 / 2 + 3 / 4) / 2 = 9 / 8.
        # The middle entry alone is 14 / 8 = 7 / 4. Layer 0: (10 + 14) / (2 * 8) = 3 / 2. Layer 1: 6 / 8 = 3 / 4.
        world = [at(0, 0, [10], 8), at(0, 0, [14], 8), at(0, 1, [6], 8)]
        expected = {
            "avg_overload_factor": Fraction(5, 4),
            "max_overload_factor": Fraction(7, 4),
            "max_cum_overload_factor": Fraction(5, 4),
            "avg_overload_factor_layer_0": Fraction(3, 2),
            "max_overload_factor_layer_0": Fraction(7, 4),
            "avg_overload_factor_layer_1": Fraction(3, 4),
            "max_overload_factor_layer_1": Fraction(3, 4),
        }
        assert (expected, set()) == first_reported(world, 0, Fraction(5, 4))
        assert (expected, set()) == second.reported(world, 0, Fraction(5, 4))

    def test_a_mean_of_ratios_is_not_a_ratio_of_means(self) -> None:
        """24 / 16 and 8 / 32 are 7 / 8 on average; 32 / 48 would be 2 / 3."""
        values, _ = first_reported([at(0, 0, [24], 16), at(0, 0, [8], 32)], 0, None)
        assert Fraction(7, 8) == values["avg_overload_factor"]

    def test_every_reduction_over_its_own_ranks(self) -> None:
        """Two stages of two slices of two ranks, primes everywhere: a maximum or mean over others shows."""
        # b = 4 everywhere. Stage 0: slice 0 has 5 and 3, then 2 and 7 pairs; slice 1 has 11 and 13.
        #   factors 5/4, 7/4, 13/4: avg (5 + 7 + 13) / 12 = 25 / 12. (Ranks summed first: (5 + 2), (3 + 7): 10.)
        # Stage 1: slice 0 has 17 and 19, slice 1 has 1 and 0: factors 19/4 and 1/4, avg 20 / 8 = 5 / 2.
        # The maximum is 19 / 4 on both stages, the mean each stage's own.
        world = [at(0, 0, [5, 3], 4), at(0, 1, [2, 7], 4), at(0, 0, [11, 13], 4), at(1, 2, [17, 19], 4)]
        world += [at(1, 2, [1, 0], 4), at(1, None, [99, 99], 4)]
        names = ("avg_overload_factor", "max_overload_factor")
        for stage, expected in [(0, (Fraction(25, 12), Fraction(19, 4))), (1, (Fraction(5, 2), Fraction(19, 4)))]:
            values, absent = first_reported(world, stage, Fraction(2))
            assert expected == tuple(values[name] for name in names)
            assert set() == absent
        values, _ = first_reported(world, 0, Fraction(2), prefix="moe/")
        layers = {"moe/avg_overload_factor_layer_0": Fraction(9, 4), "moe/max_overload_factor_layer_0": Fraction(13, 4)}
        layers |= {name.replace("_0", "_1"): Fraction(7, 4) for name in layers}
        assert layers == {name: value for name, value in values.items() if "layer" in name}

    def test_a_stage_without_entries_may_say_nothing(self) -> None:
        """It reports the world's maximum and an average of 0, or leaves them out; so does a world without entries."""
        names = {"avg_overload_factor", "max_overload_factor", "max_cum_overload_factor"}
        zeros = dict.fromkeys(names, Fraction(0))
        assert (zeros, names) == first_reported([], 0, None)
        assert (zeros | {"max_overload_factor": Fraction(3)}, names) == first_reported([at(1, 4, [6], 2)], 0, None)

    def test_an_entry_without_tokens_is_0_or_left_out(self) -> None:
        """0 and 3 / 2: the average is 3 / 4 or 3 / 2, and a layer of nothing else has 0 or no key."""
        world = [at(0, 0, [0, 0], 0), at(0, 1, [3, 1], 2)]
        counted, _ = first_reported(world, 0, None, "zero")
        left_out, _ = first_reported(world, 0, None, "left_out")
        assert (Fraction(3, 4), 0) == (counted["avg_overload_factor"], counted["avg_overload_factor_layer_0"])
        assert Fraction(3, 2) == left_out["avg_overload_factor"]
        assert "avg_overload_factor_layer_0" not in left_out

    def test_a_float32_rounding_is_two_to_the_minus_23(self) -> None:
        """A mean of three, exactly 5 / 4, may be 7 such roundings off: 35 / 2^25."""
        assert Fraction(35, 2**25) == first.allowed_error(Fraction(5, 4), 3)
        assert Fraction(35, 2**24) == first.allowed_error(Fraction(-5, 4), 3, growth=2)

    def test_who_may_say_values(self) -> None:
        """Slices of one stage with one entry each, with one and two, and a group at odds with itself."""
        groups, stages = [[0, 2], [1, 3], [4]], [0, 0, 0, 0, 1]
        alike: list[list[Label]] = [["a"], ["b"], ["a"], ["b"], []]
        more: list[list[Label]] = [["a"], ["b", "b"], ["a"], ["b", "b"], []]
        torn: list[list[Label]] = [["a"], ["b", "c"], ["a"], ["b", "b"], []]
        assert ("values",) * 5 == first.ends(alike, groups, stages)
        assert ("either",) * 5 == first.ends(more, groups, stages)
        assert ("either", "error", "either", "error", "either") == first.ends(torn, groups, stages)


class TestLaws:
    @pairs_agree
    @given(entries(), st.integers(0, 2), st.randoms(use_true_random=False))
    def test_entries_have_no_order(self, world: list[Entry], stage: int, random: Random) -> None:
        """A report does not depend on the order of entries, nor on the order of the ranks in them."""
        other = [one._replace(pairs=tuple(random.sample(one.pairs, len(one.pairs)))) for one in world]
        random.shuffle(other)
        assert first_reported(world, stage, None) == first_reported(other, stage, None)

    @pairs_agree
    @given(entries(), st.integers(0, 2), st.sampled_from(["zero", "left_out"]))
    def test_the_maximum_is_never_below_the_average(self, world: list[Entry], stage: int, empty: Empty) -> None:
        """Of the world and of every layer."""
        values, _ = first_reported(world, stage, None, empty)
        averages = {name: value for name, value in values.items() if name.startswith("avg")}
        assert all(value <= values[name.replace("avg", "max")] for name, value in averages.items())

    @pairs_agree
    @given(
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), min_size=1, max_size=40), st.integers(1, 7)
    )
    def test_float32_keeps_within_what_is_allowed(self, loads: list[tuple[int, int]], ep: int) -> None:
        """A mean of factors worked out in float32, one after another, is as near as the spec asks."""
        world = [at(0, 0, [load], Fraction(slots, ep)) for load, slots in loads]
        total = np.float32(0)
        for load, slots in loads:
            total += np.float32(load) / (np.float32(slots) / np.float32(ep))
        exact = first_reported(world, 0, None)[0]["avg_overload_factor"]
        assert abs(Fraction(float(total / np.float32(len(loads)))) - exact) <= first.allowed_error(exact, len(loads))
