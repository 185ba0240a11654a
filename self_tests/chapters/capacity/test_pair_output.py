"""What a drop leaves, worked out twice: weights and their gradients; and what both oracles of capacity refuse."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.capacity import after_drops as first_output
from moe_conformance.reference.capacity import drops as first_drops
from moe_conformance.reference.capacity import limits as first
from moe_conformance.reference.routing import routes as first_routing
from self_tests.chapters.capacity.second import drops as second_drops
from self_tests.chapters.capacity.second import limits as second
from self_tests.chapters.routing.second import routes as second_routing
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import by_hand, refusals

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Case(NamedTuple):
    """A routed batch, what was kept of it, an upstream gradient, and how weights are normalised after."""

    ids_TK: NDArray[np.int64]
    weights_TK: Floats
    kept_TK: NDArray[np.bool_]
    dw_TK: Floats
    renormalise: bool
    scale: float


def make_case(seed: int, T: int, K: int, E: int, renormalise: bool, scale: float) -> Case:
    """Weights of 0 among others, NaN in empty slots, tokens of nothing kept or of kept zeros."""
    random = np.random.default_rng(seed)
    ids_TK = np.array([random.permutation(E)[:K] for _ in range(T)], dtype=np.int64).reshape(T, K)
    ids_TK[random.random(ids_TK.shape) < 0.15] = -1
    weights_TK = random.uniform(0.1, 1.0, size=ids_TK.shape) * random.choice([0.0, 1.0, 1.0], size=ids_TK.shape)
    weights_TK[ids_TK < 0] = np.nan
    kept_TK = (ids_TK >= 0) & (random.random(ids_TK.shape) < 0.6)
    dw_TK = random.normal(size=ids_TK.shape)
    return Case(ids_TK, weights_TK, kept_TK, dw_TK, renormalise, scale if renormalise else 1.0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any sizes, no token among them, and either convention for the weights of the kept."""
    E = draw(st.integers(1, 5))
    T, K = draw(st.integers(0, 6)), draw(st.integers(1, E))
    return make_case(draw(st.integers(0, 10**6)), T, K, E, draw(st.booleans()), draw(st.sampled_from([1.0, 2.5, 0.3])))


def options_of(case: Case) -> dict[str, Any]:
    """How the weights of the kept are normalised."""
    return {"renormalise": case.renormalise, "scale": case.scale}


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


class TestThroughScores:
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


IDS, KEPT, WEIGHTS = np.array([[1, -1], [0, 1]]), np.array([[True, False], [False, True]]), np.full((2, 2), 0.5)
BAD = {
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

    def test_kept_is_of_bools(self) -> None:
        """Ones and zeros are no bools for the first oracle, which would combine them bit by bit."""
        with pytest.raises(ValueError, match="bool"):
            first_output.after_drop(torch.from_numpy(IDS), floats(WEIGHTS), torch.from_numpy(KEPT.astype(int)))

    def test_what_stands_in_an_empty_slot_says_nothing(self) -> None:
        """A NaN as weight or error of an empty slot is no reason to refuse."""
        nothing = np.where(IDS < 0, math.nan, 0.25)
        options: dict[str, Any] = {"capacity": 1, "policy": "weight", "weights_TK": nothing, "errors_TK": nothing}
        assert_agree(first_drops.legal_drop, second_drops.legal_drop, KEPT, IDS, 3, **options)


test_by_hand = by_hand(*refusals(BAD))  # fmt: skip
