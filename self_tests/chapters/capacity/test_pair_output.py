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
from self_tests.chapters.capacity.test_pair import ROUNDING
from self_tests.chapters.routing.second import routes as second_routing
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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
NOTHING = np.where(IDS < 0, math.nan, 0.25)


def first_left(*drop: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights that a drop leaves."""
    left = first_output.after_drop(*drop, **options)
    return left.ids_TK, left.weights_TK


class TestBools:
    def test_kept_is_of_bools(self) -> None:
        """Ones and zeros are no bools for the first oracle, which would combine them bit by bit."""
        with pytest.raises(ValueError, match="bool"):
            first_output.after_drop(torch.from_numpy(IDS), floats(WEIGHTS), torch.from_numpy(KEPT.astype(int)))


ANY, HEAVIEST = {"capacity": 1, "policy": "any"}, {"capacity": 1, "policy": "weight"}

test_by_hand = by_hand(
    *rows(first.loads, second.loads,
        ("id -2", (np.array([[-2]]), 3), REFUSED),
        ("id E", (np.array([[3]]), 3), REFUSED),
        ("no experts", (np.zeros((0, 1), dtype=int), 0), REFUSED),
    ),
    *rows(first.capacities, second.capacities,
        *(
            (f"capacity of T, K, E {sizes}", sizes, {"factor": 1.0}, REFUSED)
            for sizes in [(-1, 1, 2), (5, 0, 2), (5, 3, 2)]
        ),
        *((f"a factor of {f}", (5, 1, 2), {"factor": f}, REFUSED) for f in (-0.5, math.nan, math.inf)),
        ("a minimum of -1", (5, 1, 2), {"factor": 1.0, "minimum": -1}, REFUSED),
        # Six tokens, three experts, half as many places again: 9 / 3.
        ("9 / 3, or a little more", (6, 1, 3), {"factor": 1.5}, [3, 4]),
        ("37.5 / 8 = 4.6875 is more than the minimum", (10, 3, 8), {"factor": 1.25, "minimum": 5}, [5]),
        ("6 exactly, and a minimum", (8, 3, 4), {"factor": 1.0, "minimum": 7}, [7]),
        ("the minimum covers 6 and 7", (10, 3, 5), {"factor": 1.0, "minimum": 7}, [7]),
        ("0.875", (7, 2, 4), {"factor": 0.25}, [1]),
        ("no token", (0, 2, 4), {"factor": 1.0}, [0]),
        ("no token, and a minimum", (0, 2, 3), {"factor": 1.0, "minimum": 2}, [2]),
        ("a factor of 0", (5, 2, 3), {"factor": 0.0}, [0]),
        # x = 5 + 20 roundings, and 4 x is as much and more; 25 are too many; 4 x is 80 roundings squared short of 20.
        *(
            (f"{n} roundings of 5", (3, 1, 3), {"factor": 5 * (1 + n * ROUNDING)}, legal)
            for n, legal in [(4, [5, 6]), (5, [6]), (-3, [5, 6]), (-4, [5])]
        ),
        ("E a power of two, but a has more than 24 bits", (4, 1, 4), {"factor": 5 * (1 + 4 * ROUNDING)}, [5, 6]),
        # a = 2^22 + 1: everything fits float32, and 2 a, but 4 a is 2^24 + 4.
        *(
            (f"1 + 2^-22, T, K, E {sizes}", sizes, {"factor": 1 + 4 * ROUNDING}, legal)
            for sizes, legal in [((1, 1, 1), [2]), ((1, 2, 2), [2]), ((4, 1, 4), [1, 2]), ((2, 2, 4), [1, 2])]
        ),
        ("a K T below 2^24", (2**24 - 2**12, 1, 2**12), {"factor": 1.0}, [2**12 - 1]),
        ("a K T not below 2^24", (2**24, 1, 2**12), {"factor": 1.0}, [2**12, 2**12 + 1]),
        # x = 1 + 1 / (2^22 - 1), off by 2^-22 of x exactly, and x = 1 - 1 / (2^22 + 1), likewise.
        ("2^-22 more", (1, 1, 2**22 - 1), {"factor": 2.0**22}, [1, 2]),
        ("2^-22 less", (1, 1, 2**22 + 1), {"factor": 2.0**22}, [1, 2]),
    ),
    *rows(first.lossless_capacity, second.lossless_capacity,
        ("the largest load of any rank", ([np.array([[1, 0], [1, 2]]), np.array([[2, -1], [2, 0], [0, 2]])], 3), 3),
        ("a minimum of 5 in threes", ([IDS], 3), {"minimum": 5, "multiple": 3}, 6),
        ("without tokens", ([IDS[:0], IDS[:0]], 3), 0),
        ("no rank", ([], 3), REFUSED),
        ("minimum -1", ([IDS], 3), {"minimum": -1}, REFUSED),
        ("multiple 0", ([IDS], 3), {"multiple": 0}, REFUSED),
    ),
    *rows(first.fits, second.fits, ("C < 0", (IDS, 3, -1), REFUSED)),
    *rows(first.padded_rows, second.padded_rows, ("rows T < 0", (-1, 2), REFUSED), ("rows C < 0", (2, -1), REFUSED)),
    *rows(first_drops.legal_drop, second_drops.legal_drop,
        *(
            (f"drop: {name}", (kept, ids, 3), options, REFUSED)
            for name, kept, ids, options in [
                ("kept of another shape", KEPT[:1], IDS, ANY), ("id out of range", KEPT, IDS + 2, ANY),
                ("expert twice", KEPT, np.array([[1, 1], [0, 1]]), ANY), ("empty slot kept", ~KEPT, IDS, ANY),
                ("no weights", KEPT, IDS, HEAVIEST), ("unknown policy", KEPT, IDS, {"capacity": 1, "policy": "wieght"}),
                ("C < 0", KEPT, IDS, {"capacity": -1, "policy": "any"}),
                ("errors alone", KEPT, IDS, {**ANY, "errors_TK": WEIGHTS}),
                ("weights of another shape", KEPT, IDS, {**HEAVIEST, "weights_TK": WEIGHTS[:1]}),
                ("NaN", KEPT, IDS, {**ANY, "weights_TK": np.where(IDS == 0, math.nan, 0.5)}),
                ("negative error", KEPT, IDS, {**ANY, "weights_TK": WEIGHTS, "errors_TK": -WEIGHTS}),
                ("error NaN", KEPT, IDS, {**ANY, "weights_TK": WEIGHTS, "errors_TK": WEIGHTS * math.nan}),
            ]
        ),
        ("what stands in an empty slot says nothing", (KEPT, IDS, 3),
         {**HEAVIEST, "weights_TK": NOTHING, "errors_TK": NOTHING}, [True, False, True]),
    ),
    *rows(first_drops.keep, second_drops.keep,
        ("random keep", (IDS, 3), ANY, REFUSED),
        ("keep without weights", (IDS, 3), HEAVIEST, REFUSED),
    ),
    *rows(first_left, second_drops.after_drop,
        ("what is kept weighs as before", (IDS, WEIGHTS, KEPT), ([[1, -1], [-1, 1]], [[0.5, 0.0], [0.0, 0.5]])),
        ("scale alone", (IDS, WEIGHTS, KEPT), {"scale": 2.0}, REFUSED),
        ("weights of no slot", (IDS, WEIGHTS[:1], KEPT), REFUSED),
        ("empty kept", (IDS, WEIGHTS, ~KEPT), REFUSED),
    ),
)  # fmt: skip
