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
from self_tests.oracles.agreement import check_refused, floats
from self_tests.oracles.asked_twice import assert_agree, assert_refused

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

    @pytest.mark.parametrize(
        ("logits", "ids", "score", "bias", "expected"),
        [
            ([-INF, 0.0, 1.0], [2, 1], "sigmoid", None, True),
            ([-INF, 0.0, 1.0], [1, 2], "sigmoid", None, True),
            ([-INF, 0.0, 1.0], [2, 0], "sigmoid", None, False),
            ([-INF, 0.0, 1.0], [2, 0, 1], "sigmoid", None, True),  # fewer than K others
            ([-INF, 0.0, 1.0], [1], "sigmoid", None, True),  # one slot
            ([-INF, 0.0, 1.0], [0], "sigmoid", None, False),
            ([-INF, 0.0, -INF], [1, 0], "softmax_topk", None, True),
            ([-INF, 0.0, -INF], [0, 2], "softmax_topk", None, False),
            ([-INF, -1e30, 1.0], [2, 0], "sigmoid", None, True),  # underflows to the score of a masked one
            ([-INF, -1e30, 1.0], [2, 0], "softmax_topk", None, False),  # a logit does not
            ([-INF, 0.0, 1.0], [2, 0], "sigmoid", [0.5, 0.0, 0.0], True),  # 0 + 0.5 against 0.5
            ([-INF, 0.0, 1.0], [2, 0], "sigmoid", [0.25, 0.0, 0.0], False),
            ([-INF, 0.0, 1.0], [2, 0], "softmax_topk", [9.0, 0.0, 0.0], False),  # -inf + 9
            ([-INF, 0.0, 1.0], [2, 3], "sigmoid", None, False),
            ([-INF, 0.0, 1.0], [2, -1], "sigmoid", None, False),
            ([-INF, 0.0, 1.0], [2, 2], "sigmoid", None, False),
            ([-INF, -INF, -INF], [2, 0], "softmax", [0.0, 9.0, 0.0], True),
            ([-INF, -INF, -INF], [2, 2], "softmax", None, False),
            ([-INF, -INF, -INF], [2, 3], "softmax", None, False),
            ([-INF, -INF, 0.0], [2, 0], "sigmoid", [0.0, 9.0, 0.0], True),  # which of two masked ones is nobody's loss
            ([-1e30, 1e30, 0.0], [2, 0], "softmax", None, True),  # no masks: ROUTE-01 judges this
        ],
    )
    def test_by_hand(
        self, logits: list[float], ids: list[int], score: Kind, bias: list[float] | None, expected: bool
    ) -> None:
        """One token, with a mask or more."""
        options = {"score": score, "bias_E": None if bias is None else np.array(bias)}
        verdict = assert_agree(first.legal_ids, second.legal_ids, np.array([logits]), np.array([ids]), **options)
        assert [expected] == verdict

    @pytest.mark.parametrize(("logit", "expected"), [(-1.0, False), (-86.0, False), (-87.0, True), (-90.0, True)])
    def test_underflow_at_the_edge(self, logit: float, expected: bool) -> None:
        """A masked expert ties with scores up to twice 2^-126 = 2.35e-38: exp(-86) = 4.5e-38, exp(-87) = 1.6e-38."""
        question = np.array([[-INF, logit, 1.0]]), np.array([[2, 0]])
        assert [expected] == assert_agree(first.legal_ids, second.legal_ids, *question, score="sigmoid")

    @pytest.mark.parametrize(("error", "expected"), [(0.25, True), (0.2499, False), (0.0, False)])
    def test_twice_the_error_is_allowed(self, error: float, expected: bool) -> None:
        """Both scores may be wrong: sigmoid(0) = 1/2 is beaten by a masked expert at an error of 1/4."""
        question = np.array([[-INF, 0.0, 1.0]]), np.array([[2, 0]])
        assert [expected] == assert_agree(first.legal_ids, second.legal_ids, *question, score="sigmoid", error=error)

    def test_experts_of_closed_groups_are_not_left_out(self) -> None:
        """Only where the expert with the score may be chosen is it passed over."""
        logits, ids = np.array([[-INF, 0.0, 1.0]] * 2), np.array([[0, 2]] * 2)
        among = np.array([[True, False, True], [True, True, False]])
        found = assert_agree(first.legal_ids, second.legal_ids, logits, ids, score="sigmoid", among_TE=among)
        assert [True, False] == found

    @pytest.mark.parametrize(
        ("logits", "ids", "options"),
        [
            (np.array([[0.0, NAN]]), np.array([[0]]), {}),
            (np.array([[0.0, INF]]), np.array([[0]]), {}),
            (np.array([[0.0, 1.0]] * 2), np.array([[0]]), {}),
            (np.array([[0.0, 1.0]]), np.array([[0, 1, 0]]), {}),
            (np.array([[0.0, 1.0]]), np.zeros((1, 0), dtype=np.int64), {}),
            (np.array([[0.0, 1.0]]), np.array([[0]]), {"error": -1.0}),
            (np.array([[0.0, 1.0]]), np.array([[0]]), {"error": NAN}),
            (np.array([[0.0, 1.0]]), np.array([[0]]), {"among_TE": np.array([[True]])}),
        ],
    )
    def test_refused(self, logits: Floats, ids: NDArray[np.int64], options: dict[str, Any]) -> None:
        """Bad tokens, which have rules of their own, and questions that do not fit."""
        assert_refused(first.legal_ids, second.legal_ids, logits, ids, score="sigmoid", **options)
        if not options:
            question = logits, ids, np.zeros(ids.shape)
            assert_refused(first.legal_weights, second.legal_weights, *question, score="sigmoid")


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

    @pytest.mark.parametrize(
        ("logits", "weights", "score", "normalise", "expected"),
        [
            ([0.0, 1.0], [0.5, 1.5], "sigmoid", True, True),
            ([0.0, 1.0], [0.5, 1.5 + 2 * R], "sigmoid", True, True),  # a relative 2^-20 of the scale 2
            ([0.0, 1.0], [0.5, 1.5 + 2.01 * R], "sigmoid", True, False),
            ([0.0, 1.0], [0.5, 1.5 - 2 * R], "sigmoid", True, True),
            ([0.0, 1.0], [0.5, 1.5 - 2.01 * R], "sigmoid", True, False),
            ([0.0, 1.0], [0.5, 1.5 - 2.01 * R], "sigmoid", False, True),
            ([0.0, 1.0], [7.0, 7.0], "sqrtsoftplus", False, True),
            ([0.0, 1.0], [0.5, 1.5 - 2.01 * R], "softmax_topk", False, False),
            ([0.0, 1.0], [0.5, 0.5], "softmax", False, True),
            ([-28.0, -28.0], [0.5, 1.0], "sigmoid", True, False),  # 2 exp(-28) = 1.38e-12
            ([-29.0, -29.0], [0.5, 1.0], "sigmoid", True, True),  # 2 exp(-29) = 0.51e-12
            ([-29.0, -29.0], [0.0, 0.0], "sigmoid", True, True),
            ([-29.0, -29.0], [0.0, -0.1], "sigmoid", True, False),
            ([-29.0, -29.0], [1.0, 1.0 + 2 * R], "sigmoid", True, True),
            ([-29.0, -29.0], [1.0, 1.0 + 2.01 * R], "sigmoid", True, False),
            ([-29.0, -29.0], [0.5, 1.0], "softmax_topk", True, False),  # these scores sum to 1
            ([-29.0, -29.0], [0.5, 1.0], "sqrtsoftplus", True, False),  # exp(-14.5) each
            ([0.0, -INF], [2.0, 0.0], "sigmoid", True, True),
            ([0.0, -INF], [2.0, -0.0], "sigmoid", True, True),
            ([0.0, -INF], [2.0, 1e-300], "sigmoid", True, False),
            ([0.0, -INF], [2.0, 1e-300], "sigmoid", False, False),
            ([0.0, -INF], [1.0, 1.0], "softmax_topk", False, False),
            ([-INF, -INF], [9.0, -1.0], "softmax_topk", True, True),
            ([-INF, -INF], [9.0, INF], "softmax", True, False),
            ([0.0, 1.0], [NAN, 1.0], "sqrtsoftplus", False, False),
            ([0.0, 1.0], [-INF, 1.0], "sigmoid", False, False),
        ],
    )
    def test_by_hand(
        self, logits: list[float], weights: list[float], score: Kind, normalise: bool, expected: bool
    ) -> None:
        """Both experts of one token beside a third, scale 2."""
        question = np.array([[*logits, -1.0]]), np.array([[0, 1]]), np.array([weights])
        options: dict[str, Any] = {"score": score, "normalise": normalise, "scale": 2.0}
        assert [expected] == assert_agree(first.legal_weights, second.legal_weights, *question, **options)

    def test_slots_say_whose_weight_it_is(self) -> None:
        """The masked expert stands in the first slot."""
        for weights, expected in (([[0.0, 1.0]], True), ([[1.0, 0.0]], False)):
            question = np.array([[0.0, 0.0, -INF]]), np.array([[2, 0]]), np.array(weights)
            verdict = assert_agree(first.legal_weights, second.legal_weights, *question, score="sigmoid")
            assert [expected] == verdict

    @pytest.mark.parametrize(("weight", "expected"), [(2.0, True), (1.0, False), (NAN, False)])
    def test_one_slot_by_hand(self, weight: float, expected: bool) -> None:
        """Normalised, one expert has all of the scale."""
        question = np.array([[0.0, -INF]]), np.array([[0]]), np.array([[weight]])
        options: dict[str, Any] = {"score": "sigmoid", "normalise": True, "scale": 2.0}
        assert [expected] == assert_agree(first.legal_weights, second.legal_weights, *question, **options)

    @pytest.mark.parametrize(("rounding", "expected"), [(0.25, True), (0.125, False)])
    def test_rounding_is_of_the_scale(self, rounding: float, expected: bool) -> None:
        """5 instead of 4 is a quarter too much."""
        question = np.array([[0.0, 0.0]]), np.array([[1, 0]]), np.array([[2.0, 3.0]])
        options: dict[str, Any] = {"score": "sigmoid", "normalise": True, "scale": 4.0, "rounding": rounding}
        assert [expected] == assert_agree(first.legal_weights, second.legal_weights, *question, **options)

    @pytest.mark.parametrize(
        ("ids", "weights", "scale"),
        [
            ([[0, 0]], [[1.0, 0.0]], 1.0),
            ([[0, 3]], [[1.0, 0.0]], 1.0),
            ([[0, -1]], [[1.0, 0.0]], 1.0),
            ([[0, 1]], [[1.0]], 1.0),
            ([[0, 1]], [[1.0, 0.0]], 0.0),
            ([[0, 1]], [[1.0, 0.0]], -1.0),
            ([[0, 1]], [[1.0, 0.0]], NAN),
        ],
    )
    def test_refused(self, ids: list[list[int]], weights: list[list[float]], scale: float) -> None:
        """Weights of no choice, and no scale."""
        question = np.zeros((1, 3)), np.array(ids), np.array(weights)
        assert_refused(first.legal_weights, second.legal_weights, *question, score="sigmoid", scale=scale)

    def test_gradients(self) -> None:
        """One element that is no number spoils its token."""
        gradients = np.array([[0.0, 1e308], [NAN, 0.0], [0.0, -INF], [INF, 0.0], [-0.0, 0.0]])
        expected = [True, False, False, False, True]
        assert expected == assert_agree(first.finite_gradients, second.finite_gradients, gradients)
        assert [] == assert_agree(first.finite_gradients, second.finite_gradients, np.zeros((0, 3)))


class TestBadTokens:
    def test_bad_tokens(self) -> None:
        """NaN and +inf are bad, -inf is a mask."""
        logits = np.array([[0.0, NAN], [INF, 0.0], [-INF, 0.0], [-INF, -INF], [1e308, -1e308], [-NAN, -INF]])
        expected = [True, True, False, False, False, True]
        assert expected == assert_agree(first_bad.bad_tokens, second.bad_tokens, logits)
        assert [] == assert_agree(first_bad.bad_tokens, second.bad_tokens, np.zeros((0, 3)))

    @pairs_agree
    @given(st.lists(st.lists(st.integers(-2, 4), min_size=3, max_size=3), max_size=5), st.integers(1, 4))
    def test_ids_agree(self, rows: list[list[int]], experts: int) -> None:
        """Both let stand different experts and any number of empty slots."""
        ids_TK = np.array(rows, dtype=np.int64).reshape(-1, 3)
        assert_agree(first_bad.legal_ids_beside_bad, second.legal_ids_beside_bad, ids_TK, experts)

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [([-1, -1, -1], True), ([3, -1, 0], True), ([4, -1, 0], False), ([-2, 1, 0], False), ([0, -1, 0], False)],
    )
    def test_ids_by_hand(self, ids: list[int], expected: bool) -> None:
        """Four experts."""
        found = assert_agree(first_bad.legal_ids_beside_bad, second.legal_ids_beside_bad, np.array([ids]), 4)
        assert [expected] == found


LOGITS = np.array([[0.0, 1.0, -INF], [NAN, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, INF, 0.0]])
IDS, WEIGHTS = np.array([[1, 0], [7, -9], [2, -1], [0, 0]]), np.array([[3.0, 1.0], [NAN, 0.0], [2.0, 0.0], [1.0, 1.0]])


def both_unmoved(
    logits: Floats, ids: NDArray[np.int64], weights: Floats, alone: tuple[Any, Any], **options: float
) -> list[bool]:
    """What both say of each token."""
    expected = second.unmoved(logits, ids, weights, *(np.array(each) for each in alone), **options).tolist()
    without = first_routing.Routed(torch.tensor(alone[0]), floats(np.array(alone[1])))
    actual = first_bad.unmoved(floats(logits), torch.from_numpy(ids), floats(weights), without, **options)
    assert torch.bool == actual.dtype
    assert expected == actual.tolist()
    return [bool(each) for each in expected]


class TestUnmoved:
    @pytest.mark.parametrize(
        ("ids", "weights", "expected"),
        [
            ([[1, 0], [2, -1]], [[3.0, 1.0], [2.0, 0.0]], [True, True]),
            ([[0, 1], [-1, 2]], [[1.0, 3.0], [0.0, 2.0]], [True, True]),  # in other slots
            ([[0, 1], [2, -1]], [[3.0, 1.0], [2.0, 0.0]], [False, True]),  # weights swapped
            ([[1, 2], [2, -1]], [[3.0, 1.0], [2.0, 0.0]], [False, True]),
            ([[1, 0], [2, 0]], [[3.0, 1.0], [2.0, 0.0]], [True, False]),  # a slot was filled
            ([[2, -1], [1, 0]], [[2.0, 0.0], [3.0, 1.0]], [False, False]),  # tokens swapped
            ([[1, 0], [2, -1]], [[NAN, 1.0], [2.0, NAN]], [False, False]),
            ([[1, 0], [2, -1]], [[3.0, 1.0], [2.0, 2.0**-1000]], [True, False]),  # 0 is near 2^-1000 by nothing
        ],
    )
    def test_by_hand(self, ids: list[list[int]], weights: list[list[float]], expected: list[bool]) -> None:
        """Tokens 0 and 2 are good; whatever bad tokens are given, they are left alone."""
        verdict = both_unmoved(LOGITS, IDS, WEIGHTS, (ids, weights), rounding=0.5)
        assert [expected[0], True, expected[1], True] == verdict

    @pytest.mark.parametrize("sign", [1, -1])
    def test_rounding_is_of_the_weight_alone(self, sign: int) -> None:
        """At the rounding exactly and one step beyond it, up and down."""
        alone = [[1, 0], [2, -1]], [[3.0, 1.0], [2.0, 0.0]]
        for weight, expected in ((3 + sign * 3 * R, True), (math.nextafter(3 + sign * 3 * R, sign * INF), False)):
            weights = WEIGHTS.copy()
            weights[0, 0] = weight
            assert [expected, True, True, True] == both_unmoved(LOGITS, IDS, weights, alone)

    @pytest.mark.parametrize(
        ("now", "expected"), [(-2.0, True), (-2.125, True), (-1.875, True), (-2.25, False), (2.0, False)]
    )
    def test_negative_weights_by_hand(self, now: float, expected: bool) -> None:
        """The rounding of -2 is a sixteenth of 2, up and down."""
        question = LOGITS[:1], IDS[:1], np.array([[now, 1.0]])
        assert [expected] == both_unmoved(*question, ([[1, 0]], [[-2.0, 1.0]]), rounding=2.0**-4)

    def test_without_bad_tokens_and_without_good_ones(self) -> None:
        """All tokens are compared, or none."""
        alone = IDS[:1].tolist(), WEIGHTS[:1].tolist()
        assert [True] == both_unmoved(LOGITS[:1], IDS[:1], WEIGHTS[:1], alone)
        nothing = np.zeros((0, 2), dtype=np.int64), np.zeros((0, 2))
        assert [True] == both_unmoved(LOGITS[1:2], IDS[1:2], WEIGHTS[1:2], nothing)

    @pytest.mark.parametrize(
        ("ids", "weights", "alone"),
        [
            (IDS, WEIGHTS, (IDS[:1], WEIGHTS[:1])),
            (IDS, WEIGHTS, (IDS[:3], WEIGHTS[:3])),
            (IDS, WEIGHTS, (IDS[:2], WEIGHTS[:1])),
            (IDS, WEIGHTS, (IDS[:2, :1], WEIGHTS[:2, :1])),
            (IDS, WEIGHTS[:3], (IDS[:2], WEIGHTS[:2])),
            (IDS, WEIGHTS[:, :1], (IDS[:2], WEIGHTS[:2])),
            (IDS[:3], WEIGHTS[:3], (IDS[:2], WEIGHTS[:2])),
        ],
    )
    def test_refused(self, ids: NDArray[np.int64], weights: Floats, alone: tuple[Any, Any]) -> None:
        """Shapes that do not fit, and another number of good tokens than there are."""
        without = first_routing.Routed(torch.from_numpy(alone[0]), floats(alone[1]))
        check_refused(
            lambda: first_bad.unmoved(floats(LOGITS), torch.from_numpy(ids), floats(weights), without),
            lambda: second.unmoved(LOGITS, ids, weights, *alone),
        )
