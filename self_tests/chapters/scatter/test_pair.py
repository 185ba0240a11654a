"""Scatter-add, worked out twice: reference.scatter.addition with index_add and autograd, the longhand row by row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference import experts as first_experts
from moe_conformance.reference.scatter import addition as first
from self_tests.chapters.exchange.second.layer import Tokens
from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.scatter import second
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Case(NamedTuple):
    """What is there, which row each source row goes to, the source rows, and the upstream gradient."""

    out_ND: Floats
    index_J: Ints
    src_JD: Floats
    g_ND: Floats


def make_case(N: int, J: int, D: int, seed: int) -> Case:
    """Random rows; with more source rows than output rows some index repeats."""
    random = np.random.default_rng(seed)
    index_J = random.integers(0, N, size=J) if N else np.zeros(0, dtype=np.int64)
    rows = (random.normal(size=size) for size in [(N, D), (len(index_J), D), (N, D)])
    out_ND, src_JD, g_ND = rows
    return Case(out_ND, index_J, src_JD, g_ND)


cases = st.builds(make_case, st.integers(0, 4), st.integers(0, 7), st.integers(0, 3), st.integers(0, 10**6))


def first_values(case: Case) -> Tensor:
    """The first oracle's sums."""
    return first.scatter_add(floats(case.out_ND), torch.from_numpy(case.index_J), floats(case.src_JD))


class TestScatterPair:
    @pairs_agree
    @given(cases)
    def test_values_agree(self, case: Case) -> None:
        """Both add every source row to its output row; a row that no index names keeps its bits."""
        y_ND = first_values(case)
        assert_close(second.scatter_add(*case[:3]), y_ND)
        for row in set(range(len(case.out_ND))) - set(case.index_J.tolist()):
            assert case.out_ND[row].tolist() == y_ND[row].tolist()

    @pairs_agree
    @given(cases)
    def test_gradients_agree(self, case: Case) -> None:
        """Autograd gives out and source rows what the formula gives, bit for bit."""
        out_ND, src_JD = floats(case.out_ND, leaf=True), floats(case.src_JD, leaf=True)
        first.scatter_add(out_ND, torch.from_numpy(case.index_J), src_JD).backward(floats(case.g_ND))
        d_out_ND, d_src_JD = second.scatter_add_backward(case.index_J, case.g_ND)
        assert out_ND.grad is not None
        assert src_JD.grad is not None
        assert (d_out_ND.tolist(), d_src_JD.tolist()) == (out_ND.grad.tolist(), src_JD.grad.tolist())

    @pairs_agree
    @given(cases, st.sampled_from([2.0**-24, 2.0**-11, 2.0**-8, 0.1]))
    def test_bounds_agree(self, case: Case, unit_roundoff: float) -> None:
        """Both allow the same error, none where nothing is added."""
        expected = second.scatter_add_bound(*case[:3], unit_roundoff)
        arrays = (floats(case.out_ND), torch.from_numpy(case.index_J), floats(case.src_JD))
        actual = first.scatter_add_bound(*arrays, unit_roundoff)
        assert_close(expected, actual)
        assert (expected == 0).tolist() == (actual == 0).tolist()


class TestByHand:
    def test_repeated_and_unnamed_rows(self) -> None:
        """Rows 0 and 2 of three: 1 + 10 + 30, 3 + 20; row 1 keeps what it has, a NaN too."""
        out, index, src = [[1.0], [np.nan], [3.0]], [0, 2, 0], [[10.0], [20.0], [30.0]]
        y = first.scatter_add(torch.tensor(out), torch.tensor(index), torch.tensor(src)).flatten().tolist()
        assert [41.0, 23.0] == [y[0], y[2]]
        assert np.isnan(y[1])
        # Two addends in row 0: 3 u (1 + 10 + 30) / (1 - 3 u), u = 1 / 8: 3 * 41 / 5. One in row 2: 2 * 23 / 6.
        bound = first.scatter_add_bound(torch.ones(3, 1) * 1.0, torch.tensor(index), torch.tensor(src), 0.125)
        assert [3 * 41 / 5, 0.0, 2 * 21 / 6] == pytest.approx(bound.flatten().tolist(), rel=1e-15)

    def test_what_is_not_finite_stays_in_its_row(self) -> None:
        """An infinite source row reaches the row that it is added to, and no other."""
        y = first.scatter_add(torch.zeros(3, 1), torch.tensor([1, 0]), torch.tensor([[np.inf], [2.0]]))
        assert [2.0, np.inf, 0.0] == y.flatten().tolist()
        bound = first.scatter_add_bound(torch.zeros(3, 1), torch.tensor([1, 0]), torch.tensor([[np.inf], [2.0]]), 0.125)
        assert [2 * 2 / 6, np.inf, 0.0] == pytest.approx(bound.flatten().tolist())


class TestLaws:
    @pytest.mark.parametrize(
        ("dtype", "unit_roundoff"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
    )
    def test_sums_in_fewer_bits_keep_within_the_bound(self, dtype: torch.dtype, unit_roundoff: float) -> None:
        """PyTorch's own addition, rounding every time, is as near as the spec asks."""
        case = make_case(3, 90, 5, 8)
        out, index, src = floats(case.out_ND).to(dtype), torch.from_numpy(case.index_J), floats(case.src_JD).to(dtype)
        error = (out.clone().index_add_(0, index, src).double() - first.scatter_add(out, index, src)).abs()
        assert bool((error <= first.scatter_add_bound(out, index, src, unit_roundoff)).all())
        assert bool((error > 0).any())


def make_layer(T: int, seed: int) -> tuple[Tokens, list[SwiGLU], Floats]:
    """Tokens with empty slots, three experts, and an upstream gradient; D = 4, F = 2, K = 2."""
    random = np.random.default_rng(seed)
    tokens = Tokens(random.normal(size=(T, 4)), random.integers(-1, 3, size=(T, 2)), random.normal(size=(T, 2)))
    held = [SwiGLU(*(random.normal(size=size) for size in [(2, 4), (2, 4), (4, 2)])) for _ in range(3)]
    return tokens, held, random.normal(size=(T, 4))


def swiglu_of(held: list[SwiGLU]) -> Any:
    """The first oracle's experts with these matrices."""
    names = ("gate", "up", "down")
    return first_experts.swiglu_experts(
        {
            (name, e): floats(matrix)
            for e, matrices in enumerate(held)
            for name, matrix in zip(names, matrices, strict=True)
        }
    )


BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(-1, 4),
    "slice": lambda x: x[:],
    "detached": lambda x: x.detach(),
    "expanded": lambda x: x[:1].expand(len(x), 4),
    "clone": lambda x: x.clone(),
}


class TestRoutedPair:
    @pytest.mark.parametrize("made", BASES.values(), ids=BASES.keys())
    @pytest.mark.parametrize("T", [0, 1, 3])
    def test_whatever_memory_the_base_shares(self, T: int, made: Callable[[Tensor], Tensor]) -> None:
        """The sum is the longhand's, x keeps its bytes, and gradients reach x on every way but a detached one."""
        tokens, held, g_TD = make_layer(T, T)
        x_TD, weights_TK = floats(tokens.x_TD, leaf=True), floats(tokens.weights_TK, leaf=True)
        base_TD = made(x_TD)
        was = base_TD.detach().numpy().copy()
        y_TD = first.add_routed(base_TD, x_TD, torch.from_numpy(tokens.ids_TK), weights_TK, swiglu_of(held))
        assert_close(second.add_routed(was, tokens, held), y_TD)
        assert tokens.x_TD.tolist() == x_TD.tolist()
        if T == 0:
            return  # no element has a gradient
        dx_TD, dweights_TK = torch.autograd.grad(y_TD, (x_TD, weights_TK), floats(g_TD), materialize_grads=True)
        d_base_TD, layer = second.add_routed_backward(tokens, held, g_TD)
        expected = layer.dx[0].copy()
        for t in range(T):
            if made is not BASES["detached"]:
                expected[0 if made is BASES["expanded"] else t] += d_base_TD[t]
        assert_close(expected, dx_TD)
        assert_close(layer.dweights[0], dweights_TK)

    def test_no_routed_slot_gives_the_base(self) -> None:
        """Bit for bit, whatever the weights hold."""
        tokens, held, _ = make_layer(3, 6)
        base = floats(tokens.x_TD) * 3
        ids, weights = torch.full((3, 2), -1), torch.full((3, 2), torch.nan, dtype=torch.float64)
        assert base.tolist() == first.add_routed(base, floats(tokens.x_TD), ids, weights, swiglu_of(held)).tolist()


MODES: dict[str, Callable[[], Any]] = {
    "enable_grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class TestGradModes:
    def test_nested_modes_do_what_pytorch_does(self) -> None:
        """Every nesting of up to three modes: both say whether PyTorch records a gradient of a sum."""
        for depth in range(4):
            for modes in product(MODES, repeat=depth):
                for requires in ((False, False), (False, True), (True, False)):
                    out, src = (torch.ones(2, requires_grad=one) for one in requires)
                    with ExitStack() as stack:
                        for mode in modes:
                            stack.enter_context(MODES[mode]())
                        expected = (out + src).requires_grad
                    assert expected == first.records_gradient(modes, requires), modes
                    assert expected == second.records_gradient(modes, requires), modes

    def test_no_inputs_record_nothing_and_unknown_modes_are_refused(self) -> None:
        """By both."""
        for oracle in (first, second):
            assert not oracle.records_gradient([], [])
            with pytest.raises(ValueError, match="set_grad"):
                oracle.records_gradient(["no_grad", "set_grad"], [True])


NO_SUM = [
    (f"{out} + {src} at {index.tolist()} of {index.dtype}", (np.zeros(out), index, np.zeros(src)))
    for out, index, src in [
        ((3, 2), np.array([0, 3]), (2, 2)),
        ((3, 2), np.array([-1, 0]), (2, 2)),
        ((0, 2), np.array([0]), (1, 2)),
        ((3, 2), np.array([0, 1]), (3, 2)),
        ((3, 2), np.array([0, 1]), (1, 2)),
        ((3, 2), np.array([0, 1]), (2, 1)),
        ((3, 1), np.array([0, 1]), (2, 3)),
        ((3, 2), np.array([0, 1], dtype=np.int32), (2, 2)),
        ((3, 2), np.array([0.0, 1.0]), (2, 2)),
        ((3, 2), np.array([[0], [1]]), (2, 2)),
    ]
]
THREE = np.ones((1, 1)), np.zeros(3, dtype=np.int64), np.ones((3, 1))

test_by_hand = by_hand(
    *rows(first.scatter_add, second.scatter_add, *((name, question, REFUSED) for name, question in NO_SUM)),
    *rows(first.scatter_add_bound, second.scatter_add_bound,
        *((f"bound of {name}", (*question, 0.1), REFUSED) for name, question in NO_SUM),
        # A roundoff is in (0, 1), and with three addends of one row below 1 / 4.
        *((f"a roundoff of {unit}", (*THREE, unit), REFUSED) for unit in (0.0, -0.1, 1.0, 0.25)),
    ),
)  # fmt: skip
