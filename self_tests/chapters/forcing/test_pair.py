"""Forced routes, weights and losses' inputs, worked out twice: reference.forcing.routes and the longhand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.capacity import limits as first_capacity
from moe_conformance.reference.forcing import routes as first
from moe_conformance.reference.forcing import scores as first_scores
from moe_conformance.reference.routing import routes as first_routing
from self_tests.chapters.capacity.second import limits as second_capacity
from self_tests.chapters.forcing.second import routes as second
from self_tests.chapters.routing.second import routes as second_routing
from self_tests.chapters.routing.second.routes import Gate
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
KINDS = get_args(second_routing.Kind)


def make_ids(random: np.random.Generator, tokens: int, slots: int, experts: int) -> Ints:
    """Different experts for every token."""
    return np.array([random.permutation(experts)[:slots] for _ in range(tokens)], dtype=np.int64).reshape(tokens, slots)


class TestIds:
    @settings(pairs_agree, max_examples=200)
    @given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 10**6), st.booleans())
    def test_legal_ids_agree(self, experts: int, tokens: int, seed: int, masked: bool) -> None:
        """Both accept the same tokens: different experts in range, or, being padding, empty slots alone."""
        random = np.random.default_rng(seed)
        ids_TK = make_ids(random, tokens, int(random.integers(1, experts + 1)), experts)
        ids_TK[random.random(tokens) < 0.3] = -1
        for token, slot in np.argwhere(random.random(ids_TK.shape) < 0.1):
            ids_TK[token, slot] = random.integers(-2, experts + 1)
        padding_T = random.random(tokens) < 0.5 if masked else None
        assert_agree(first.legal_ids, second.legal_ids, ids_TK, experts, padding_T=padding_T)

    @pytest.mark.parametrize("groups", [1, 2, 3, 6])
    @pairs_agree
    @given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 10**6))
    def test_groups_used_agree(self, groups: int, slots: int, tokens: int, seed: int) -> None:
        """Both count the same groups of neighbours among each token's experts."""
        ids_TK = make_ids(np.random.default_rng(seed), tokens, slots, 6)
        used = assert_agree(first.groups_used, second.groups_used, ids_TK, 6, groups)
        assert all(1 <= n <= min(groups, slots) for n in used)

    @pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
    def test_forced_logits_keep_the_group_limit(self, kind: first_routing.Score) -> None:
        """Random logits that are selected under a limit of two of three groups lie in two groups at most."""
        forced_TE = floats(np.random.default_rng(4).normal(size=(40, 6)))
        limited = first_routing.route(forced_TE, top_k=3, score=kind, groups=(3, 2), group_score="top2_sum")
        free = first_routing.route(forced_TE, top_k=3, score=kind)
        assert 2 == int(first.groups_used(limited.ids_TK, 6, 3).max())
        assert 3 == int(first.groups_used(free.ids_TK, 6, 3).max())


class TestBalancePair:
    @settings(pairs_agree, max_examples=200)
    @given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 10**6))
    def test_judgements_agree(self, experts: int, ranks: int, spread: int, seed: int) -> None:
        """Both find the same loads balanced, on a rank and in the sum over ranks of equal or unequal tokens."""
        random = np.random.default_rng(seed)
        loads = random.integers(0, 1 + spread, size=(ranks, experts))
        if random.integers(2):  # as many rows on each rank
            loads = np.array([random.permutation(loads[0]) for _ in range(ranks)])
        for loads_E in loads:
            assert_agree(first.balanced, lambda row: second.balanced(row.tolist()), loads_E)
        assert_agree(first.balanced_sum, lambda rows: second.balanced_sum([row.tolist() for row in rows]), list(loads))


def first_weights(logits_TE: Tensor, ids_TK: Ints, gate: Gate) -> Tensor:
    """Ask the first oracle for the weights of forced ids."""
    return first_scores.forced_weights(
        logits_TE, torch.from_numpy(ids_TK), score=gate.kind, normalise=gate.normalise, scale=gate.scale
    )


@st.composite
def forced(draw: st.DrawFn) -> tuple[Floats, Ints, Gate, Floats]:
    """Logits with masked experts and whole masked tokens, any forced ids, any gate, and an upstream gradient."""
    experts = draw(st.integers(1, 6))
    slots, tokens = draw(st.integers(1, experts)), draw(st.integers(0, 4))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits_TE = random.normal(size=(tokens, experts)) * draw(st.sampled_from([1.0, 1.0, 8.0]))
    logits_TE[random.random(logits_TE.shape) < draw(st.sampled_from([0.0, 0.3, 0.7]))] = -math.inf
    kind = draw(st.sampled_from(KINDS))
    ids_TK = make_ids(random, tokens, slots, experts)
    gate = Gate(slots, kind, normalise=draw(st.booleans()), scale=draw(st.sampled_from([1.0, 2.5])))
    for token in range(tokens):  # -inf everywhere but for one expert that is not forced: a softmax of zeros
        if random.random() < 0.2 and slots < experts:
            logits_TE[token, ids_TK[token]] = -math.inf
    return logits_TE, ids_TK, gate, random.normal(size=ids_TK.shape)


class TestForcedWeights:
    @pytest.mark.parametrize("kind", KINDS)
    @pairs_agree
    @given(forced())
    def test_weights_and_gradients_agree(
        self, kind: second_routing.Kind, case: tuple[Floats, Ints, Gate, Floats]
    ) -> None:
        """Both weigh forced ids by the router's own logits, masked ones with 0, with the same gradient."""
        logits_TE, ids_TK, gate, upstream_TK = case
        gate = replace(gate, kind=kind)
        leaf = floats(logits_TE, leaf=True)
        weights_TK = first_weights(leaf, ids_TK, gate)
        assert_close(second.forced_weights(logits_TE, ids_TK, gate), weights_TK)
        weights_TK.backward(floats(upstream_TK))
        assert leaf.grad is not None
        expected = second.forced_weights_backward(logits_TE, ids_TK, gate, upstream_TK)
        assert_close(expected, leaf.grad, addend=gate.scale * float(np.abs(upstream_TK).max(initial=0.0)))
        assert_agree(first_scores.undecided_weights, second.undecided_weights, logits_TE, ids_TK)

    @pytest.mark.parametrize("kind", KINDS)
    def test_chosen_ids_weigh_as_chosen(self, kind: second_routing.Kind) -> None:
        """Forcing the very ids that the router would choose changes nothing."""
        logits_TE = np.random.default_rng(8).normal(size=(5, 7))
        gate = Gate(3, kind, normalise=True, scale=2.5)
        routed = first_routing.route(floats(logits_TE), top_k=3, score=kind, normalise=True, scale=2.5)
        found = first_weights(floats(logits_TE), routed.ids_TK.numpy(), gate)
        assert routed.weights_TK.tolist() == found.tolist()


class TestStraightThrough:
    @pairs_agree
    @given(forced(), st.integers(0, 10**6))
    def test_forced_logits_hand_on_their_gradient(self, case: tuple[Floats, Ints, Gate, Floats], seed: int) -> None:
        """The weights are those of the forced logits, and the gradient of these reaches the router's own unchanged."""
        _, ids_TK, gate, upstream_TK = case
        random = np.random.default_rng(seed)
        shape = (len(ids_TK), 1 + int(ids_TK.max(initial=gate.slots)))
        own_TE, forced_TE = floats(random.normal(size=shape), leaf=True), floats(random.normal(size=shape), leaf=True)
        z_TE = first_scores.straight_through(own_TE, forced_TE)
        forced_array = forced_TE.detach().numpy()
        assert second.straight_through(own_TE.detach().numpy(), forced_array).tolist() == z_TE.tolist()
        first_weights(z_TE, ids_TK, gate).backward(floats(upstream_TK))
        assert own_TE.grad is not None
        assert forced_TE.grad is None
        expected = second.forced_weights_backward(forced_array, ids_TK, gate, upstream_TK)
        assert_close(expected, own_TE.grad, addend=gate.scale * float(np.abs(upstream_TK).max(initial=0.0)))


class TestLossViews:
    @pytest.mark.parametrize("what", ["logits", "ids"])
    @pairs_agree
    @given(forced())
    def test_views_agree(self, what: str, case: tuple[Floats, Ints, Gate, Floats]) -> None:
        """Both name the same logits and the same counted experts, in the same order."""
        own_TE, ids_TK, gate, _ = case
        own_TE = np.round(own_TE * 2) / 2  # ties, which go to the lower expert
        other_TE = own_TE[:, ::-1].copy()
        options: dict[str, Any] = {"forced_logits_TE": other_TE} if what == "logits" else {"forced_ids_TK": ids_TK}
        expected = second.loss_views(own_TE, top_k=gate.slots, **options)
        asked = {name: torch.from_numpy(value) for name, value in options.items()}
        found = first_scores.loss_views(floats(own_TE), top_k=gate.slots, **asked)
        assert 2 == len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert one.logits_TE.tolist() == other.logits_TE.tolist()
            assert (torch.int64, ids_TK.shape) == (other.ids_TK.dtype, tuple(other.ids_TK.shape))
            assert one.chosen == [set(row) for row in other.ids_TK.tolist()]


ONE_ID, LOGITS, HALVES = np.array([[0]]), np.zeros((1, 3)), np.array([[0.5, -2.0]])
IDS_63 = np.array([[2, 0], [1, 1], [3, 0], [0, -1], [-1, -1], [-2, -2]])
POWERS = np.log(np.array([[1.0, 2.0, 5.0, 1e-300]]))  # shares 1/8, 2/8, 5/8 and, masked, none
POWERS[0, 3] = -math.inf


def weighed(ids: list[int], kind: second_routing.Kind, *, normalise: bool = False) -> tuple[Floats, Ints, Gate]:
    """One token of four experts with these forced."""
    return POWERS, np.array([ids]), Gate(len(ids), kind, normalise=normalise)


def first_handed_on(own_TE: Tensor, forced_TE: Tensor) -> Tensor:
    """The gradient of sum z^2 that the router's own logits get."""
    leaf = own_TE.requires_grad_()
    (gradient_TE,) = torch.autograd.grad((first_scores.straight_through(leaf, forced_TE) ** 2).sum(), leaf)
    return gradient_TE


def first_views(logits: list[float], *, top_k: int, **forced: Any) -> list[tuple[Tensor, Tensor]]:
    """Logits and ids of the views of one token, from whichever the router learns."""
    leaf, slope_E1 = torch.tensor([logits], dtype=torch.float64, requires_grad=True), torch.eye(len(logits))[1:2].T
    views = first_scores.loss_views(leaf, top_k=top_k, **forced)
    for view in views:
        (gradient_TE,) = torch.autograd.grad((view.logits_TE @ slope_E1.double()).sum(), leaf)
        assert slope_E1.T.tolist() == gradient_TE.tolist()
    return [(view.logits_TE, view.ids_TK) for view in views]


def second_views(logits: list[float], *, top_k: int, **forced: Any) -> list[tuple[Floats, list[list[int]]]]:
    """The same of the longhand."""
    views = second.loss_views(np.array([logits]), top_k=top_k, **forced)
    return [(view.logits_TE, [sorted(row) for row in view.chosen]) for view in views]


test_by_hand = by_hand(
    *rows(first.legal_ids, second.legal_ids,
        ("repeated, unknown and empty slots are no route", (IDS_63, 3), [True] + [False] * 5),
        ("padding has a route or nothing but empty slots", (IDS_63, 3), {"padding_T": np.ones(6, dtype=bool)},
         [True, False, False, False, True, False]),
        ("a mask of two for one token", (ONE_ID, 3), {"padding_T": np.array([True, False])}, REFUSED),
    ),
    *rows(first.groups_used, second.groups_used,
        ("pairs of neighbours are groups", (np.array([[0, 1, 3], [4, 5, 3], [0, 2, 5]]), 6, 3), [2, 2, 3]),
        ("uneven groups", (ONE_ID, 3, 2), REFUSED),
        ("no groups", (ONE_ID, 3, 0), REFUSED),
        ("groups of no route", (ONE_ID + 3, 3, 3), REFUSED),
    ),
    # Sums differ by at most 1, or where ranks differ in size by at most their number.
    *rows(lambda loads: first.balanced_sum([torch.tensor(loads_E) for loads_E in loads]), second.balanced_sum,
        ("sums of 3 3 2", ([[2, 1, 1], [1, 2, 1]],), True),
        ("the same remainder twice: 4 2 2", ([[2, 1, 1], [2, 1, 1]],), False),
        ("unequal ranks: 3 2 2", ([[2, 1, 1], [1, 1, 1]],), True),
        ("two unequal ranks may be two apart: 4 3 2", ([[2, 1, 1], [2, 2, 1]],), True),
        ("two unequal ranks three apart: 5 2 2", ([[3, 1, 1], [2, 1, 1]],), False),
        ("eight ranks with a remainder of 2: 16 16 8 ...", ([[2, 2, 1, 1, 1, 1, 1, 1]] * 8,), False),
        ("no rank", ([],), REFUSED),
    ),
    *rows(  # five tokens that all choose experts 0 and 1 of four
    first_capacity.fits,
    second_capacity.fits,
    ("of five rows each, ceil(10 / 4) = 3 fit", (np.array([[0, 1]] * 5), 4, 3), [3, 3, 0, 0]),
    ),
    *rows(lambda logits_TE, ids_TK, gate: first_weights(logits_TE, ids_TK.numpy(), gate), second.forced_weights,
        ("shares of all experts", weighed([1, 0], "softmax"), [[2 / 8, 1 / 8]]),
        ("shares normalised", weighed([1, 0], "softmax", normalise=True), [[2 / 3, 1 / 3]]),
        ("shares of the forced", weighed([1, 0], "softmax_topk"), [[2 / 3, 1 / 3]]),
        ("sigmoids 2 / (1 + 2) and 1 / (1 + 1)", weighed([1, 0], "sigmoid"), [[2 / 3, 1 / 2]]),
        ("a masked expert has no share", weighed([3, 0], "softmax", normalise=True), [[0.0, 1.0]]),
        ("a masked expert has no share of the forced", weighed([3, 0], "softmax_topk"), [[0.0, 1.0]]),
        ("a masked expert alone weighs 0", weighed([3], "softmax_topk"), [[0.0]]),
        ("the sigmoid of a masked expert, normalised", weighed([3], "sigmoid", normalise=True), [[0.0]]),
        *(
            (f"{kind} of {logits}, {ids}", (np.array([logits]), np.array([ids]), Gate(len(ids), kind)), REFUSED)
            for kind in KINDS
            for logits, ids in [
                ([0.0, math.nan, 1.0], [0]), ([0.0, math.inf, 1.0], [0]),
                ([-math.inf, math.nan, 1.0], [0]),  # undecided, and still no logits
                ([0.0, 1.0, 2.0], [3]), ([0.0, 1.0, 2.0], [-1]), ([0.0, 1.0, 2.0], [1, 1]),
            ]
        ),
    ),
    *rows(first_scores.undecided_weights, second.undecided_weights,
        ("undecided id E", (LOGITS, ONE_ID + 3), REFUSED),
        ("undecided id -1", (LOGITS, ONE_ID - 1), REFUSED),
        ("undecided twice", (LOGITS, np.array([[1, 1]])), REFUSED),
    ),
    *rows(first_handed_on, lambda own_TE, forced_TE: 2 * second.straight_through(own_TE, forced_TE),
        ("z^2 has the gradient 2 z, whatever l was", (np.array([[7.0, 9.0]]), HALVES), [[1.0, -4.0]]),
        ("T = 0 hands on an empty gradient", (np.zeros((0, 3)), np.zeros((0, 3))), np.zeros((0, 3))),
        ("logits of another shape", (LOGITS, HALVES), REFUSED),
    ),
    *rows(first_views, second_views,
        ("forced logits and their choice, then the router's own", ([1.0, 2.0, 3.0],),
         {"top_k": 1, "forced_logits_TE": np.array([[9.0, 4.0, 5.0]])},
         [([[9.0, 4.0, 5.0]], [[0]]), ([[1.0, 2.0, 3.0]], [[2]])]),
        ("the router's own choice, then forced ids", ([1.0, 2.0, 3.0],), {"top_k": 1, "forced_ids_TK": np.array([[1]])},
         [([[1.0, 2.0, 3.0]], [[2]]), ([[1.0, 2.0, 3.0]], [[1]])]),
        *(
            (f"views of {name}", ([0.0, 0.0, 0.0],), {"top_k": 1, **options}, REFUSED)  # type: ignore[dict-item]
            for name, options in [
                ("nothing", {}), ("both", {"forced_logits_TE": LOGITS, "forced_ids_TK": ONE_ID}),
                ("logits of another shape", {"forced_logits_TE": np.zeros((2, 3))}),
                ("K > E", {"forced_logits_TE": LOGITS, "top_k": 4}),
                ("two ids for K = 1", {"forced_ids_TK": np.array([[0, 1]])}),
                ("two tokens", {"forced_ids_TK": np.array([[0], [1]])}), ("id E", {"forced_ids_TK": ONE_ID + 3}),
                ("id -1", {"forced_ids_TK": ONE_ID - 1}),
            ]
        ),
    ),
)  # fmt: skip
