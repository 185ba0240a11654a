"""The balancing bias, worked out twice: reference.balance_bias.updates with tensors, the longhand with fractions."""

from __future__ import annotations

import math
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.reference.balance_bias import updates as first
from self_tests.chapters.balance_bias import second
from self_tests.chapters.balance_bias.second import Forward, Update
from self_tests.oracles.agreement import assert_close
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
BIASES = [-1.7, -0.3, 0.0, 0.1, 0.29, 2.3]
RATES = [0.0, 0.001, 0.25, 3.0]


def ints(numbers: list[int]) -> Tensor:
    """Loads as the first oracle takes them."""
    return torch.tensor(numbers, dtype=torch.int64)


def doubles(numbers: list[float]) -> Tensor:
    """Biases as the first oracle takes them."""
    return torch.tensor(numbers, dtype=torch.float64)


class Case(NamedTuple):
    """A bias, the loads since its last update, and the rate."""

    bias: list[float]
    loads: list[int]
    rate: float


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Loads around their mean: on it, a choice beside it, and so large that float64 cannot tell them apart."""
    E = draw(st.integers(1, 6))
    base = draw(st.sampled_from([0, 1, 4, 2**56]))
    offsets = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=E, max_size=E))
    bias = draw(st.lists(st.sampled_from(BIASES), min_size=E, max_size=E))
    return Case(bias, [base + offset for offset in offsets], draw(st.sampled_from(RATES)))


class TestUpdatePair:
    @settings(pairs_agree, max_examples=150)
    @given(cases())
    def test_updates_agree(self, case: Case) -> None:
        """Both move every bias by the same signed rate, bit for bit; with its mean removed, up to rounding."""
        bias_E, loads_E = doubles(case.bias), ints(case.loads)
        moved_E = first.update(bias_E, loads_E, rate=case.rate)
        assert torch.float64 == moved_E.dtype
        assert second.moved(case.bias, case.loads, case.rate) == moved_E.tolist()
        centred_E = first.update(bias_E, loads_E, rate=case.rate, centred=True)
        assert_close(np.array(second.moved(case.bias, case.loads, case.rate, centred=True)), centred_E, addend=3.0)
        assert (case.bias, case.loads) == (bias_E.tolist(), loads_E.tolist())

    @pairs_agree
    @given(cases())
    def test_the_common_constant_is_taken_out_alike(self, case: Case) -> None:
        """Both subtract the mean, after which a centred update and a plain one are the same."""
        both = [
            first.without_constant(first.update(doubles(case.bias), ints(case.loads), rate=case.rate, centred=centred))
            for centred in (False, True)
        ]
        expected = np.array(second.less_their_mean(second.moved(case.bias, case.loads, case.rate)))
        for without_E in both:
            assert_close(expected, without_E, addend=5.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_narrow_bias_is_widened_first(self, dtype: torch.dtype) -> None:
        """A bias of fewer bits is taken as exact numbers; the rate is added in float64."""
        bias_E = torch.tensor([0.1, -0.7, 0.3]).to(dtype)
        expected = second.moved(bias_E.double().tolist(), [1, 5, 3], 0.001)
        assert expected == first.update(bias_E, ints([1, 5, 3]), rate=0.001).tolist()
        without = second.less_their_mean(bias_E.double().tolist())
        assert_close(np.array(without), first.without_constant(bias_E))
        trained_E, _ = first.trained(bias_E, [first.Forward("training", ints([1, 5, 3])), first.Update()], rate=0.001)
        assert expected == trained_E.tolist()


class TestRouterLoadsPair:
    @pairs_agree
    @given(st.integers(1, 5), st.randoms(use_true_random=False))
    def test_loads_of_a_router_agree(self, ranks: int, random: Random) -> None:
        """Both add over the ranks of a part, in any order and apart, whose routers may differ in size."""
        order = random.sample(range(ranks), ranks)
        cuts = sorted(random.sample(range(1, ranks), random.randint(0, ranks - 1)))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, ranks], strict=True)]
        loads: list[list[int]] = [[] for _ in range(ranks)]
        for experts, part in enumerate(parts, start=1):
            for rank in part:
                loads[rank] = [random.choice([0, 1, 5, 2**60]) for _ in range(experts)]
        summed = first.router_loads([ints(own) for own in loads], parts)
        assert [torch.int64] * ranks == [own.dtype for own in summed]
        assert second.summed_loads(loads, parts) == [own.tolist() for own in summed]


KINDS = ("training", "recomputed", "evaluation", "no_grad", "forced")


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[Forward | Update]]:
    """Forwards of all kinds and updates in any order, several updates in a row among them."""
    E = draw(st.integers(1, 4))
    forwards = st.builds(
        Forward, st.sampled_from(("training", *KINDS)), st.lists(st.integers(0, 3), min_size=E, max_size=E)
    )
    return E, draw(st.lists(st.one_of(forwards, st.just(Update())), max_size=9))


def told(events: list[Forward | Update]) -> list[first.Forward | first.Update]:
    """The history in the first oracle's words."""
    return [
        first.Update() if isinstance(event, Update) else first.Forward(event.kind, ints(event.loads))  # type: ignore[arg-type]
        for event in events
    ]


class TestTrainingPair:
    @settings(pairs_agree, max_examples=150)
    @given(histories(), st.sampled_from(RATES), st.booleans())
    def test_histories_agree(self, history: tuple[int, list[Forward | Update]], rate: float, centred: bool) -> None:
        """Bias and counters agree after any history; without its constant, bias by bias, bit for bit if plain."""
        E, events = history
        bias = BIASES[:E]
        bias_E, counters_E = first.trained(doubles(bias), told(events), rate=rate, centred=centred)
        expected, counters = second.after(bias, events, rate, centred=centred)
        assert torch.int64 == counters_E.dtype
        assert counters == counters_E.tolist()
        assert_close(np.array(expected), bias_E, addend=10.0)
        if not centred:
            assert expected == bias_E.tolist()


class TestGrowth:
    @pairs_agree
    @given(st.sampled_from([0.0, 0.001, 0.25]), st.integers(0, 1000))
    def test_growth_agrees(self, rate: float, updates: int) -> None:
        """Both say the same gap and the same allowance."""
        expected, allowed = second.grown(rate, updates)
        assert first.growth(rate, updates) == pytest.approx((expected, allowed), rel=1e-12)

    def test_a_thousand_steps_in_float32_stay_within_it(self) -> None:
        """A float32 bias gains 2 as allowed, which is 2000 half spacings of 2; a bfloat16 one stands still."""
        gap, allowed = first.growth(0.001, 1000)
        assert (2.0, 2000 * 2.0**-23) == pytest.approx((gap, allowed), rel=1e-12)
        grown = {}
        for dtype in (torch.float32, torch.bfloat16):
            bias_E = torch.zeros(2, dtype=dtype)
            for _ in range(1000):
                bias_E += torch.tensor([0.001, -0.001], dtype=dtype)
            grown[dtype] = float(bias_E[0].double() - bias_E[1].double())
        assert abs(grown[torch.float32] - gap) <= allowed
        assert abs(grown[torch.bfloat16] - gap) > 1000 * allowed


def first_update(bias: list[float], loads: Any, rate: float) -> Tensor:
    """The first oracle's bias after one update."""
    return first.update(doubles(bias), loads if isinstance(loads, Tensor) else ints(loads), rate=rate)


NOUGHT = [0.0, 0.0]

test_by_hand = by_hand(
    *rows(first_update, lambda bias, loads, rate: second.moved(bias, list(loads), rate),
        # Wang et al., Algorithm 1, and DeepSeek-V3, section 2.1.2: mean 2.5, signs (-, -, +, +), then back.
        ("DeepSeek-V3", ([0.0] * 4, [5, 3, 2, 0], 0.125), [-0.125, -0.125, 0.125, 0.125]),
        ("and a step later", ([-0.125, -0.125, 0.125, 0.125], [2, 2, 3, 3], 0.125), [0.0] * 4),
        ("one choice beside the mean", ([0.0] * 3, [999999, 1000000, 1000001], 0.5), [0.5, 0.0, -0.5]),
        ("moves as far as a million", ([0.0] * 3, [0, 999999, 2000001], 0.5), [0.5, 0.5, -0.5]),
        ("on the mean nothing moves", ([0.0] * 3, [2**62 // 3] * 3, 0.5), [0.0] * 3),
        *((f"a rate of {rate} is no size", (NOUGHT, [1, 2], rate), REFUSED) for rate in (-0.001, math.inf, math.nan)),
        ("loads that are no counts", (NOUGHT, [3, -1], 0.1), REFUSED),
        ("fewer loads than experts", (NOUGHT, [1], 0.1), REFUSED),
        ("more loads than experts", ([0.0], [1, 2], 0.1), REFUSED),
        ("no experts", ([], [], 0.1), REFUSED),
    ),
    *rows(lambda loads, routers: first.router_loads([ints(own) for own in loads], routers), second.summed_loads,
        *(
            (f"{loads} of routers {routers}", (loads, routers), REFUSED)
            for loads, routers in [
                ([[1, 2], [3, 4]], [[0]]), ([[1, 2], [3, 4]], [[0, 1], [1]]), ([[1, 2], [3, 4]], [[0, 1, 1]]),
                ([[1, 2], [3, 4]], [[0, 1, 2]]), ([[1, 2], [3, 4]], [[0, 1], [-1]]), ([[1, 2], [3]], [[0, 1]]),
                ([[1, 2], [3, -4]], [[0, 1]]), ([[1, 2], [3, -4]], [[0], [1]]),
            ]
        ),
    ),
    *rows(
        lambda *events: first.trained(doubles(NOUGHT), told(list(events)), rate=0.1),
        lambda *events: second.after(NOUGHT, list(events), 0.1),
        ("loads of training count until an update", (Forward("training", [3, 1]), Forward("forced", [0, 9]), Update(),
         Update(), Forward("training", [0, 1])), ([-0.1, 0.1], [0, 1])),
        ("a forward of another kind", (Forward("test", [1, 2]),), REFUSED),
        ("loads of fewer experts in a forward that would not count", (Forward("evaluation", [1]),), REFUSED),
        ("loads below 0 in a forward that would not count", (Forward("forced", [1, -1]),), REFUSED),
    ),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_loads_are_integers(dtype: torch.dtype) -> None:
    """Loads in a floating type, where counts may have been rounded, and in narrow integers are refused."""
    loads_E = torch.tensor([1, 2], dtype=dtype)
    with pytest.raises(ValueError, match=r"\w"):
        first.update(doubles(NOUGHT), loads_E, rate=0.1)
    with pytest.raises(ValueError, match=r"\w"):
        first.router_loads([loads_E], [[0]])
