"""Experts with other activations and with biases, worked out twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference import experts as first
from self_tests.chapters.experts import second
from self_tests.oracles.agreement import assert_close, floats

NAMES = ("gate", "up", "down", "bias_gate", "bias_up", "bias")
FUNCTIONS = [
    first.Function("gelu"),
    first.Function("gelu_tanh"),
    first.Function("relu", offset=0.5),
    first.Function("silu", limit=0.7, slope=1.702, offset=1.0),
    *(first.Function(name, gated=False) for name in ("silu", "gelu", "relu", "squared_relu")),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
class TestFunctionPair:
    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1e-3, 1.0, 8.0]), st.integers(0, 10**6))
    def test_answers_and_gradients_agree(
        self, function: first.Function, D: int, F: int, size: float, seed: int
    ) -> None:
        """Autograd gives a row and every parameter what the chain rule gives."""
        random = np.random.default_rng(seed)
        matrices = [random.normal(size=shape) for shape in ((F, D), (F, D), (D, F))]
        biases = [random.normal(size=shape) for shape in ((F,), (F,), (D,))]
        expert = second.Biased(*matrices, *biases)
        if not function.gated:
            expert = expert._replace(gate_FD=None, b_gate_F=None)
        x_D, dy_D = size * random.normal(size=D), random.normal(size=D)
        y_D, dx_D, d_expert = second.function_row(
            expert, x_D, dy_D, function.activation, function.limit, function.slope, function.offset
        )
        leaves = {
            (name, 3): floats(value, leaf=True) for name, value in zip(NAMES, expert, strict=True) if value is not None
        }
        x_RD = floats(x_D[None], leaf=True)
        answer_RD = first.function_experts(function)(leaves)(x_RD, 3)
        answer_RD.backward(floats(dy_D[None]))
        assert_close(y_D[None], answer_RD)
        assert x_RD.grad is not None
        assert_close(dx_D[None], x_RD.grad)
        for name, expected in zip(NAMES, d_expert, strict=True):
            if expected is not None:
                grad = leaves[name, 3].grad
                assert grad is not None
                assert_close(expected, grad)


class TestPlainPair:
    def test_without_options_it_is_swiglu(self) -> None:
        """Experts of no other function and without biases give what `swiglu_experts` gives."""
        draw = torch.Generator().manual_seed(1)
        shapes = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
        parameters = {(name, 0): torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        x_RD = torch.randn(3, 4, generator=draw)
        expected, found = (
            build(parameters)(x_RD, 0) for build in (first.swiglu_experts, first.function_experts(first.Function()))
        )
        assert torch.equal(expected, found)
