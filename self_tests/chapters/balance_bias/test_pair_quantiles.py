"""Balancing by quantiles, worked out twice: reference.balance_bias.quantiles sorts, the longhand counts (BIAS-12)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.balance_bias import quantiles as first
from self_tests.chapters.balance_bias import second
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Step(NamedTuple):
    """Scores of every part of a step with their masks, the bias of the step, and K."""

    parts: list[Floats]
    masks: list[Bools | None]
    bias: list[float]
    slots: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Scores and biases in eighths, so that differences are exact and tie often, or any; parts with nothing."""
    E = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    exact = draw(st.booleans())
    parts, masks = [], []
    for _ in range(draw(st.integers(0, 3))):
        T = draw(st.sampled_from([0, 1, 2, 5]))
        scores_TE = random.integers(0, 8, size=(T, E)) / 8.0 if exact else random.random((T, E))
        mask_T = None if draw(st.booleans()) else random.random(T) < draw(st.sampled_from([0.3, 1.0]))
        if mask_T is not None:
            scores_TE[mask_T] = draw(st.sampled_from([math.nan, math.inf, -9.0]))
        parts.append(scores_TE)
        masks.append(mask_T)
    bias = (random.integers(-4, 4, size=E) / 8.0 if exact else random.normal(size=E)).tolist()
    return Step(parts, masks, bias, draw(st.integers(1, E)))


def doubles(numbers: list[float]) -> Tensor:
    """Biases as the first oracle takes them."""
    return torch.tensor(numbers, dtype=torch.float64)


def first_bounds(step: Step, memory: float = 0.0) -> tuple[list[float], list[float]]:
    """Ask the first oracle between what the new bias may lie."""
    low_E, high_E = first.quantile_bounds(
        [torch.tensor(part) for part in step.parts],
        doubles(step.bias),
        top_k=step.slots,
        padding=[None if mask is None else torch.from_numpy(mask) for mask in step.masks],
        memory=memory,
    )
    assert (torch.float64, torch.float64) == (low_E.dtype, high_E.dtype)
    return low_E.tolist(), high_E.tolist()


class TestPair:
    @settings(pairs_agree, max_examples=200)
    @given(steps(), st.sampled_from([0.0, 0.0, 0.5, 0.9]))
    def test_bounds_agree(self, step: Step, memory: float) -> None:
        """Both allow every expert the same biases, with ties, shares that are not whole and ends that are open."""
        expected = second.legal_range(step.parts, step.bias, step.slots, step.masks, memory)
        assert expected[0] == pytest.approx(first_bounds(step, memory)[0], rel=1e-15, abs=1e-15)
        assert expected[1] == pytest.approx(first_bounds(step, memory)[1], rel=1e-15, abs=1e-15)

    @pairs_agree
    @given(st.integers(2, 6), st.integers(0, 4), st.integers(0, 10**6))
    def test_cutoffs_agree(self, E: int, T: int, seed: int) -> None:
        """Both find the best value that is left out, among ties too."""
        random = np.random.default_rng(seed)
        scores_TE, bias = random.integers(0, 5, size=(T, E)) / 4.0, (random.integers(-2, 2, size=E) / 4.0).tolist()
        for slots in range(1, E):
            cut_T = first.cutoffs(torch.tensor(scores_TE), doubles(bias), top_k=slots)
            assert torch.float64 == cut_T.dtype
            assert [second.cutoff(row, bias, slots) for row in scores_TE.tolist()] == cut_T.tolist()

    @pairs_agree
    @given(steps(), st.integers(0, 10**6))
    def test_distances_agree(self, step: Step, seed: int) -> None:
        """Both measure how far any bias is from its bounds, a common constant being free."""
        low, high = first_bounds(step)
        new = np.random.default_rng(seed).normal(size=len(low)).tolist()
        distance = first.outside(doubles(new), doubles(low), doubles(high))
        assert second.missed(new, low, high) == pytest.approx(distance, rel=1e-12, abs=1e-14)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_scores_are_widened_first(self, dtype: torch.dtype) -> None:
        """Scores and biases of fewer bits are taken as exact numbers and subtracted in float64."""
        generator = torch.Generator().manual_seed(3)
        scores_TE, bias_E = (
            torch.rand(5, 4, generator=generator).to(dtype),
            torch.tensor([0.1, 0.0, -0.3, 0.7]).to(dtype),
        )
        low_E, high_E = first.quantile_bounds([scores_TE], bias_E, top_k=2)
        expected = second.legal_range([scores_TE.double().numpy()], bias_E.double().tolist(), 2)
        assert expected == (low_E.tolist(), high_E.tolist())
        cut_T = first.cutoffs(scores_TE, bias_E, top_k=2)
        bias = bias_E.double().tolist()
        assert [second.cutoff(row, bias, 2) for row in scores_TE.double().tolist()] == cut_T.tolist()


def first_range(parts: Any, bias: list[float], slots: int, masks: Any = None, memory: float = 0.0) -> tuple[Any, ...]:
    """What the first oracle allows, asked as the longhand is."""
    return first.quantile_bounds(parts, doubles(bias), top_k=slots, padding=masks, memory=memory)


def in_doubles(oracle: Any) -> Any:
    """An oracle that is given lists."""
    return lambda *lists: oracle(*map(doubles, lists))


# z = s - b of six tokens, b = (0, 1/2, -1/4); K = 1: cutoffs are the second highest.
#   s  (1, 1/4, 1/8)   z (1, -1/4, 3/8)    a 3/8    d (5/8, -1/8, -1/4)
#      (1/2, 3/4, 0)     (1/2, 1/4, 1/4)   a 1/4      (1/4, 1/2, -1/4)
#      (3/4, 1, 1/4)     (3/4, 1/2, 1/2)   a 1/2      (1/4, 1/2, -1/4)
#      (0, 1/2, 1)       (0, 0, 5/4)       a 0        (0, 1/2, 1)
SCORES = np.array([[1.0, 0.25, 0.125], [0.5, 0.75, 0.0], [0.75, 1.0, 0.25], [0.0, 0.5, 1.0]])
BIAS, PLAIN, INF, NAN = [0.0, 0.5, -0.25], [0.0, 0.0, 0.0], math.inf, math.nan
ALL = np.ones(4, dtype=np.bool_)

test_by_hand = by_hand(
    *rows(first_range, second.legal_range,
        # d_0: 5/8 1/4 1/4; d_1: 1/2 1/2 -1/8; d_2: -1/4 three times.
        ("three tokens, one each: between the second and the first of d", ([SCORES[:3]], BIAS, 1),
         ([0.25, 0.5, -0.25], [0.625, 0.5, -0.25])),
        # d_0: 5/8 1/4 1/4 0; d_1: 1/2 1/2 1/2 -1/8; d_2: 1 -1/4 -1/4 -1/4.
        ("four tokens, 4/3 each: one or two are legal, so between the third and the first", ([SCORES], BIAS, 1),
         ([0.25, 0.5, -0.25], [0.625, 0.5, 1.0])),
        # d_0: 5/8 1/4; d_1: 1/2 -1/8; d_2: -1/4 -1/4.
        ("two tokens, 2/3 each: none or one is legal, so anything above the second", ([SCORES[:2]], BIAS, 1),
         ([0.25, -0.125, -0.25], [INF] * 3)),
        ("one token: anything", ([SCORES[:1]], BIAS, 1), ([-INF] * 3, [INF] * 3)),
        # low: 0 + 3/16; 1/8 + 3/8; -1/16 - 3/16. high: 15/32; the others the same.
        ("a memory of 1/4 keeps a quarter of the old bias", ([SCORES[:3]], BIAS, 1), {"memory": 0.25},
         ([0.1875, 0.5, -0.25], [0.46875, 0.5, -0.25])),
        ("without a token the bias stays", ([], BIAS, 1), {"memory": 0.5}, (BIAS, BIAS)),
        ("with nothing but padding the bias stays", ([SCORES], BIAS, 1, [ALL]), {"memory": 0.5}, (BIAS, BIAS)),
        ("with K = E the bias stays", ([SCORES], BIAS, 3), {"memory": 0.5}, (BIAS, BIAS)),
        *(
            (f"bounds of {name}", question, REFUSED)
            for name, question in [
                ("K = 0", ([np.zeros((2, 3))], BIAS, 0)), ("K > E", ([np.zeros((2, 3))], BIAS, 4)),
                *((f"memory {r}", ([np.zeros((2, 3))], BIAS, 1, None, r)) for r in (1.0, -0.1, NAN)),
                ("another E", ([np.zeros((2, 4))], BIAS, 1)),
                ("another E in one part", ([np.zeros((2, 3)), np.zeros((1, 2))], BIAS, 1)),
                *((f"score {bad}", ([np.array([[0.0, bad, 0.0]])], BIAS, 1)) for bad in (NAN, -INF)),
                ("more masks than parts", ([np.zeros((2, 3))], BIAS, 1, [None, None])),
                ("a mask of fewer tokens", ([np.zeros((2, 3))], BIAS, 1, [np.array([True])])),
                ("a mask of numbers", ([np.zeros((2, 3))], BIAS, 1, [np.array([0, 1])])),
                # K = E, or no token, would hand the bias on as it is.
                *(
                    (f"{T} tokens, K = {K}, bias {bad}", ([np.zeros((T, 3))], [0.0, bad, 0.0], K))
                    for T, K in [(2, 3), (0, 1)] for bad in (INF, NAN)
                ),
            ]
        ),
    ),
    *rows(
        lambda scores, bias, slots: first.cutoffs(doubles(scores)[None, :], doubles(bias), top_k=slots)[0].item(),
        second.cutoff,
        ("K = 1: the second highest", ([1.0, 0.25, 0.125], BIAS, 1), 0.375),
        ("K = 2: the lowest", ([1.0, 0.25, 0.125], BIAS, 2), -0.25),
        ("no slots have no cutoff", ([0.0, 1.0, 2.0], PLAIN, 0), REFUSED),
        ("no best expert is left out", ([0.0, 1.0, 2.0], PLAIN, 3), REFUSED),
        ("biases of fewer experts", ([0.0, 1.0, 2.0], [0.0, 0.0], 1), REFUSED),
        ("a score of NaN", ([0.0, 1.0, NAN], PLAIN, 1), REFUSED),
        ("a score of -inf", ([0.0, 1.0, -INF], PLAIN, 1), REFUSED),
        ("a bias of infinity", ([0.0, 1.0, 2.0], [0.0, INF, 0.0], 1), REFUSED),
    ),
    *rows(in_doubles(first.outside), second.missed,
        ("a gap of 2 is legal", ([5.0, 7.0], [0.0, 2.0], [1.0, 3.0]), 0.0),
        ("a gap of 3 at most", ([5.0, 8.0], [0.0, 2.0], [1.0, 3.0]), 0.0),
        ("a gap of 3.5 misses by half the rest", ([5.0, 8.5], [0.0, 2.0], [1.0, 3.0]), 0.25),
        ("a gap of 1/2 of at least 1", ([5.0, 5.5], [0.0, 2.0], [1.0, 3.0]), 0.25),
        ("open ends", ([9.0, -9.0], [-INF, 2.0], [INF, 3.0]), 0.0),
        ("a bias of NaN", ([0.0, NAN], [0.0, 0.0], [1.0, 1.0]), REFUSED),
        ("a bias of infinity under an open end", ([0.0, INF], [0.0, 0.0], [1.0, INF]), REFUSED),
        ("bounds of more experts", ([0.0], [0.0, 0.0], [1.0, 1.0]), REFUSED),
        ("bounds the wrong way round", ([0.0, 0.0], [0.0, 2.0], [1.0, 1.0]), REFUSED),
    ),
)  # fmt: skip
