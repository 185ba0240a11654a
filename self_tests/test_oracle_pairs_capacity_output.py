"""What a drop leaves, worked out twice: outputs and gradients; and what both oracles of capacity refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from reference import capacity as first
from reference import capacity_drops as first_drops
from reference import capacity_output as first_output
from reference import experts as first_experts
from reference import layer as first_layer
from reference import routing as first_routing
from self_tests.asked_twice import assert_agree, assert_refused
from self_tests.oracles import capacity as second
from self_tests.oracles import capacity_drops as second_drops
from self_tests.oracles import routing as second_routing
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.experts import SwiGLU

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = ("gate", "up", "down")


class Case(NamedTuple):
    """A routed batch, what was kept of it, upstream gradients, and how weights are normalised after."""

    x_TD: Floats
    ids_TK: NDArray[np.int64]
    weights_TK: Floats
    kept_TK: NDArray[np.bool_]
    dy_TD: Floats
    dw_TK: Floats
    experts: list[SwiGLU]
    renormalise: bool
    scale: float


def make_case(seed: int, T: int, K: int, E: int, renormalise: bool, scale: float, D: int = 4, F: int = 3) -> Case:
    """Distinct experts, weights of 0 among others, NaN in empty slots, tokens of nothing kept or of kept zeros."""
    random = np.random.default_rng(seed)
    ids_TK = np.array([random.permutation(E)[:K] for _ in range(T)], dtype=np.int64).reshape(T, K)
    ids_TK[random.random(ids_TK.shape) < 0.15] = -1
    weights_TK = random.uniform(0.1, 1.0, size=ids_TK.shape) * random.choice([0.0, 1.0, 1.0], size=ids_TK.shape)
    weights_TK[ids_TK < 0] = np.nan
    kept_TK = (ids_TK >= 0) & (random.random(ids_TK.shape) < 0.6)
    x_TD, dy_TD = random.normal(size=(2, T, D))
    held = [SwiGLU(*(random.normal(size=s) for s in [(F, D), (F, D), (D, F)])) for _ in range(E)]
    dw_TK = random.normal(size=ids_TK.shape)
    return Case(x_TD, ids_TK, weights_TK, kept_TK, dy_TD, dw_TK, held, renormalise, scale if renormalise else 1.0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any sizes, no token among them, and either convention for the weights of the kept."""
    E = draw(st.integers(1, 5))
    T, K = draw(st.integers(0, 6)), draw(st.integers(1, E))
    return make_case(draw(st.integers(0, 10**6)), T, K, E, draw(st.booleans()), draw(st.sampled_from([1.0, 2.5, 0.3])))


def options_of(case: Case) -> dict[str, Any]:
    """How the weights of the kept are normalised."""
    return {"renormalise": case.renormalise, "scale": case.scale}


def tensors_of(experts: Sequence[SwiGLU], *, leaf: bool = False) -> dict[tuple[str, int], Tensor]:
    """The experts' matrices under the first oracle's names."""
    return {(n, e): floats(m, leaf=leaf) for e, ms in enumerate(experts) for n, m in zip(NAMES, ms, strict=True)}


def first_outputs(case: Case, x_TD: Tensor, weights_TK: Tensor, matrices: dict[tuple[str, int], Tensor]) -> Tensor:
    """Ask the first oracle for the output of what is kept."""
    ids_TK, kept_TK = torch.from_numpy(case.ids_TK), torch.from_numpy(case.kept_TK)
    experts = first_experts.swiglu_experts(matrices)
    return first_output.output(x_TD, ids_TK, weights_TK, kept_TK, experts, **options_of(case))


class TestAfterDrop:
    @settings(pairs_agree, max_examples=120)
    @given(cases())
    def test_weights_and_gradients_agree(self, case: Case) -> None:
        """Both empty the same slots, weigh the kept alike, and hand an upstream gradient to the same weights."""
        ids_TK, weights_TK = second_drops.after_drop(case.ids_TK, case.weights_TK, case.kept_TK, **options_of(case))
        leaf = floats(case.weights_TK, leaf=True)
        kept_TK = torch.from_numpy(case.kept_TK)
        found = first_output.after_drop(torch.from_numpy(case.ids_TK), leaf, kept_TK, **options_of(case))
        assert (torch.int64, ids_TK.tolist()) == (found.ids_TK.dtype, found.ids_TK.tolist())
        assert_close(weights_TK, found.weights_TK)
        found.weights_TK.backward(floats(case.dw_TK))
        assert leaf.grad is not None
        expected = second_drops.after_drop_backward(case.weights_TK, case.kept_TK, case.dw_TK, **options_of(case))
        addend = case.scale * float(np.abs(case.dw_TK).max(initial=0.0)) * 10  # the smallest weight is a tenth
        assert_close(expected, leaf.grad, addend=addend)
        assert [0.0] * int((~kept_TK).sum()) == leaf.grad[~kept_TK].tolist()

    def test_by_hand(self) -> None:
        """Kept 1/2 and 1/4 of 1/2, 1/4, 1/4 stay so, or become 2/3 and 1/3, times a scale of 3."""
        ids_TK, weights_TK = np.array([[4, 0, 3], [1, 2, 0]]), np.array([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]])
        kept_TK = np.array([[True, False, True], [True, False, False]])
        for options, expected in [
            ({}, [[0.5, 0.0, 0.25], [0.0, 0.0, 0.0]]),
            ({"renormalise": True}, [[2 / 3, 0.0, 1 / 3], [0.0, 0.0, 0.0]]),  # all that token 1 kept weighs 0
            ({"renormalise": True, "scale": 3.0}, [[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        ]:
            made = second_drops.after_drop(ids_TK, weights_TK, kept_TK, **options)
            found = first_output.after_drop(
                torch.from_numpy(ids_TK), floats(weights_TK), torch.from_numpy(kept_TK), **options
            )
            assert [[4, -1, 3], [1, -1, -1]] == made[0].tolist() == found.ids_TK.tolist()
            assert_close(np.array(expected), found.weights_TK)
            assert expected == pytest.approx(made[1])

    @pytest.mark.parametrize("renormalise", [False, True])
    def test_all_kept_changes_nothing(self, renormalise: bool) -> None:
        """Weights that sum to one already are the same in either convention when all are kept."""
        weights_TK, ids_TK = floats(np.array([[0.5, 0.375, 0.125]])), torch.tensor([[2, 0, 1]])
        found = first_output.after_drop(ids_TK, weights_TK, ids_TK >= 0, renormalise=renormalise)
        assert ([[2, 0, 1]], [[0.5, 0.375, 0.125]]) == (found.ids_TK.tolist(), found.weights_TK.tolist())


class TestOutput:
    @pairs_agree
    @given(cases())
    def test_outputs_and_gradients_agree(self, case: Case) -> None:
        """Both give the same output and, for random upstream, the same gradients of tokens, weights and experts."""
        ids_TK, weights_TK = second_drops.after_drop(case.ids_TK, case.weights_TK, case.kept_TK, **options_of(case))
        x_TD, w_TK, matrices = (
            floats(case.x_TD, leaf=True),
            floats(case.weights_TK, leaf=True),
            tensors_of(case.experts),
        )
        for matrix in matrices.values():
            matrix.requires_grad_()
        y_TD = first_outputs(case, x_TD, w_TK, matrices)
        assert_close(second_drops.output(case.x_TD, ids_TK, weights_TK, case.experts), y_TD, addend=1.0)
        y_TD.backward(floats(case.dy_TD))
        expected = second_drops.output_backward(case.x_TD, ids_TK, weights_TK, case.experts, case.dy_TD)
        d_weights_TK = second_drops.after_drop_backward(
            case.weights_TK, case.kept_TK, expected.dweights_TK, **options_of(case)
        )
        assert x_TD.grad is not None
        assert w_TK.grad is not None
        assert_close(expected.dx_TD, x_TD.grad, addend=1.0)
        assert_close(d_weights_TK, w_TK.grad, addend=10 * float(np.abs(expected.dweights_TK).max(initial=0.0)))
        for e, d_expert in enumerate(expected.experts):
            for name, d_matrix in zip(NAMES, d_expert, strict=True):
                found = matrices[name, e].grad  # zeros for an expert of which all was dropped, never absent
                assert_close(d_matrix, torch.zeros(d_matrix.shape).double() if found is None else found, addend=1.0)
        lost = ~case.kept_TK.any(axis=1)
        assert [0.0] * int(lost.sum()) * 4 == y_TD[lost].flatten().tolist() == x_TD.grad[lost].flatten().tolist()

    @pytest.mark.parametrize("renormalise", [False, True])
    def test_autograd_of_the_output_is_its_derivative(self, renormalise: bool) -> None:
        """Gradcheck: numeric differences of the first oracle in tokens, weights and matrices are its gradients."""
        case = make_case(11, 4, 3, 5, renormalise, 2.5)
        weights_TK = np.where(np.isnan(case.weights_TK) | (case.weights_TK == 0), 0.4, case.weights_TK)
        matrices = tensors_of(case.experts, leaf=True)

        def layer(x_TD: Tensor, weights_TK: Tensor, *values: Tensor) -> Tensor:
            return first_outputs(case, x_TD, weights_TK, dict(zip(matrices, values, strict=True)))

        assert 0 < case.kept_TK.sum() < (case.ids_TK >= 0).sum()
        leaves = (floats(case.x_TD, leaf=True), floats(weights_TK, leaf=True), *matrices.values())
        assert torch.autograd.gradcheck(layer, leaves)

    @pytest.mark.parametrize("kept", [[False, False], [True, False]])
    def test_what_was_dropped_is_never_read(self, kept: list[bool]) -> None:
        """NaN in the token, the weight and the upstream of a slot that was dropped reach nothing."""
        x_TD, w_TK = floats(np.array([[2.0], [math.nan]]), leaf=True), floats(np.array([[0.5], [math.nan]]), leaf=True)
        kept_TK = torch.tensor(kept)[:, None]
        y_TD = first_output.output(x_TD, torch.tensor([[0], [0]]), w_TK, kept_TK, lambda rows, e: 3.0 * rows)
        dx_TD, dw_TK = torch.autograd.grad(y_TD, (x_TD, w_TK), torch.tensor([[1.0], [math.nan]]).double())
        expected = [[3.0], [1.5], [6.0]] if kept[0] else [[0.0]] * 3
        assert [[one, [0.0]] for one in expected] == [y_TD.tolist(), dx_TD.tolist(), dw_TK.tolist()]

    def test_room_for_all_is_the_layer_without_capacity(self) -> None:
        """With C = T nothing is dropped, and the output is the plain layer's, bit for bit."""
        case = make_case(12, 6, 2, 3, False, 1.0)
        ids_TK, weights_TK = torch.from_numpy(case.ids_TK), floats(case.weights_TK)
        kept_TK = first_drops.keep(ids_TK, 3, capacity=6, policy="position")
        experts = first_experts.swiglu_experts(tensors_of(case.experts))
        found = first_output.output(floats(case.x_TD), ids_TK, weights_TK, kept_TK, experts)
        assert first_layer.forward(floats(case.x_TD), ids_TK, weights_TK, experts).tolist() == found.tolist()

    @pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid"])
    @pytest.mark.parametrize("after", [False, True])
    def test_logits_of_dropped_experts(self, score: Any, after: bool) -> None:
        """Normalised before the drop, a dropped expert's logit feels the output through the sum; after it, not."""
        # One token, logits 0.3, -0.2, 0.9 for experts 0, 1, 2; it chose 2 and 0, and expert 0 dropped it.
        logits_TE, ids_TK, kept_TK = np.array([[0.3, -0.2, 0.9]]), np.array([[2, 0]]), np.array([[True, False]])
        gate = second_routing.Gate(2, score, normalise=not after)
        leaf, upstream_TK = floats(logits_TE, leaf=True), np.array([[1.7, 0.4]])
        weights_TK = first_routing.weights(leaf, torch.from_numpy(ids_TK), score=score, normalise=not after)
        found = first_output.after_drop(
            torch.from_numpy(ids_TK), weights_TK, torch.from_numpy(kept_TK), renormalise=after
        )
        found.weights_TK.backward(floats(upstream_TK))
        plain_TK = second_routing.route(logits_TE, gate)[1]
        d_weights_TK = second_drops.after_drop_backward(plain_TK, kept_TK, upstream_TK, renormalise=after)
        assert leaf.grad is not None
        assert_close(second_routing.gradient(logits_TE, ids_TK, gate, d_weights_TK), leaf.grad, addend=1.0)
        if after:  # one kept slot weighs 1 whatever its logit
            assert [1.0, 0.0] == found.weights_TK[0].tolist()
            assert [0.0, 0.0, 0.0] == pytest.approx(leaf.grad[0].tolist(), abs=1e-15)
        else:
            assert leaf.grad[0, 0] < 0 < leaf.grad[0, 2]

    def test_by_hand(self) -> None:
        """Two equal logits, one of the two slots dropped: w = 1/2, y = f / 2, and dl = +-f / 4."""
        logits_TE = floats(np.zeros((1, 2)), leaf=True)
        ids_TK, kept_TK = torch.tensor([[0, 1]]), torch.tensor([[True, False]])
        weights_TK = first_routing.weights(logits_TE, ids_TK, score="softmax_topk")
        y_TD = first_output.output(torch.full((1, 1), 6.0), ids_TK, weights_TK, kept_TK, lambda rows, e: rows * 10**e)
        y_TD.sum().backward()
        assert logits_TE.grad is not None
        # y = w_0 * 6; dw_0 = 6, dw_1 = 0; dl_0 = w_0 (dw_0 - w_0 dw_0 - w_1 dw_1) = 1/2 * 3, dl_1 = -1/2 * 3.
        assert ([[3.0]], [[1.5, -1.5]]) == (y_TD.tolist(), logits_TE.grad.tolist())

    def test_rows_added_at_weight_zero_change_nothing(self) -> None:
        """Padding with unchosen tokens of weight 0 leaves outputs and gradients as they are, though f(0) = 3."""
        gains = {e: floats(np.array(2.0 + e), leaf=True) for e in range(2)}

        def run(ids: list[list[int]], weights: list[list[float]], rows: list[float]) -> list[list[float]]:
            x_TD, ids_TK, w_TK = (
                floats(np.array(rows)[:, None], leaf=True),
                torch.tensor(ids),
                floats(np.array(weights)),
            )
            y_TD = first_output.output(x_TD, ids_TK, w_TK, ids_TK >= 0, lambda row, e: row * gains[e] + 3.0)
            upstream = torch.tensor([[1.3], [-0.7], [0.9]], dtype=torch.float64)[: len(rows)]
            found = torch.autograd.grad(y_TD, [x_TD, *gains.values()], upstream)
            return [value[:2].flatten().tolist() for value in [y_TD.detach(), found[0]]] + [
                [float(value)] for value in found[1:]
            ]

        bare = run([[0, -1], [1, -1]], [[0.5, 0.0], [0.25, 0.0]], [1.0, 2.0])
        assert bare == run([[0, 1], [1, 0]], [[0.5, 0.0], [0.25, 0.0]], [1.0, 2.0])
        assert bare == run([[0, 1], [1, 0], [0, 1]], [[0.5, 0.0], [0.25, 0.0], [0.0, 0.0]], [1.0, 2.0, 0.0])


IDS, KEPT, WEIGHTS = np.array([[1, -1], [0, 1]]), np.array([[True, False], [False, True]]), np.full((2, 2), 0.5)
BAD: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "id -2": (first.loads, second.loads, (np.array([[-2]]), 3), {}),
    "id E": (first.loads, second.loads, (np.array([[3]]), 3), {}),
    "no experts": (first.loads, second.loads, (np.zeros((0, 1), dtype=int), 0), {}),
    **{
        f"capacity of {question} {options}": (first.capacities, second.capacities, question, options)
        for question, options in [
            ((-1, 1, 2), {"factor": 1.0}),
            ((5, 0, 2), {"factor": 1.0}),
            ((5, 3, 2), {"factor": 1.0}),
            ((5, 1, 2), {"factor": -0.5}),
            ((5, 1, 2), {"factor": math.nan}),
            ((5, 1, 2), {"factor": math.inf}),
            ((5, 1, 2), {"factor": 1.0, "minimum": -1}),
        ]
    },
    "no rank": (first.lossless_capacity, second.lossless_capacity, ([], 3), {}),
    "minimum -1": (first.lossless_capacity, second.lossless_capacity, ([IDS], 3), {"minimum": -1}),
    "multiple 0": (first.lossless_capacity, second.lossless_capacity, ([IDS], 3), {"multiple": 0}),
    "C < 0": (first.fits, second.fits, (IDS, 3, -1), {}),
    "rows T < 0": (first.padded_rows, second.padded_rows, (-1, 2), {}),
    "rows C < 0": (first.padded_rows, second.padded_rows, (2, -1), {}),
    **{
        f"drop {name}": (first_drops.legal_drop, second_drops.legal_drop, (kept, ids, 3), options)
        for name, kept, ids, options in [
            ("kept of another shape", KEPT[:1], IDS, {"capacity": 1, "policy": "any"}),
            ("id out of range", KEPT, IDS + 2, {"capacity": 1, "policy": "any"}),
            ("expert twice", KEPT, np.array([[1, 1], [0, 1]]), {"capacity": 1, "policy": "any"}),
            ("empty slot kept", ~KEPT, IDS, {"capacity": 1, "policy": "any"}),
            ("no weights", KEPT, IDS, {"capacity": 1, "policy": "weight"}),
            ("unknown policy", KEPT, IDS, {"capacity": 1, "policy": "wieght"}),
            ("C < 0", KEPT, IDS, {"capacity": -1, "policy": "any"}),
            ("errors alone", KEPT, IDS, {"capacity": 1, "policy": "any", "errors_TK": WEIGHTS}),
            ("weights of another shape", KEPT, IDS, {"capacity": 1, "policy": "weight", "weights_TK": WEIGHTS[:1]}),
            ("NaN", KEPT, IDS, {"capacity": 1, "policy": "any", "weights_TK": np.where(IDS == 0, math.nan, 0.5)}),
            (
                "negative error",
                KEPT,
                IDS,
                {"capacity": 1, "policy": "any", "weights_TK": WEIGHTS, "errors_TK": -WEIGHTS},
            ),
            (
                "error NaN",
                KEPT,
                IDS,
                {"capacity": 1, "policy": "any", "weights_TK": WEIGHTS, "errors_TK": WEIGHTS * math.nan},
            ),
        ]
    },
    "random keep": (first_drops.keep, second_drops.keep, (IDS, 3), {"capacity": 1, "policy": "any"}),
    "keep without weights": (first_drops.keep, second_drops.keep, (IDS, 3), {"capacity": 1, "policy": "weight"}),
    "scale alone": (first_output.after_drop, second_drops.after_drop, (IDS, WEIGHTS, KEPT), {"scale": 2.0}),
    "weights of no slot": (first_output.after_drop, second_drops.after_drop, (IDS, WEIGHTS[:1], KEPT), {}),
    "empty kept": (first_output.after_drop, second_drops.after_drop, (IDS, WEIGHTS, ~KEPT), {}),
}


class TestRefusals:
    """What has no answer is refused by both."""

    @pytest.mark.parametrize("name", BAD)
    def test_refused(self, name: str) -> None:
        """A question without an answer raises in both oracles."""
        one, other, question, options = BAD[name]
        assert_refused(one, other, *question, **options)

    def test_kept_is_of_bools(self) -> None:
        """Ones and zeros are no bools for the first oracle, which would combine them bit by bit."""
        with pytest.raises(ValueError, match="bool"):
            first_output.after_drop(torch.from_numpy(IDS), floats(WEIGHTS), torch.from_numpy(KEPT.astype(int)))

    def test_what_stands_in_an_empty_slot_says_nothing(self) -> None:
        """A NaN as weight or error of an empty slot is no reason to refuse."""
        nothing = np.where(IDS < 0, math.nan, 0.25)
        options: dict[str, Any] = {"capacity": 1, "policy": "weight", "weights_TK": nothing, "errors_TK": nothing}
        assert_agree(first_drops.legal_drop, second_drops.legal_drop, KEPT, IDS, 3, **options)
