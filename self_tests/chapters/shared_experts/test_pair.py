"""Shared experts, worked out twice: the first with matrices, the longhand token by token."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.shared_experts import shared as first
from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.shared_experts import second
from self_tests.oracles.agreement import assert_close, check_refused, floats

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

D = 5
# Addends that cancel are as large as this: sums of a few products of normal numbers.
ADDEND = 10.0


class Case(NamedTuple):
    """Tokens, shared experts, and the gate if there is one."""

    x_TD: Floats
    shared: list[second.Shared]
    v_D: Floats | None


def shared_of(expert: second.Shared, *, leaf: bool = False) -> first.SharedExpert:
    """One shared expert as the first oracle takes it."""
    bias_D = None if expert.bias_D is None else floats(expert.bias_D, leaf=leaf)
    return first.SharedExpert(*(floats(matrix, leaf=leaf) for matrix in expert.matrices), bias_D)  # type: ignore[call-arg]


def gate_of(case: Case) -> Tensor | None:
    """The gate as the first oracle takes it."""
    return None if case.v_D is None else floats(case.v_D)


def drawn_shared(random: np.random.Generator, units: int, biased: bool) -> second.Shared:
    """A shared expert of this width."""
    matrices = SwiGLU(*(random.normal(size=size) for size in [(units, D), (units, D), (D, units)]))
    return second.Shared(matrices, random.normal(size=D) if biased else None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """No, one or several tokens and shared experts of any width, biased or not, gated or not."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    x_TD = random.normal(size=(draw(st.integers(0, 3)), D))
    shared = [
        drawn_shared(random, draw(st.sampled_from([1, 2, 4, 0])), draw(st.booleans()))
        for _ in range(draw(st.integers(0, 3)))
    ]
    v_D = draw(st.sampled_from([None, 0.0, 1.0, 30.0]))
    return Case(x_TD, shared, None if v_D is None else v_D * random.normal(size=D))


class TestPart:
    @pairs_agree
    @given(cases())
    def test_parts_agree(self, case: Case) -> None:
        """Every token gets the whole shared part once, behind the gate if there is one."""
        shared, x_TD = [shared_of(each) for each in case.shared], floats(case.x_TD)
        part = np.array([second.added(x, case.shared, case.v_D) for x in case.x_TD]).reshape(-1, D)
        assert_close(part, first.shared_part(x_TD, shared, gate_of(case)), addend=ADDEND)
        factors = np.array([second.factor(x, case.v_D) for x in case.x_TD])
        assert_close(factors, first.gate_factors(x_TD, gate_of(case)))
        for one, other in zip(case.shared, shared, strict=True):
            answers = np.array([second.answer(one, x) for x in case.x_TD]).reshape(-1, D)
            assert_close(answers, first.shared_expert(x_TD, other), addend=ADDEND)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_parameters_are_widened_first(self, dtype: torch.dtype) -> None:
        """Rows, gate, matrices and bias of fewer bits are taken as exact numbers and computed in float64."""
        random = torch.Generator().manual_seed(5)
        x, v, gate, up, down, bias = (
            torch.randn(size, generator=random).to(dtype) for size in [(3, D), (D,), (3, D), (3, D), (D, 3), (D,)]
        )
        made = first.shared_part(x, [first.SharedExpert(gate, up, down, bias)], v)
        wide = [value.double().numpy() for value in (gate, up, down, bias)]
        expert = second.Shared(SwiGLU(*wide[:3]), wide[3])
        expected = [second.added(row, [expert], v.double().numpy()) for row in x.double().numpy()]
        assert_close(np.array(expected), made, addend=ADDEND)

    def test_bad_gates_are_refused(self) -> None:
        """A gate of another size or per expert."""
        x_TD = np.ones((2, D))
        check_refused(
            lambda: first.gate_factors(floats(x_TD), torch.ones(D + 1)), lambda: second.factor(x_TD[0], np.ones(D + 1))
        )
        with pytest.raises(ValueError, match="gate"):
            first.gate_factors(floats(x_TD), torch.ones(1, D))


class TestByHand:
    def test_a_gated_constant(self) -> None:
        """An expert that answers its bias (5, 7), behind a gate of log 3 at x_0 = 1: 3/4 of it."""
        # <v, x> = log 3, so a = sigmoid(log 3) = 3 / (3 + 1) = 3/4. The matrices answer 0 (up = 0): y = (15/4, 21/4).
        v, x = [math.log(3), 0.0], [1.0, 2.0]
        gate, up, down, bias = (floats(np.array(value)) for value in ([[1.0, 1]], [[0.0, 0]], [[0.0], [0]], [5.0, 7]))
        made = first.shared_part(floats(np.array([x])), [first.SharedExpert(gate, up, down, bias)], floats(np.array(v)))
        expert = second.Shared(SwiGLU(gate.numpy(), up.numpy(), down.numpy()), bias.numpy())
        assert [3.75, 5.25] == pytest.approx(made[0].tolist(), rel=1e-14)
        assert [3.75, 5.25] == pytest.approx(second.added(np.array(x), [expert], np.array(v)).tolist(), rel=1e-14)
