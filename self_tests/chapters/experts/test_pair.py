"""Experts, worked out twice: reference.experts with matrices and autograd, the longhand number by number."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference import experts as first
from self_tests.chapters.experts import second
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Case(NamedTuple):
    """An expert, the rows it is handed, and the gradient that comes back to its answers."""

    expert: second.SwiGLU
    x_RD: Floats
    dy_RD: Floats


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any sizes, R = 0 among them; rows so large that silu is in its tails, so small that it is linear."""
    R, D, F = draw(st.integers(0, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    expert = second.SwiGLU(*(random.normal(size=size) for size in [(F, D), (F, D), (D, F)]))
    size = draw(st.sampled_from([1e-6, 0.5, 1.0, 40.0]))
    return Case(expert, size * random.normal(size=(R, D)), random.normal(size=(R, D)))


class TestSwiGLUPair:
    @pairs_agree
    @given(cases())
    def test_answers_agree(self, case: Case) -> None:
        """Both experts answer every row alike; no rows, no answers."""
        answers = first.swiglu(floats(case.x_RD), *map(floats, case.expert))
        assert_close(second.swiglu(case.expert, case.x_RD), answers)

    @pairs_agree
    @given(cases())
    def test_gradients_agree(self, case: Case) -> None:
        """Autograd through the first expert gives rows and matrices what the chain rule gives."""
        x_RD, matrices = floats(case.x_RD, leaf=True), [floats(matrix, leaf=True) for matrix in case.expert]
        first.swiglu(x_RD, *matrices).backward(floats(case.dy_RD))
        dx_RD, d_expert = second.swiglu_backward(case.expert, case.x_RD, case.dy_RD)
        assert x_RD.grad is not None
        assert_close(dx_RD, x_RD.grad)
        for expected, matrix in zip(d_expert, matrices, strict=True):
            assert matrix.grad is not None
            assert_close(expected, matrix.grad)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_rows_and_matrices_are_widened_first(self, dtype: torch.dtype) -> None:
        """Rows and matrices of fewer bits are taken as exact numbers and computed in float64."""
        sizes, random = [(3, 4), (5, 4), (5, 4), (4, 5)], torch.Generator().manual_seed(2)
        narrow = [torch.randn(size, generator=random).to(dtype) for size in sizes]
        x_RD, *matrices = (value.double().numpy() for value in narrow)
        assert_close(second.swiglu(second.SwiGLU(*matrices), x_RD), first.swiglu(*narrow))

    def test_experts_are_told_apart_by_their_names(self) -> None:
        """`swiglu_experts` gives each id its own matrices, each matrix its own part."""
        random = np.random.default_rng(4)
        held = {e: second.SwiGLU(*(random.normal(size=size) for size in [(3, 2), (3, 2), (2, 3)])) for e in (2, 7)}
        expert = first.swiglu_experts(
            {
                (name, e): floats(matrix)
                for e, matrices in held.items()
                for name, matrix in zip(("gate", "up", "down"), matrices, strict=True)
            }
        )
        x_RD = random.normal(size=(3, 2))
        for e, matrices in held.items():
            assert_close(second.swiglu(matrices, x_RD), expert(floats(x_RD), e))

    def test_one_number_by_hand(self) -> None:
        """With F = D = 1, gate log 3, up 2, down 5 a row of 1 gives 7.5 log 3; the gradients by calculus."""
        # a = log 3: sigmoid(a) = 3/4, silu(a) = 3/4 log 3 =: s, silu'(a) = 3/4 + 3/16 log 3 =: s'. u = 2.
        # y = 5 s u = 7.5 log 3. For dy = 1: ddown = s u, dup = 5 s, dgate = 5 u s', dx = 5 (2 s + u s' a).
        log3 = math.log(3)
        s, slope = 0.75 * log3, 0.75 + 0.1875 * log3
        gate, up, down = (torch.tensor([[v]], dtype=torch.float64, requires_grad=True) for v in (log3, 2.0, 5.0))
        x = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
        y = first.swiglu(x, gate, up, down)
        assert 7.5 * log3 == pytest.approx(y.item(), rel=1e-14)
        expected = [5 * (2 * s + 2 * slope * log3), 10 * slope, 5 * s, 2 * s]
        assert expected == pytest.approx([v.item() for v in torch.autograd.grad(y, (x, gate, up, down))], rel=1e-14)
        dx, d_expert = second.swiglu_backward(
            second.SwiGLU(np.array([[log3]]), np.array([[2.0]]), np.array([[5.0]])),
            np.ones((1, 1)),
            np.ones((1, 1)),
        )
        assert expected == pytest.approx([dx.item(), *(matrix.item() for matrix in d_expert)], rel=1e-14)


class TestTaggedPair:
    @pairs_agree
    @given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 3), st.integers(0, 10**6))
    def test_answers_and_gradients_agree(self, experts: int, spare: int, R: int, seed: int) -> None:
        """Both write gain times x into the same columns and nothing else, bit for bit, and derive alike."""
        D, random = experts + spare, np.random.default_rng(seed)
        x_RD, dy_RD, gain = random.normal(size=(R, D)), random.normal(size=(R, D)), float(random.normal())
        for expert in range(experts):
            leaf, gain_leaf = floats(x_RD, leaf=True), floats(np.array(gain), leaf=True)
            answers = first.tagged(leaf, expert, experts=experts, gain=gain_leaf)
            assert second.tagged(expert, experts, gain, x_RD).tolist() == answers.tolist()
            answers.backward(floats(dy_RD))
            dx_RD, d_gain = second.tagged_backward(expert, experts, gain, x_RD, dy_RD)
            assert leaf.grad is not None
            assert gain_leaf.grad is not None
            assert dx_RD.tolist() == leaf.grad.tolist()
            assert d_gain == pytest.approx(gain_leaf.grad.item(), rel=1e-12, abs=1e-12)

    def test_experts_are_told_apart_by_their_gains(self) -> None:
        """`tagged_experts` gives each id its own gain and its own columns."""
        x_RD = np.random.default_rng(7).normal(size=(2, 6))
        gains = {e: floats(np.array(gain)) for e, gain in enumerate([3.0, 5.0, -7.0])}
        expert = first.tagged_experts(3, {("gain", e): gain for e, gain in gains.items()})
        for e, gain in gains.items():
            assert second.tagged(e, 3, gain.item(), x_RD).tolist() == expert(floats(x_RD), e).tolist()

    def test_an_expert_without_columns_is_an_error(self) -> None:
        """Fewer columns than experts would leave an expert silent, so the first oracle refuses."""
        with pytest.raises(ValueError, match="3"):
            first.tagged(torch.ones(1, 3), 0, experts=4)

    def test_narrow_rows_become_float64(self) -> None:
        """Rows of float32 are widened before the gain, so that the answer is exact."""
        y_RD = first.tagged(torch.tensor([[0.1, 3.0]]), 0, experts=2, gain=3.0)
        assert (torch.float64, [[3 * float(np.float32(0.1)), 0.0]]) == (y_RD.dtype, y_RD.tolist())

    @pytest.mark.parametrize("expert", [-1, 2])
    def test_an_expert_beyond_the_others_is_an_error(self, expert: int) -> None:
        """Only experts 0 .. E - 1 have columns."""
        with pytest.raises(ValueError, match=f"expert {expert} of 2"):
            first.tagged(torch.ones(1, 6), expert, experts=2)
