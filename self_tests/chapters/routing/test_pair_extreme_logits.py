"""What a router may answer to extreme, masked and bad logits, judged twice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.routing import bad_tokens as first_bad
from moe_conformance.reference.routing import extreme_logits as first
from moe_conformance.reference.routing import routes as first_routing
from self_tests.chapters.routing.second import extreme_logits as second
from self_tests.chapters.routing.second.routes import Kind
from self_tests.oracles.agreement import floats
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Floats = NDArray[np.float64]
KINDS: tuple[Kind, ...] = ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus")
kinds = st.sampled_from(KINDS)
INF, NAN = math.inf, math.nan
EXTREMES = [-INF, -INF, -1e308, -1e30, -800.0, -120.0, -3.0, 0.0, 0.0, 2.0, 1e30, 1e308]
logits_of = st.lists(st.lists(st.sampled_from(EXTREMES), min_size=4, max_size=4), max_size=4)


def matrix(rows: Any, columns: int) -> Floats:
    """Rows as an array, also if there are none."""
    return np.array(rows, dtype=np.float64).reshape(-1, columns)


class TestIds:
    @settings(pairs_agree, max_examples=300)
    @given(logits_of, kinds, st.booleans(), st.booleans(), st.integers(0, 10**6))
    def test_verdicts_agree(self, rows: list[list[float]], score: Kind, biased: bool, grouped: bool, seed: int) -> None:
        """Both judge choices alike: of masked experts, of the same one twice, of none, with ties, bias and groups."""
        random = np.random.default_rng(seed)
        logits_TE, T = matrix(rows, 4), len(rows)
        ids_TK = np.array([random.permutation(4)[:2] for _ in range(T)], dtype=np.int64).reshape(T, 2)
        wild = random.random((T, 2)) < 0.1
        ids_TK[wild] = random.integers(-2, 6, size=int(wild.sum()))
        bias_E = random.choice([-0.5, 0.0, 0.25, 0.5, 1.0], size=4) if biased else None
        among_TE = random.random((T, 4)) < 0.7 if grouped else None
        options = {"score": score, "bias_E": bias_E, "among_TE": among_TE, "error": float(random.choice([0.0, 0.125]))}
        assert_agree(first.legal_ids, second.legal_ids, logits_TE, ids_TK, **options)

    @pytest.mark.parametrize("score", KINDS)
    @pytest.mark.parametrize("biased", [True, False])
    @settings(pairs_agree)
    @given(logits_of)
    def test_the_reference_router_is_legal(self, score: Kind, biased: bool, rows: list[list[float]]) -> None:
        """What the reference router chooses and weighs is legal, and so is its gradient, where logits have scores."""
        rows = [row for row in rows if max(row) > -INF]
        logits = floats(matrix(rows, 4), leaf=True)
        bias_E = torch.tensor([0.5, -0.25, 0.0, 0.125]).double() if biased else None
        ids = first_routing.route(logits, top_k=2, score="sigmoid" if score == "softmax_topk" else score, bias_E=bias_E)
        if score == "softmax_topk":
            ids = first_routing.Routed(logits.detach().topk(2, dim=1).indices, ids.weights_TK)
            bias_E = None
        assert bool(first.legal_ids(logits.detach(), ids.ids_TK, score=score, bias_E=bias_E).all())
        for normalise in (True, False):
            masked = (logits.detach().gather(1, ids.ids_TK) == -INF).all(dim=1)
            kept = ~masked
            if not len(rows) or not bool(kept.any()):
                continue
            options: dict[str, Any] = {"score": score, "normalise": normalise, "scale": 2.5}
            weights = first_routing.weights(logits[kept], ids.ids_TK[kept], **options)
            assert bool(first.legal_weights(logits.detach()[kept], ids.ids_TK[kept], weights.detach(), **options).all())
            (gradient,) = torch.autograd.grad(weights.sum(), logits, retain_graph=True)
            assert bool(first.finite_gradients(gradient).all())


R = 2.0**-20


class TestWeights:
    @settings(pairs_agree, max_examples=300)
    @given(logits_of, kinds, st.booleans(), st.integers(0, 10**6))
    def test_verdicts_agree(self, rows: list[list[float]], score: Kind, normalise: bool, seed: int) -> None:
        """Both judge weights alike: too large, too small, at masks, none at all, NaN, infinite."""
        random = np.random.default_rng(seed)
        T = len(rows)
        ids_TK = np.array([random.permutation(4)[:2] for _ in range(T)], dtype=np.int64).reshape(T, 2)
        part = random.choice([0.0, 0.0, 0.25, 0.5, 1.0], size=T)
        total = 3.0 * random.choice([1.0, 1.0, 1 - R, 1 + R, 1 + 2 * R, 0.5, 0.0, -0.5], size=T)
        weights_TK = np.stack([total * part, total * (1 - part)], axis=1)
        wild = random.random((T, 2)) < 0.05
        weights_TK[wild] = random.choice([NAN, INF, -INF, 1.0], size=int(wild.sum()))
        question = matrix(rows, 4), ids_TK, weights_TK
        options: dict[str, Any] = {"score": score, "normalise": normalise, "scale": 3.0}
        assert_agree(first.legal_weights, second.legal_weights, *question, **options)


class TestBadTokens:
    @pairs_agree
    @given(st.lists(st.lists(st.integers(-2, 4), min_size=3, max_size=3), max_size=5), st.integers(1, 4))
    def test_ids_agree(self, rows: list[list[int]], experts: int) -> None:
        """Both let stand different experts and any number of empty slots."""
        ids_TK = np.array(rows, dtype=np.int64).reshape(-1, 3)
        assert_agree(first_bad.legal_ids_beside_bad, second.legal_ids_beside_bad, ids_TK, experts)


LOGITS = np.array([[0.0, 1.0, -INF], [NAN, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, INF, 0.0]])  # tokens 0 and 2 are good
IDS, WEIGHTS = np.array([[1, 0], [7, -9], [2, -1], [0, 0]]), np.array([[3.0, 1.0], [NAN, 0.0], [2.0, 0.0], [1.0, 1.0]])
NONE = (np.zeros((0, 2), dtype=np.int64), np.zeros((0, 2)))
GOOD_IDS, GOOD_WEIGHTS = np.array([[1, 0], [2, -1]]), np.array([[3.0, 1.0], [2.0, 0.0]])


def ids_row(says: str, logits: list[float], ids: list[int], score: str, expected: bool, **more: Any) -> tuple[Any, ...]:
    """One token of some experts, and whether its choice is legal."""
    more = {name: np.array(value) if isinstance(value, list) else value for name, value in more.items()}
    return says, (np.array([logits]), np.array([ids])), {"score": score, **more}, [expected]


def weights_row(
    says: str, logits: list[float], weights: list[float], score: str, expected: bool, *, normalise: bool = True
) -> tuple[Any, ...]:
    """Both experts of one token beside a third, scale 2, and whether their weights are legal."""
    question = np.array([[*logits, -1.0]]), np.array([[0, 1]]), np.array([weights])
    return says, question, {"score": score, "normalise": normalise, "scale": 2.0}, [expected]


def weights_of(
    ids: list[int], weights: list[float], logits: list[float], **options: Any
) -> tuple[tuple[Floats, ...], dict[str, Any]]:
    """One token weighed by sigmoids."""
    return (np.array([logits]), np.array([ids]), np.array([weights])), {"score": "sigmoid", **options}


def first_unmoved(*question: Any, **options: float) -> torch.Tensor:
    """Whether each token has the route that it has without bad ones: ids and weights come last."""
    return first_bad.unmoved(*question[:3], first_routing.Routed(*question[3:]), **options)  # type: ignore[arg-type, call-arg]


def weight_0(weight: float) -> Floats:
    """The weights with another one for token 0."""
    return np.array([[weight, 1.0], *WEIGHTS[1:].tolist()])


MASKED, UNSCORED = [-INF, 0.0, 1.0], [-INF, -INF, -INF]
LOW, TINY = [-29.0, -29.0], [0.0, -INF]

test_by_hand = by_hand(
    *rows(first.legal_ids, second.legal_ids,
        ids_row("both unmasked experts", MASKED, [1, 2], "sigmoid", True),
        ids_row("a masked expert before an unmasked one", MASKED, [2, 0], "sigmoid", False),
        ids_row("fewer than K others", MASKED, [2, 0, 1], "sigmoid", True),
        ids_row("one slot", MASKED, [1], "sigmoid", True),
        ids_row("one slot, masked", MASKED, [0], "sigmoid", False),
        ids_row("one expert is not masked", [-INF, 0.0, -INF], [1, 0], "softmax_topk", True),
        ids_row("one expert is not masked and left out", [-INF, 0.0, -INF], [0, 2], "softmax_topk", False),
        ids_row("a sigmoid underflows to that of a masked one", [-INF, -1e30, 1.0], [2, 0], "sigmoid", True),
        ids_row("a logit does not", [-INF, -1e30, 1.0], [2, 0], "softmax_topk", False),
        ids_row("a bias of 0.5 ties with a score of 0.5", MASKED, [2, 0], "sigmoid", True, bias_E=[0.5, 0.0, 0.0]),
        ids_row("a bias of 0.25 does not", MASKED, [2, 0], "sigmoid", False, bias_E=[0.25, 0.0, 0.0]),
        ids_row("no bias lifts -inf", MASKED, [2, 0], "softmax_topk", False, bias_E=[9.0, 0.0, 0.0]),
        ids_row("id E", MASKED, [2, 3], "sigmoid", False),
        ids_row("an empty slot", MASKED, [2, -1], "sigmoid", False),
        ids_row("an expert twice", MASKED, [2, 2], "sigmoid", False),
        ids_row("without any score all ids are legal", UNSCORED, [2, 0], "softmax", True, bias_E=[0.0, 9.0, 0.0]),
        ids_row("but none twice", UNSCORED, [2, 2], "softmax", False),
        ids_row("but not id E", UNSCORED, [2, 3], "softmax", False),
        ids_row("either of two masked ones", [-INF, -INF, 0.0], [2, 0], "sigmoid", True, bias_E=[0.0, 9.0, 0.0]),
        ids_row("no masks: ROUTE-01 judges this", [-1e30, 1e30, 0.0], [2, 0], "softmax", True),
        # A masked expert ties with scores up to twice 2^-126 = 2.35e-38: exp(-86) = 4.5e-38, exp(-87) = 1.6e-38.
        ids_row("exp(-86) is a score", [-INF, -86.0, 1.0], [2, 0], "sigmoid", False),
        ids_row("exp(-87) is none", [-INF, -87.0, 1.0], [2, 0], "sigmoid", True),
        # Both scores may be wrong: sigmoid(0) = 1/2 is beaten by a masked expert at an error of 1/4.
        ids_row("twice the error is allowed", MASKED, [2, 0], "sigmoid", True, error=0.25),
        ids_row("and no more", MASKED, [2, 0], "sigmoid", False, error=0.2499),
        ids_row(
            "experts of closed groups are not left out", MASKED, [0, 2], "sigmoid", True, among_TE=[[True, False, True]]
        ),
        ids_row("experts of open groups are", MASKED, [0, 2], "sigmoid", False, among_TE=[[True, True, False]]),
        *(
            (f"ids of {name}", (np.array(logits), ids), {"score": "sigmoid", **options}, REFUSED)  # type: ignore[dict-item]
            for name, logits, ids, options in [
                ("NaN", [[0.0, NAN]], np.array([[0]]), {}), ("infinity", [[0.0, INF]], np.array([[0]]), {}),
                ("fewer tokens", [[0.0, 1.0]] * 2, np.array([[0]]), {}),
                ("K > E", [[0.0, 1.0]], np.array([[0, 1, 0]]), {}),
                ("no slots", [[0.0, 1.0]], np.zeros((1, 0), dtype=np.int64), {}),
                ("an error below 0", [[0.0, 1.0]], np.array([[0]]), {"error": -1.0}),
                ("an error of NaN", [[0.0, 1.0]], np.array([[0]]), {"error": NAN}),
                ("groups of other experts", [[0.0, 1.0]], np.array([[0]]), {"among_TE": np.array([[True]])}),
            ]
        ),
    ),
    *rows(first.legal_weights, second.legal_weights,
        weights_row("2^-20 of the scale 2 too much", [0.0, 1.0], [0.5, 1.5 + 2 * R], "sigmoid", True),
        weights_row("more than that", [0.0, 1.0], [0.5, 1.5 + 2.01 * R], "sigmoid", False),
        weights_row("2^-20 of the scale too little", [0.0, 1.0], [0.5, 1.5 - 2 * R], "sigmoid", True),
        weights_row("less than that", [0.0, 1.0], [0.5, 1.5 - 2.01 * R], "sigmoid", False),
        weights_row("less, not normalised", [0.0, 1.0], [0.5, 1.5 - 2.01 * R], "sigmoid", True, normalise=False),
        weights_row("any root, not normalised", [0.0, 1.0], [7.0, 7.0], "sqrtsoftplus", True, normalise=False),
        weights_row(
            "shares of the chosen are", [0.0, 1.0], [0.5, 1.5 - 2.01 * R], "softmax_topk", False, normalise=False
        ),
        weights_row("shares of all are not", [0.0, 1.0], [0.5, 0.5], "softmax", True, normalise=False),
        weights_row("2 exp(-28) = 1.38e-12 is a sum", [-28.0, -28.0], [0.5, 1.0], "sigmoid", False),
        weights_row("2 exp(-29) = 0.51e-12 is none", LOW, [0.5, 1.0], "sigmoid", True),
        weights_row("without a sum they may be 0", LOW, [0.0, 0.0], "sigmoid", True),
        weights_row("but not less", LOW, [0.0, -0.1], "sigmoid", False),
        weights_row("and 2^-20 more than the scale", LOW, [1.0, 1.0 + 2 * R], "sigmoid", True),
        weights_row("but not more than that", LOW, [1.0, 1.0 + 2.01 * R], "sigmoid", False),
        weights_row("shares of the chosen sum to 1", LOW, [0.5, 1.0], "softmax_topk", False),
        weights_row("roots of exp(-14.5) each are a sum", LOW, [0.5, 1.0], "sqrtsoftplus", False),
        weights_row("a masked expert has none", TINY, [2.0, -0.0], "sigmoid", True),
        weights_row("not even 1e-300", TINY, [2.0, 1e-300], "sigmoid", False),
        weights_row("not even 1e-300, not normalised", TINY, [2.0, 1e-300], "sigmoid", False, normalise=False),
        weights_row("a masked expert has no share", TINY, [1.0, 1.0], "softmax_topk", False, normalise=False),
        weights_row("all masked: anything", [-INF, -INF], [9.0, -1.0], "softmax_topk", True),
        weights_row("all masked: but no infinity", [-INF, -INF], [9.0, INF], "softmax", False),
        weights_row("NaN", [0.0, 1.0], [NAN, 1.0], "sqrtsoftplus", False, normalise=False),
        weights_row("-inf", [0.0, 1.0], [-INF, 1.0], "sigmoid", False, normalise=False),
        ("neither normalised nor scaled", *weights_of([0, 1], [7.0, 7.0], [0.0, 0.0], score="sqrtsoftplus"), [True]),
        ("normalised, the scale is 1", *weights_of([0, 1], [1.5, 0.5], [0.0, 0.0], normalise=True), [False]),
        ("the masked expert in the first slot", *weights_of([2, 0], [0.0, 1.0], [0.0, 0.0, -INF]), [True]),
        ("its weight in the other slot", *weights_of([2, 0], [1.0, 0.0], [0.0, 0.0, -INF]), [False]),
        *(
            (f"normalised, one expert has {w} of 2", *weights_of([0], [w], TINY, normalise=True, scale=2.0), [w == 2.0])
            for w in (2.0, 1.0, NAN)
        ),
        *(
            (f"5 instead of 4 is a quarter too much, not {rounding}",
             *weights_of([1, 0], [2.0, 3.0], [0.0, 0.0], normalise=True, scale=4.0, rounding=rounding),
             [rounding == 0.25])
            for rounding in (0.25, 0.125)
        ),
        *(
            (f"weights {weights} of {ids}, scale {scale}", *weights_of(ids, weights, [0.0] * 3, scale=scale), REFUSED)
            for ids, weights, scale in [
                ([0, 0], [1.0, 0.0], 1.0), ([0, 3], [1.0, 0.0], 1.0), ([0, -1], [1.0, 0.0], 1.0), ([0, 1], [1.0], 1.0),
                ([0, 1], [1.0, 0.0], 0.0), ([0, 1], [1.0, 0.0], -1.0), ([0, 1], [1.0, 0.0], NAN),
            ]
        ),
        *((f"weights at logit {bad}", *weights_of([0], [0.0], [0.0, bad]), REFUSED) for bad in (NAN, INF)),
        ("weights of fewer tokens", (np.zeros((2, 2)), np.array([[0]]), np.zeros((1, 1))), {"score": "sigmoid"},
         REFUSED),
        ("weights of K > E", *weights_of([0, 1, 0], [0.0] * 3, [0.0, 1.0]), REFUSED),
        ("weights of no slots", (np.zeros((1, 2)), NONE[0][:, :0].reshape(1, 0), np.zeros((1, 0))),
         {"score": "sigmoid"}, REFUSED),
    ),
    *rows(first.finite_gradients, second.finite_gradients,
        ("one element that is no number spoils its token",
         (np.array([[0.0, 1e308], [NAN, 0.0], [0.0, -INF], [INF, 0.0], [-0.0, 0.0]]),),
         [True, False, False, False, True]),
        ("no token", (np.zeros((0, 3)),), []),
    ),
    *rows(first_bad.bad_tokens, second.bad_tokens,
        ("NaN and +inf are bad, -inf is a mask",
         (np.array([[0.0, NAN], [INF, 0.0], [-INF, 0.0], [-INF, -INF], [1e308, -1e308], [-NAN, -INF]]),),
         [True, True, False, False, False, True]),
        ("no token is bad", (np.zeros((0, 3)),), []),
    ),
    *rows(first_bad.legal_ids_beside_bad, second.legal_ids_beside_bad,
        ("different experts of four, or empty slots",
         (np.array([[-1, -1, -1], [3, -1, 0], [4, -1, 0], [-2, 1, 0], [0, -1, 0]]), 4),
         [True, True, False, False, False]),
    ),
    *rows(first_unmoved, second.unmoved,
        *(
            (f"unmoved: {name}", (LOGITS, IDS, WEIGHTS, np.array(ids), np.array(weights)), {"rounding": 0.5},
             [zero, True, two, True])
            for name, ids, weights, zero, two in [
                ("all as before", GOOD_IDS, GOOD_WEIGHTS, True, True),
                ("in other slots", [[0, 1], [-1, 2]], [[1.0, 3.0], [0.0, 2.0]], True, True),
                ("weights swapped", [[0, 1], [2, -1]], GOOD_WEIGHTS, False, True),
                ("another expert", [[1, 2], [2, -1]], GOOD_WEIGHTS, False, True),
                ("a slot was filled", [[1, 0], [2, 0]], GOOD_WEIGHTS, True, False),
                ("tokens swapped", GOOD_IDS[::-1], GOOD_WEIGHTS[::-1], False, False),
                ("NaN", GOOD_IDS, [[NAN, 1.0], [2.0, NAN]], False, False),
                ("0 is near 2^-1000 by nothing", GOOD_IDS, [[3.0, 1.0], [2.0, 2.0**-1000]], True, False),
            ]
        ),
        *(
            (f"{weight} for 3", (LOGITS, IDS, weight_0(weight), GOOD_IDS, GOOD_WEIGHTS), [expected, True, True, True])
            for sign in (1, -1)  # at the rounding exactly, and one step beyond it
            for weight, expected in [(3 + sign * 3 * R, True), (math.nextafter(3 + sign * 3 * R, sign * INF), False)]
        ),
        *(
            (f"{now} for -2, a sixteenth allowed",
             (LOGITS[:1], IDS[:1], np.array([[now, 1.0]]), IDS[:1], np.array([[-2.0, 1.0]])), {"rounding": 2.0**-4},
             [expected])
            for now, expected in [(-2.125, True), (-1.875, True), (-2.25, False), (2.0, False)]
        ),
        ("without bad tokens all are compared", (LOGITS[:1], IDS[:1], WEIGHTS[:1], IDS[:1], WEIGHTS[:1]), [True]),
        ("without good ones none", (LOGITS[1:2], IDS[1:2], WEIGHTS[1:2], *NONE), [True]),
        *(
            (f"unmoved of {name}", (LOGITS, ids, weights, *alone), REFUSED)
            for name, ids, weights, alone in [
                ("fewer good tokens", IDS, WEIGHTS, (IDS[:1], WEIGHTS[:1])),
                ("more good tokens", IDS, WEIGHTS, (IDS[:3], WEIGHTS[:3])),
                ("fewer weights alone", IDS, WEIGHTS, (IDS[:2], WEIGHTS[:1])),
                ("fewer slots alone", IDS, WEIGHTS, (IDS[:2, :1], WEIGHTS[:2, :1])),
                ("fewer weights", IDS, WEIGHTS[:3], (IDS[:2], WEIGHTS[:2])),
                ("fewer slots of weights", IDS, WEIGHTS[:, :1], (IDS[:2], WEIGHTS[:2])),
                ("fewer tokens", IDS[:3], WEIGHTS[:3], (IDS[:2], WEIGHTS[:2])),
            ]
        ),
    ),
)  # fmt: skip
