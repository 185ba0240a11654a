"""Reports of overload, worked out twice: which entries make which value, and how a report may end."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.overload import factors as first_entries
from moe_conformance.reference.overload import report as first
from self_tests.chapters.overload.second import factors as second
from self_tests.chapters.overload.second.factors import Entry, Label
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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


@st.composite
def records(draw: st.DrawFn) -> tuple[list[list[Label]], list[list[int]], list[int]]:
    """What every rank of up to four groups recorded: mostly alike within a group, sometimes not."""
    groups, stages, recorded = [], [], []  # type: ignore[var-annotated]
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
        [recorded[order.index(rank)] for rank in range(len(stages))],  # type: ignore[misc]
        [[order[rank] for rank in group] for group in groups],
        [stages[order.index(rank)] for rank in range(len(stages))],
    )


class TestEndsPair:
    @pairs_agree
    @given(records())
    def test_ends_agree(self, case: tuple[list[list[Label]], list[list[int]], list[int]]) -> None:
        """Both let every rank end its report in the same way."""
        assert second.ends(*case) == list(first.ends(*case))


class TestLaws:
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


def over(stage: int, layer: int | None, *pairs_by_entry: Sequence[int], balanced: int = 4) -> list[Entry]:
    """Entries of one layer with the same balance."""
    return [at(stage, layer, pairs, balanced) for pairs in pairs_by_entry]


def told(avg: Fraction, largest: Fraction, cumulative: Fraction | None, **layers: Fraction) -> dict[str, Fraction]:
    """What is reported; of layers, their names shortened to `avg_0`."""
    values = {"avg_overload_factor": avg, "max_overload_factor": largest, "max_cum_overload_factor": cumulative}
    values |= {f"{name[:3]}_overload_factor_layer_{name[4:]}": value for name, value in layers.items()}
    return {name: value for name, value in values.items() if value is not None}


F = Fraction
NAMES = {"avg_overload_factor", "max_overload_factor", "max_cum_overload_factor"}
# Of two stages, primes everywhere and b = 4: a maximum or mean over other ranks shows. Stage 0 has 5/4, 7/4 and 13/4,
# stage 1 has 19/4 and 1/4, and an entry of a layer without number.
WORLD = [*over(0, 0, [5, 3], [11, 13]), *over(0, 1, [2, 7]), *over(1, 2, [17, 19], [1, 0]), *over(1, None, [99, 99])]
EMPTY = [at(0, 0, [0, 0], 0), at(0, 1, [3, 1], 2)]
RANKS, STAGES = [[0, 2], [1, 3], [4]], [0, 0, 0, 0, 1]

test_by_hand = by_hand(
    *rows(first_reported, second.reported,
        ("(10 + 14 + 6) / (3 * 8), not the mean of the layers' means",
         ([*over(0, 0, [10], [14], balanced=8), *over(0, 1, [6], balanced=8)], 0, F(5, 4)),
         (told(F(5, 4), F(7, 4), F(5, 4), avg_0=F(3, 2), max_0=F(7, 4), avg_1=F(3, 4), max_1=F(3, 4)), set())),
        ("a stage averages its own entries, the maximum is the world's", (WORLD, 0, F(2)),
         (told(F(25, 12), F(19, 4), F(2), avg_0=F(9, 4), max_0=F(13, 4), avg_1=F(7, 4), max_1=F(7, 4)), set())),
        ("the other stage", (WORLD, 1, F(2)), (told(F(5, 2), F(19, 4), F(2), avg_2=F(5, 2), max_2=F(19, 4)), set())),
        ("a world without entries may say nothing", ([], 0, None), (told(F(0), F(0), F(0)), NAMES)),
        ("a stage without entries may say nothing", ([at(1, 4, [6], 2)], 0, None), (told(F(0), F(3), F(0)), NAMES)),
        ("an entry without tokens is 0", (EMPTY, 0, F(1), "zero"),
         (told(F(3, 4), F(3, 2), F(1), avg_0=F(0), max_0=F(0), avg_1=F(3, 2), max_1=F(3, 2)), set())),
        ("or it is left out", (EMPTY, 0, F(1), "left_out"),
         (told(F(3, 2), F(3, 2), F(1), avg_1=F(3, 2), max_1=F(3, 2)), set())),
        ("an entry without ranks", ([at(0, 0, [1], 1), at(0, 1, [], 3)], 0, None), REFUSED),
        ("less than no pair, on another stage", ([at(0, 0, [1], 1), at(1, 0, [3, -1], 2)], 0, None), REFUSED),
        ("an unknown way with empty entries", ([], 0, None, "skip"), REFUSED),
    ),
    *rows(first.allowed_error, second.allowed_error,
        ("a mean of three, exactly 5 / 4, may be 7 roundings of 2^-23 off", (F(5, 4), 3), F(35, 2**25)),
        ("twice that if it grows twofold", (F(-5, 4), 3), {"growth": 2}, F(35, 2**24)),
    ),
    *rows(first.ends, second.ends,
        ("slices of one stage with one entry each", ([["a"], ["b"], ["a"], ["b"], []], RANKS, STAGES), ["values"] * 5),
        ("slices of one stage with one and two entries", ([["a"], ["b", "b"], ["a"], ["b", "b"], []], RANKS, STAGES),
         ["either"] * 5),
        ("a group at odds with itself", ([["a"], ["b", "c"], ["a"], ["b", "b"], []], RANKS, STAGES),
         ["either", "error", "either", "error", "either"]),
        ("a rank in no group", ([["a"]] * 3, [[0], [2]], [0, 0, 0]), REFUSED),
        ("a rank in two groups", ([["a"]] * 3, [[0, 1], [1, 2]], [0, 0, 0]), REFUSED),
        ("a group over two stages", ([["a"]] * 3, [[0, 1, 2]], [0, 0, 1]), REFUSED),
        ("a rank without a stage", ([["a"]] * 3, [[0, 1, 2]], [0, 0]), REFUSED),
    ),
)  # fmt: skip
