"""The layer, worked out twice: reference.exchange.layer with masks and autograd, the longhand token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference import experts as first_experts
from moe_conformance.reference.exchange import layer as first
from moe_conformance.reference.exchange import overflow as first_overflow
from self_tests.chapters.exchange.second import layer as second
from self_tests.chapters.exchange.second import overflow as second_overflow
from self_tests.chapters.exchange.second.layer import Tokens
from self_tests.chapters.experts.second import SwiGLU
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
BOTH_PLACES = pytest.mark.parametrize("weights_at", ["output", "input"])


class Case(NamedTuple):
    """Tokens and upstream gradients of every rank, and the experts they share."""

    batch: list[Tokens]
    upstream: list[Floats]
    experts: list[SwiGLU]


def make_case(seed: int, tokens: Sequence[int], slots: int, experts: int, D: int = 4, F: int = 3) -> Case:
    """Different data on every rank, different experts, repeated ids, weights of 0, empty slots with NaN."""
    random = np.random.default_rng(seed)
    batch, upstream = [], []
    for T in tokens:
        ids_TK = random.integers(-1, experts, size=(T, slots))
        weights_TK = random.normal(size=(T, slots)) * random.choice([0.0, 1.0, 1.0], size=(T, slots))
        weights_TK[ids_TK < 0] = np.nan
        batch.append(Tokens(random.normal(size=(T, D)), ids_TK, weights_TK))
        upstream.append(random.normal(size=(T, D)))
    held = [SwiGLU(*(random.normal(size=s) for s in [(F, D), (F, D), (D, F)])) for _ in range(experts)]
    return Case(batch, upstream, held)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to four ranks with uneven numbers of tokens, zero among them, any number of slots and experts."""
    tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return make_case(draw(st.integers(0, 10**6)), tokens, draw(st.integers(1, 4)), draw(st.integers(1, 5)))


def parameters_of(experts: Sequence[SwiGLU]) -> dict[tuple[str, int], Tensor]:
    """The experts' matrices under the first oracle's names."""
    names = ("gate", "up", "down")
    return {(n, e): floats(m) for e, ms in enumerate(experts) for n, m in zip(names, ms, strict=True)}


def first_batches(case: Case) -> list[first.Batch]:
    """The case in the first oracle's words."""
    return [
        first.Batch(floats(x), torch.from_numpy(ids), floats(weights), floats(dy))
        for (x, ids, weights), dy in zip(case.batch, case.upstream, strict=True)
    ]


def first_gradients(case: Case, weights_at: first.WeightsAt) -> list[first.Gradients]:
    """What the first oracle says of every rank by itself."""
    return [
        first.gradients(*batch, first_experts.swiglu_experts, parameters_of(case.experts), weights_at=weights_at)
        for batch in first_batches(case)
    ]


def first_totals(case: Case, weights_at: first.WeightsAt) -> Mapping[tuple[str, int], Tensor]:
    """The first oracle's expert gradients of all ranks' tokens together."""
    batch = first.global_batch(first_batches(case))
    parameters = parameters_of(case.experts)
    return first.gradients(*batch, first_experts.swiglu_experts, parameters, weights_at=weights_at).parameters


class TestPair:
    @BOTH_PLACES
    @pairs_agree
    @given(cases())
    def test_outputs_agree(self, weights_at: first.WeightsAt, case: Case) -> None:
        """Both layers answer alike on every rank, whatever stands in the weight of an empty slot."""
        expected = second.forward(case.batch, case.experts, weights_at)
        for y_TD, found in zip(expected, first_gradients(case, weights_at), strict=True):
            assert_close(y_TD, found.y_TD, addend=1.0)

    @BOTH_PLACES
    @pairs_agree
    @given(cases())
    def test_token_gradients_agree(self, weights_at: first.WeightsAt, case: Case) -> None:
        """Both give every token and every weight the same gradient, and an empty slot's weight exactly 0."""
        expected = second.backward(case.batch, case.experts, weights_at, case.upstream)
        for rank, found in enumerate(first_gradients(case, weights_at)):
            assert_close(expected.dx[rank], found.dx_TD, addend=1.0)
            assert_close(expected.dweights[rank], found.dweights_TK, addend=1.0)
            empty_TK = torch.from_numpy(case.batch[rank].ids_TK < 0)
            assert [0.0] * int(empty_TK.sum()) == found.dweights_TK[empty_TK].tolist()

    @BOTH_PLACES
    @pairs_agree
    @given(cases())
    def test_expert_gradients_agree(self, weights_at: first.WeightsAt, case: Case) -> None:
        """Both sum every expert's gradient over all ranks' tokens; an idle expert's is zero, not missing."""
        expected = second.backward(case.batch, case.experts, weights_at, case.upstream).experts
        found = first_totals(case, weights_at)
        names = [(name, e) for e in range(len(case.experts)) for name in ("gate", "up", "down")]
        assert sorted(names) == sorted(found)
        for name, e in names:
            matrix = dict(zip(("gate", "up", "down"), expected[e], strict=True))[name]
            assert_close(matrix, found[name, e], addend=1.0)

    @BOTH_PLACES
    def test_narrow_inputs_are_widened_first(self, weights_at: first.WeightsAt) -> None:
        """Tokens, weights, matrices and upstream of float32 are exact numbers, and every answer is float64."""
        case = make_case(10, [4, 2], slots=3, experts=3)
        matrices = {name: value.float() for name, value in parameters_of(case.experts).items()}
        parts = [(b.x_TD, b.ids_TK, b.weights_TK, b.dy_TD) for b in first_batches(case)]
        narrow = [first.Batch(x.float(), ids, w.float(), dy.float()) for x, ids, w, dy in parts]
        wide = [first.Batch(b.x_TD.double(), b.ids_TK, b.weights_TK.double(), b.dy_TD.double()) for b in narrow]
        build, exact = first_experts.swiglu_experts, {name: value.double() for name, value in matrices.items()}
        for few, many in zip(narrow, wide, strict=True):
            found = first.gradients(*few, build, matrices, weights_at=weights_at)
            expected = first.gradients(*many, build, exact, weights_at=weights_at)
            for part in ("y_TD", "dx_TD", "dweights_TK"):
                assert torch.float64 == getattr(found, part).dtype
                assert getattr(expected, part).tolist() == getattr(found, part).tolist()
            assert {n: v.tolist() for n, v in expected.parameters.items()} == {
                n: v.tolist() for n, v in found.parameters.items()
            }


class TestWorkedExamples:
    def test_a_swiglu_knows_where_its_weight_is_applied(self) -> None:
        """The weight's place decides output and gradients: x = 2, w = 1/2, gate log 3, up 2, down 5."""
        # f(x) = 10 x silu(x log 3), f'(x) = 10 (silu(a) + a silu'(a)) with a = x log 3.
        # Input: z = w x = 1, a = log 3, sigmoid 3/4, silu 3/4 log 3, silu' 3/4 + 3/16 log 3.
        #        y = f(1) = 7.5 log 3, dx = w f'(1), dw = x f'(1).
        # Output: a = log 9, sigmoid 9/10, silu 9/10 log 9, silu' 9/10 + 9/100 log 9.
        #        y = f(2) / 2 = 9 log 9, dx = w f'(2), dw = f(2) = 18 log 9.
        log3, log9 = math.log(3), math.log(9)
        slope_1 = 10 * log3 * (0.75 + 0.75 + 0.1875 * log3)
        slope_2 = 10 * log9 * (0.9 + 0.9 + 0.09 * log9)
        expected: dict[first.WeightsAt, tuple[float, float, float]] = {
            "input": (7.5 * log3, 0.5 * slope_1, 2.0 * slope_1),
            "output": (9.0 * log9, 0.5 * slope_2, 18.0 * log9),
        }
        expert = SwiGLU(np.array([[log3]]), np.array([[2.0]]), np.array([[5.0]]))
        case = Case([Tokens(np.array([[2.0]]), np.array([[0]]), np.array([[0.5]]))], [np.array([[1.0]])], [expert])
        for weights_at, (y, dx, dw) in expected.items():
            found = first_gradients(case, weights_at)[0]
            numbers = (found.y_TD.item(), found.dx_TD.item(), found.dweights_TK.item())
            assert (y, dx, dw) == pytest.approx(numbers, rel=1e-13)
            by_hand = second.backward(case.batch, case.experts, weights_at, case.upstream)
            (y_TD,) = second.forward(case.batch, case.experts, weights_at)
            numbers = (y_TD.item(), by_hand.dx[0].item(), by_hand.dweights[0].item())
            assert (y, dx, dw) == pytest.approx(numbers, rel=1e-13)

    def test_a_zero_weight_is_not_an_empty_slot(self) -> None:
        """At the input a weight of 0 hands the expert a row of zeros, and one with f(0) = 7 answers 7."""
        x, ids = torch.ones(1, 1), torch.tensor([[0, -1]])
        y = first.forward(x, ids, torch.zeros(1, 2), lambda rows, _: rows + 7.0, weights_at="input")
        assert [[7.0]] == y.tolist()

    @BOTH_PLACES
    def test_a_nan_stays_with_its_token(self, weights_at: first.WeightsAt) -> None:
        """A token of NaN spoils its own output and gradient and those of its experts, and nobody else's."""
        case = make_case(9, [3], slots=2, experts=4)
        case.batch[0].ids_TK[:] = [[0, 1], [2, 0], [1, 3]]
        case.batch[0].weights_TK[:] = [[0.5, 0.3], [0.2, 0.9], [0.4, 0.7]]
        case.batch[0].x_TD[1] = np.nan
        found = first_gradients(case, weights_at)[0]
        assert [False, True, False] == found.y_TD.isnan().any(dim=1).tolist()
        assert [False, True, False] == found.dx_TD.isnan().any(dim=1).tolist()
        assert {0, 2} == {e for (_, e), total in found.parameters.items() if total.isnan().any()}


class TestOverflow:
    @BOTH_PLACES
    def test_the_same_outputs_must_be_finite(self, weights_at: first.WeightsAt) -> None:
        """Tokens, weights or matrices on both sides of the largest number of float16: both mark the same elements."""
        marked = []
        for power in range(2, 16):
            case = make_case(power, [5, 0, 3], slots=3, experts=4)
            large = [tokens._replace(x_TD=tokens.x_TD * 2.0 ** (power / 2)) for tokens in case.batch]
            held = [each._replace(down_DF=each.down_DF * 2.0 ** (power / 2)) for each in case.experts]
            peaks = first_overflow.swiglu_peaks(parameters_of(held))
            for tokens in large:
                expected = second_overflow.must_be_finite(tokens, held, weights_at, 65504.0, 11, 9)
                found = first_overflow.must_be_finite(
                    floats(tokens.x_TD),
                    torch.from_numpy(tokens.ids_TK),
                    floats(tokens.weights_TK),
                    peaks,
                    torch.float16,
                    9,
                    weights_at=weights_at,
                )
                assert expected.tolist() == found.tolist()
                marked += expected.flatten().tolist()
        assert 40 < sum(marked) < len(marked) - 40
