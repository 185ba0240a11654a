"""Quantised rows, worked out twice: scales, numbers of eight bits, and what may arrive."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.token_exchange import wire_errors as first_errors
from moe_conformance.reference.token_exchange import wire_formats as first
from self_tests.chapters.token_exchange.second import wire_formats as second
from self_tests.chapters.token_exchange.second.wire_formats import E4M3, E5M2, Format
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Floats = NDArray[np.float64]
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
drawn_formats = st.sampled_from([E4M3, E5M2])
INF, NAN = math.inf, math.nan


def in_first(fmt: Format) -> first.Format:
    """The format in the first oracle's words."""
    return first.Format(*fmt)


def make_rows(R: int, D: int, seed: int) -> Floats:
    """Rows whose elements differ by many powers of two; zeros, a block of zeros, and numbers of the format too."""
    random = np.random.default_rng(seed)
    x_RD = random.normal(size=(R, D)) * 2.0 ** random.integers(-24, 6, size=(R, D))
    kinds = random.random((R, D))
    x_RD[kinds < 0.15] = 0.0
    ties = random.integers(-40, 41, size=(R, D)) * 2.0 ** random.integers(-12, 4, size=(R, D))
    x_RD = np.where(kinds > 0.6, ties, x_RD)
    if R > 1 and seed % 3 == 0:
        x_RD[1, : D // 2 + 1] = 0.0
    return x_RD


drawn_rows = st.builds(make_rows, st.integers(0, 3), st.integers(0, 7), st.integers(0, 10**6))


class TestFormats:
    @formats
    def test_the_formats_are_those_of_eight_bits(self, fmt: Format) -> None:
        """Both describe PyTorch's, and the longhand lists the same 127 or 124 numbers from zero on."""
        spelled = torch.arange(128, dtype=torch.uint8).view(DTYPES[fmt.name]).double()
        finite = spelled[spelled.isfinite()].tolist()
        assert finite == [float(number) for number in second.numbers(fmt)]
        assert (first.E4M3, first.E5M2) == (in_first(E4M3), in_first(E5M2))
        assert (448.0, 57344.0) == (E4M3.largest, E5M2.largest)

    @formats
    def test_rounding_is_that_of_pytorch(self, fmt: Format) -> None:
        """Every midpoint between neighbours, and what lies beside it, rounds as PyTorch's conversion from float32."""
        grid = [float(number) for number in second.numbers(fmt)]
        halves = [(low + high) / 2 for low, high in pairwise(grid)]
        points = np.array(
            [*grid, *halves, *(h * (1 - 2.0**-20) for h in halves), *(h * (1 + 2.0**-20) for h in halves)]
        )
        x_RD = np.stack([points, -points])
        wanted = torch.tensor(x_RD, dtype=torch.float32).to(DTYPES[fmt.name]).double()
        ones = np.ones((2, 1))
        assert wanted.tolist() == second.quantise(x_RD, ones, len(points), fmt).tolist()

    @pytest.mark.parametrize(
        ("fmt", "x", "expected"),
        [
            (E4M3, [17.0, 19.0, -17.0, 18.5], [16.0, 20.0, -16.0, 18.0]),  # steps of 2 from 16 on
            (E4M3, [449.0, 464.0, 1e30, -1e30], [448.0, 448.0, 448.0, -448.0]),
            (E4M3, [2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-11], [2.0**-9, 0.0, 2.0**-8, 0.0]),
            (E4M3, [2.0**-6, 2.0**-6 + 2.0**-10, 7.5 * 2.0**-9, 8.5 * 2.0**-9], [2.0**-6, 2.0**-6, 2.0**-6, 2.0**-6]),
            (E5M2, [9.0, 11.0, -13.0, 15.0], [8.0, 12.0, -12.0, 16.0]),  # steps of 2 from 8 on
            (E5M2, [2.0**-17, 3 * 2.0**-17, 57344.5, 2.0**-16], [0.0, 2.0**-15, 57344.0, 2.0**-16]),
        ],
    )
    def test_by_hand(self, fmt: Format, x: list[float], expected: list[float]) -> None:
        """Ties to even mantissas, numbers below the normal ones, and saturation, with a scale of 4."""
        x_RD, scale = np.array([x]) * 4.0, np.array([[4.0]])
        assert [expected] == second.quantise(x_RD, scale, 4, fmt).tolist()


class TestRoundTrip:
    @settings(pairs_agree, max_examples=100)
    @given(drawn_rows, st.integers(1, 5), drawn_formats, st.booleans())
    def test_rows_that_were_rounded_are_legal(self, x_RD: Floats, block: int, fmt: Format, power_of_two: bool) -> None:
        """What is rounded under scales of every block, the short last one too, both call legal."""
        options: dict[str, Any] = {"power_of_two": power_of_two}
        expected = second.scales(x_RD, block, fmt, **options)
        v_RD = second.sent(x_RD, block, fmt, **options)
        for errors in (first_errors, second):
            given = (floats, in_first) if errors is first_errors else (np.array, lambda same: same)
            assert bool(errors.legal_scales(given[0](x_RD), given[0](expected), block, given[1](fmt)).all())
            arrays = [given[0](each) for each in (x_RD, v_RD, expected)]
            assert bool(errors.legal_values(*arrays, block, given[1](fmt)).all())

    @pytest.mark.parametrize(
        ("largest", "power_of_two", "floor", "expected"),
        [
            (448.0, True, 1e-4, 1.0),
            (math.nextafter(448.0, 500.0), True, 1e-4, 2.0),
            (math.nextafter(448.0, 0.0), True, 1e-4, 1.0),
            (224.0, True, 1e-4, 0.5),
            (225.0, True, 1e-4, 1.0),
            (449.0, True, 1e-4, 2.0),
            (672.0, False, 1e-4, 1.5),
            (0.0, False, 1e-4, 1e-4 / 448),
            (0.0, False, 2.0**-20, 2.0**-20 / 448),
            (2.0**-14, False, 2.0**-20, 2.0**-14 / 448),
            (0.0, True, 7 * 2.0**-20, 2.0**-26),
            (1e-5, False, 1e-4, 1e-4 / 448),
        ],
    )
    def test_scales_by_hand(self, largest: float, power_of_two: bool, floor: float, expected: float) -> None:
        """The largest number, whatever its sign and place, becomes 448, or less by less than half."""
        x = np.array([[largest / 2, -largest, 0.0]])
        options: dict[str, Any] = {"power_of_two": power_of_two, "floor": floor}
        assert [[expected]] == second.scales(x, 3, E4M3, **options).tolist()

    def test_blocks_by_hand(self) -> None:
        """Five columns in blocks of two make three; each block has its own scale, and each row its own."""
        x = np.array([[448.0, 1.0, -896.0, 17.0, 4.0], [0.0, 0.0, 0.0, 0.0, 224.0]])
        expected = [[1.0, 2.0, 2.0**-6], [2.0**-22, 2.0**-22, 0.5]]
        assert expected == second.scales(x, 2, E4M3, power_of_two=True).tolist()
        # 17 / 2 = 8.5 lies between 8 and 9: 8, so that 16 arrives. 1 and 4 arrive as they are.
        arrived = [[448.0, 1.0, -896.0, 16.0, 4.0], [0.0, 0.0, 0.0, 0.0, 224.0]]
        assert arrived == second.sent(x, 2, E4M3, power_of_two=True).tolist()


class TestLegalScales:
    @settings(pairs_agree, max_examples=100)
    @given(drawn_rows, st.integers(1, 5), drawn_formats, st.integers(0, 10**6))
    def test_verdicts_and_bounds_agree(self, x_RD: Floats, block: int, fmt: Format, seed: int) -> None:
        """Both allow the same scales, within a factor of two; anything where a block is spoilt."""
        random = np.random.default_rng(seed)
        low, high = second.scale_bounds(x_RD, block, fmt)
        bounds = first_errors.scale_bounds(floats(x_RD), block, in_first(fmt))
        assert_close(low, bounds[0])
        assert_close(high, bounds[1])
        scales_RB = np.where(random.random(low.shape) < 0.5, low, high)
        scales_RB = scales_RB * random.choice([0.5, 1 - 2.0**-40, 1 + 2.0**-40, 1.5, 2.0], size=low.shape)
        scales_RB[random.random(low.shape) < 0.1] = random.choice([NAN, INF, -1.0, 0.0])
        spoilt_RD = x_RD.copy()
        spoilt_RD[random.random(x_RD.shape) < 0.1] = random.choice([NAN, INF, -INF])
        for x in (x_RD, spoilt_RD):
            assert_agree(first_errors.legal_scales, second.legal_scales, x, scales_RB, block, fmt)

    def test_scales_that_moved_are_noticed(self) -> None:
        """Where blocks differ by more than two, scales of the next block or of the next row are illegal."""
        x = np.array([[L, 4 * L, 16 * L], [64 * L, 256 * L, 1024 * L]])
        right = second.scales(x, 1, E4M3)
        for moved in (right[::-1].copy(), np.roll(right, 1, axis=1), right.T.reshape(2, 3)):
            verdict = assert_agree(first_errors.legal_scales, second.legal_scales, x, moved, 1, E4M3)
            kept = (moved == right).tolist()
            assert kept == verdict[1]
        assert [[2, 3], [[True] * 3] * 2] == assert_agree(
            first_errors.legal_scales, second.legal_scales, x, right, 1, E4M3
        )


class TestLegalValues:
    @settings(pairs_agree, max_examples=100)
    @given(drawn_rows, st.integers(1, 5), drawn_formats, st.sampled_from([0.0, 2.0**-8]), st.integers(0, 10**6))
    def test_verdicts_agree(self, x_RD: Floats, block: int, fmt: Format, unit: float, seed: int) -> None:
        """Both judge errors alike, half as large as allowed and larger, of both signs, spoilt blocks included."""
        random = np.random.default_rng(seed)
        scales_RB = second.scales(x_RD, block, fmt)
        error = np.maximum(
            np.abs(x_RD) * 2.0 ** -(fmt.mantissa_bits + 1),
            np.repeat(scales_RB, block, axis=1)[:, : x_RD.shape[1]]
            * 2.0 ** (fmt.least_exponent - fmt.mantissa_bits - 1),
        )
        v_RD = x_RD + error * random.choice([-2.0, -1.01, -0.99, 0.0, 0.99, 1.0001, 1.1], size=x_RD.shape)
        v_RD[random.random(x_RD.shape) < 0.1] = random.choice([NAN, INF, 0.0])
        spoilt_RD = x_RD.copy()
        spoilt_RD[random.random(x_RD.shape) < 0.1] = random.choice([NAN, INF, -INF])
        for x in (x_RD, spoilt_RD):
            question = x, v_RD, scales_RB, block, fmt
            assert_agree(first_errors.legal_values, second.legal_values, *question, unit=unit)


def first_scales(x_RD: Any, scales_RB: Any, block: int, fmt: Format) -> Any:
    """The first oracle's verdict on scales."""
    return first_errors.legal_scales(x_RD, scales_RB, block, in_first(fmt))


def first_values(x_RD: Any, v_RD: Any, scales_RB: Any, block: int, fmt: Format, *unit: float) -> Any:
    """The first oracle's verdict on values."""
    named = {"unit": unit[0]} if unit else {}
    return first_errors.legal_values(x_RD, v_RD, scales_RB, block, in_first(fmt), **named)


def second_values(*question: Any) -> Any:
    """The longhand's."""
    return second.legal_values(*question[:5], **dict(zip(["unit"], question[5:], strict=False)))


def under(fmt: Format, x: float, v: float, *unit: float) -> tuple[Any, ...]:
    """One element under the scale 1; its neighbour is off by all that it has, the next block has its own scale."""
    return np.array([[x, 2.0, 4.0]]), np.array([[v, 9.0, 5.0]]), np.array([[1.0, 2048.0]]), 2, fmt, *unit


def ones(*shapes: tuple[int, int]) -> tuple[Any, ...]:
    """Arrays of these shapes."""
    return tuple(np.ones(shape) for shape in shapes)


L, R20, W16, STEP = 448.0, 2.0**-20, 1 + 2.0**-16, math.nextafter
E9, E10 = 2.0**-9, 2.0**-10

test_by_hand = by_hand(
    # At the bounds and one step beyond them; a good block beside it stays legal.
    *rows(first_scales, second.legal_scales,
        *(
            (f"{name}: {scale!r} for {row}", (np.array([[*row, L, 0.0]]), np.array([[scale, 1.0]]), 2, E4M3),
             [[legal, True]])
            for name, row, scale, legal in [
                ("least", [L, 1.0], 1 - R20, True), ("less", [L, 1.0], STEP(1 - R20, 0.0), False),
                ("most", [L, 1.0], 2 * (1 + R20), True), ("more", [L, 1.0], STEP(2 * (1 + R20), 3.0), False),
                ("negative", [1.0, -L], 1.0, True), ("half", [1.0, -L], 0.5, False),
                ("no floor", [0.0, 2.0**-30], 2.0**-30 / L, True), ("half", [0.0, 2.0**-30], 2.0**-31 / L, False),
                ("a floor", [0.0, 2.0**-30], 1e-4 / L, True), ("twice", [0.0, 2.0**-30], 2e-4 / L, True),
                ("more than twice", [0.0, 2.0**-30], 2.01e-4 / L, False), ("zeros", [0.0, 0.0], 0.0, True),
                ("zeros", [0.0, -0.0], 1e30, True), ("zeros", [0.0, 0.0], INF, False),
                ("zeros", [0.0, 0.0], NAN, False), ("no number", [L, 0.0], NAN, False), ("spoilt", [L, INF], NAN, True),
                ("spoilt", [NAN, 0.0], -1.0, True),
            ]
        ),
        *(
            (f"{shape} scales of blocks of {block}", (*ones((1, 2), shape), block, E4M3), REFUSED)
            for shape, block in [((1, 2), 2), ((2, 1), 2), ((1, 1), 0), ((1, 1), 1)]
        ),
    ),
    # 4 arrives as 5: of 2048 2^-10 = 2 is allowed, of e5m2 2^-6 or 2^-3 4 is not.
    *rows(first_values, second_values,
        *(
            (f"{name}: {question[2]!r} for {question[1]!r} of {question[0].name}", under(*question),  # type: ignore[arg-type, union-attr]
             [[legal, not math.isfinite(question[1]), question[0] is E4M3]])  # type: ignore[arg-type]
            for name, legal, question in [
                ("2^-4 of 16", True, (E4M3, 16.0, 16 + W16)), ("more", False, (E4M3, 16.0, STEP(16 + W16, 99.0))),
                ("2^-4 of -16", True, (E4M3, -16.0, -16 + W16)), ("more", False, (E4M3, -16.0, STEP(-16 + W16, 0.0))),
                ("2^-3 of 16", True, (E5M2, 16.0, 16 + 2 * W16)),
                ("more", False, (E5M2, 16.0, STEP(16 + 2 * W16, 99.0))),
                ("2^-10 of the scale", True, (E4M3, E9, 3 * E10)), ("more", False, (E4M3, E9, 3.001 * E10)),
                ("to zero", True, (E4M3, E10, 0.0)), ("too far to zero", False, (E4M3, E9, 0.0)),
                ("2^-17 of the scale", True, (E5M2, 2.0**-17, 0.0)), ("more", False, (E5M2, 2.0**-16, 0.0)),
                ("near, but of the other sign", False, (E4M3, 2.0**-12, -(2.0**-13))),
                ("the sign of zero", True, (E4M3, 2.0**-12, -0.0)), ("of zero", False, (E4M3, 0.0, 2.0**-12)),
                ("of zero", False, (E4M3, 0.0, -(2.0**-12))), ("of zero", True, (E4M3, -0.0, 0.0)),
                ("and a roundoff", True, (E4M3, 16.0, 17.0 + 17 * 2.0**-8, 2.0**-8)),
                ("more", False, (E4M3, 16.0, 17.2, 2.0**-8)), ("no number", False, (E4M3, 16.0, NAN)),
                ("no number", False, (E4M3, 16.0, INF)), ("and a roundoff", False, (E4M3, 16.0, INF, 2.0**-8)),
                ("spoilt", True, (E4M3, NAN, NAN)), ("spoilt", True, (E4M3, INF, NAN)),
                ("spoilt", True, (E4M3, INF, -INF)), ("spoilt, and a number", False, (E4M3, INF, L)),
                ("spoilt, and zero", False, (E4M3, NAN, 0.0)),
            ]
        ),
        *(
            (f"values {shape}, roundoff {unit}", (*ones((1, 2), shape, (1, 1)), 2, E4M3, unit), REFUSED)
            for shape, unit in [((1, 3), 0.0), ((2, 2), 0.0), ((1, 2), -1e-9), ((1, 2), NAN)]
        ),
        *(
            (f"values under {shape} scales of blocks of {block}", (*ones((1, 2), (1, 2), shape), block, E4M3), REFUSED)
            for shape, block in [((1, 2), 2), ((2, 1), 2), ((1, 1), 0), ((1, 1), 1)]
        ),
        ("more scales than blocks", (*ones((1, 3), (1, 3), (1, 3)), 2, E4M3), REFUSED),
    ),
)  # fmt: skip
