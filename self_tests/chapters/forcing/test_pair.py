"""Forced routes, weights and losses' inputs, worked out twice: reference.forcing.routes and the longhand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from self_tests.oracles.asked_twice import assert_agree, assert_refused

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

    def test_legal_ids_by_hand(self) -> None:
        """Of 3 experts: a repeated one, one too high, an empty slot, and nothing are no route but for padding."""
        ids_TK = np.array([[2, 0], [1, 1], [3, 0], [0, -1], [-1, -1], [-2, -2]])
        assert [True] + [False] * 5 == assert_agree(first.legal_ids, second.legal_ids, ids_TK, 3)
        padded = assert_agree(first.legal_ids, second.legal_ids, ids_TK, 3, padding_T=np.ones(6, dtype=bool))
        assert [True, False, False, False, True, False] == padded

    @pytest.mark.parametrize("groups", [1, 2, 3, 6])
    @pairs_agree
    @given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 10**6))
    def test_groups_used_agree(self, groups: int, slots: int, tokens: int, seed: int) -> None:
        """Both count the same groups of neighbours among each token's experts."""
        ids_TK = make_ids(np.random.default_rng(seed), tokens, slots, 6)
        used = assert_agree(first.groups_used, second.groups_used, ids_TK, 6, groups)
        assert all(1 <= n <= min(groups, slots) for n in used)

    def test_groups_used_by_hand(self) -> None:
        """Experts 0 and 1 are group 0 of three, 2 and 3 group 1, 4 and 5 group 2."""
        ids_TK = np.array([[0, 1, 3], [4, 5, 3], [0, 2, 5]])
        assert [2, 2, 3] == assert_agree(first.groups_used, second.groups_used, ids_TK, 6, 3)

    @pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
    def test_forced_logits_keep_the_group_limit(self, kind: first_routing.Score) -> None:
        """Random logits that are selected under a limit of two of three groups lie in two groups at most."""
        forced_TE = floats(np.random.default_rng(4).normal(size=(40, 6)))
        limited = first_routing.route(forced_TE, top_k=3, score=kind, groups=(3, 2), group_score="top2_sum")
        free = first_routing.route(forced_TE, top_k=3, score=kind)
        assert 2 == int(first.groups_used(limited.ids_TK, 6, 3).max())
        assert 3 == int(first.groups_used(free.ids_TK, 6, 3).max())


class TestRoundRobin:
    @settings(pairs_agree, max_examples=120)
    @given(st.integers(0, 7), st.integers(1, 7), st.integers(0, 6), st.integers(0, 4))
    def test_routes_agree_and_are_even(self, tokens: int, experts: int, less: int, rank: int) -> None:
        """Both deal the same experts; every rank's loads, and the sums over any first ranks, are even."""
        top_k = max(1, experts - less)
        assert_agree(first.round_robin, second.round_robin, tokens, top_k, experts, rank=rank)
        routes = [first.round_robin(tokens, top_k, experts, rank=r) for r in range(rank + 1)]
        loads = [first_capacity.loads(ids_TK, experts) for ids_TK in routes]
        assert all(bool(first.legal_ids(ids_TK, experts).all()) for ids_TK in routes)
        assert all(first.balanced(loads_E) for loads_E in loads)
        assert first.balanced_sum(loads)

    def test_by_hand(self) -> None:
        """Two tokens of three experts of five: 0 1 2, 3 4 0; the next rank goes on with 1 2 3, 4 0 1."""
        for rank, expected in [(0, [[0, 1, 2], [3, 4, 0]]), (1, [[1, 2, 3], [4, 0, 1]]), (4, [[4, 0, 1], [2, 3, 4]])]:
            assert [[2, 3], expected] == assert_agree(first.round_robin, second.round_robin, 2, 3, 5, rank=rank)

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

    @pytest.mark.parametrize(
        ("loads", "expected"),
        [
            ([[2, 1, 1], [1, 2, 1]], True),  # 3 3 2
            ([[2, 1, 1], [2, 1, 1]], False),  # 4 2 2: the same remainder twice
            ([[2, 1, 1], [1, 1, 1]], True),  # unequal ranks: 3 2 2
            ([[2, 1, 1], [2, 2, 1]], True),  # 4 3 2: two ranks, so two apart is legal
            ([[3, 1, 1], [2, 1, 1]], False),  # 5 2 2
            ([[2, 2, 1, 1, 1, 1, 1, 1]] * 8, False),  # eight ranks with a remainder of 2: 16 16 8 ...
        ],
    )
    def test_sums_by_hand(self, loads: list[list[int]], expected: bool) -> None:
        """Sums differ by at most 1, or where ranks differ in size by at most their number."""
        assert expected is second.balanced_sum(loads)
        assert expected is first.balanced_sum([torch.tensor(loads_E) for loads_E in loads])

    @pairs_agree
    @given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 5), st.sampled_from([1.0, 1.1, 4 / 3]))
    def test_a_capacity_of_the_mean_drops_nothing(self, tokens: int, top_k: int, more: int, factor: float) -> None:
        """n_e <= ceil(K T / E) <= C with factor >= 1, for any T and any legal C."""
        experts = top_k + more
        ids_TK = first.round_robin(tokens, top_k, experts)
        n_E = first_capacity.loads(ids_TK, experts).tolist()
        for C in first_capacity.capacities(tokens, top_k, experts, factor=factor):
            assert n_E == first_capacity.fits(ids_TK, experts, C).tolist()

    def test_a_hot_rank_overflows_its_capacity(self) -> None:
        """Five tokens that all choose experts 0 and 1 of four: two of each five fit ceil(10 / 4) = 3 places."""
        ids_TK = np.array([[0, 1]] * 5)
        assert [3] == assert_agree(first_capacity.capacities, second_capacity.capacities, 5, 2, 4, factor=1.0)
        assert [3, 3, 0, 0] == assert_agree(first_capacity.fits, second_capacity.fits, ids_TK, 4, 3)


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

    def test_by_hand(self) -> None:
        """Logits log 1, log 2, log 5, -inf with experts 0 and 1 forced; then 3 and 0; then 3 alone."""
        logits_TE = np.array([[0.0, math.log(2.0), math.log(5.0), -math.inf]])
        for ids, kind, normalise, expected in [
            ([1, 0], "softmax", False, [2 / 8, 1 / 8]),
            ([1, 0], "softmax", True, [2 / 3, 1 / 3]),
            ([1, 0], "softmax_topk", False, [2 / 3, 1 / 3]),
            ([1, 0], "sigmoid", False, [2 / 3, 1 / 2]),  # 2 / (1 + 2), 1 / (1 + 1)
            ([3, 0], "softmax", True, [0.0, 1.0]),
            ([3, 0], "softmax_topk", False, [0.0, 1.0]),
            ([3], "softmax_topk", False, [0.0]),
            ([3], "sigmoid", True, [0.0]),
        ]:
            ids_TK, gate = np.array([ids]), Gate(len(ids), kind, normalise=normalise)  # type: ignore[arg-type]
            assert_close(np.array([expected]), first_weights(floats(logits_TE), ids_TK, gate))
            assert expected == pytest.approx(second.forced_weights(logits_TE, ids_TK, gate)[0].tolist())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("normalise", [False, True])
    def test_autograd_of_forced_weights_is_their_derivative(self, kind: second_routing.Kind, normalise: bool) -> None:
        """Gradcheck: numeric differences of the first oracle's forced weights are its gradients."""
        logits_TE = floats(np.random.default_rng(5).normal(size=(3, 7)), leaf=True)
        ids_TK = np.array([[4, 0, 6], [1, 2, 3], [5, 6, 0]])
        gate = Gate(3, kind, normalise=normalise, scale=2.5)
        assert torch.autograd.gradcheck(lambda logits: first_weights(logits, ids_TK, gate), (logits_TE,))


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

    def test_by_hand(self) -> None:
        """L = z_0^2 + 3 z_1 at forced z = (0.5, -2): dL/dl = (1, 3), whatever l was."""
        own_TE = torch.tensor([[7.0, 9.0]], requires_grad=True)
        z_TE = first_scores.straight_through(own_TE, torch.tensor([[0.5, -2.0]]))
        (z_TE[0, 0] ** 2 + 3 * z_TE[0, 1]).backward()
        assert own_TE.grad is not None
        assert ([[0.5, -2.0]], [[1.0, 3.0]]) == (z_TE.tolist(), own_TE.grad.tolist())

    def test_no_tokens(self) -> None:
        """T = 0 hands on an empty gradient, which is present."""
        own_TE = torch.zeros(0, 3, requires_grad=True)
        first_scores.straight_through(own_TE, torch.zeros(0, 3)).sum().backward()
        assert own_TE.grad is not None
        assert (0, 3) == tuple(own_TE.grad.shape)


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

    def test_by_hand(self) -> None:
        """Own logits prefer expert 2, forced ones expert 0, and expert 1 is dealt."""
        own_TE, z_TE = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True), torch.tensor([[9.0, 4.0, 5.0]])
        by_logits = first_scores.loss_views(own_TE, top_k=1, forced_logits_TE=z_TE)
        by_ids = first_scores.loss_views(own_TE, top_k=1, forced_ids_TK=torch.tensor([[1]]))
        assert [[9.0, 4.0, 5.0], [1.0, 2.0, 3.0]] == [view.logits_TE[0].tolist() for view in by_logits]
        assert [[1.0, 2.0, 3.0]] * 2 == [view.logits_TE[0].tolist() for view in by_ids]
        assert [[0], [2], [2], [1]] == [view.ids_TK[0].tolist() for view in [*by_logits, *by_ids]]
        for view in [*by_logits, *by_ids]:  # whichever is taken, the router learns from it
            (grad,) = torch.autograd.grad(view.logits_TE @ torch.tensor([1.0, -2.0, 0.5]).double(), own_TE)
            assert [[1.0, -2.0, 0.5]] == grad.tolist()


class TestVerdict:
    ASKED: Sequence[tuple[str, float | None]] = [
        ("none", None), ("random", None), ("biased", 0.0), ("biased", -0.5), ("biased", None), ("round_robin", None),
        ("ratio", 2.0), ("ratio", None), ("worst_rank", None), ("one_expert", None), ("one_node", None),
        ("alternating", None), ("worst rank", None), ("", None),
    ]  # fmt: skip

    @settings(pairs_agree, max_examples=200)
    @given(st.lists(st.sampled_from(ASKED), max_size=3))
    def test_verdicts_agree(self, asked: list[tuple[str, float | None]]) -> None:
        """Both let the same layers be built."""
        assert second.verdict(asked) == first.verdict(asked)

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ([], "legal"),
            ([("none", None)], "legal"),
            *[([(name, 1.5)], "legal") for name in second.STRATEGIES],
            ([("biased", 0.0)], "legal"),  # a deviation of 0 is one
            ([("biased", None)], "refused"),
            ([("ratio", None)], "refused"),
            ([("random", None), ("none", None)], "legal"),
            ([("random", None), ("biased", 0.0)], "refused"),
            ([("biased", 0.5), ("biased", -0.5)], "refused"),
            ([("biased", 0.5), ("none", None), ("biased", 0.5)], "free"),
            ([("radnom", None)], "refused"),
        ],
    )
    def test_by_hand(self, asked: list[tuple[str, float | None]], expected: str) -> None:
        """One strategy with what it needs is legal, two are refused, one named twice is free."""
        assert expected == first.verdict(asked) == second.verdict(asked)


ONE_ID, LOGITS = np.array([[0]]), np.zeros((1, 3))
BAD: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "mask of two": (first.legal_ids, second.legal_ids, (ONE_ID, 3), {"padding_T": np.array([True, False])}),
    "T < 0": (first.round_robin, second.round_robin, (-1, 1, 2), {}),
    "K = 0": (first.round_robin, second.round_robin, (2, 0, 2), {}),
    "K > E": (first.round_robin, second.round_robin, (2, 3, 2), {}),
    "rank -1": (first.round_robin, second.round_robin, (2, 1, 2), {"rank": -1}),
    "no rank": (first.balanced_sum, second.balanced_sum, ([],), {}),
    "uneven groups": (first.groups_used, second.groups_used, (ONE_ID, 3, 2), {}),
    "no groups": (first.groups_used, second.groups_used, (ONE_ID, 3, 0), {}),
    "groups of no route": (first.groups_used, second.groups_used, (ONE_ID + 3, 3, 3), {}),
    "logits of another shape": (
        first_scores.straight_through,
        second.straight_through,
        (LOGITS, np.zeros((1, 2))),
        {},
    ),
    **{
        f"views of {name}": (first_scores.loss_views, second.loss_views, (LOGITS,), {"top_k": 1, **options})
        for name, options in [
            ("nothing", {}),
            ("both", {"forced_logits_TE": LOGITS, "forced_ids_TK": ONE_ID}),
            ("logits of another shape", {"forced_logits_TE": np.zeros((2, 3))}),
            ("K > E", {"forced_logits_TE": LOGITS, "top_k": 4}),
            ("two ids for K = 1", {"forced_ids_TK": np.array([[0, 1]])}),
            ("two tokens", {"forced_ids_TK": np.array([[0], [1]])}),
            ("id E", {"forced_ids_TK": ONE_ID + 3}),
            ("id -1", {"forced_ids_TK": ONE_ID - 1}),
        ]
    },
    **{
        f"undecided {name}": (first_scores.undecided_weights, second.undecided_weights, (LOGITS, ids_TK), {})
        for name, ids_TK in [("id E", ONE_ID + 3), ("id -1", ONE_ID - 1), ("twice", np.array([[1, 1]]))]
    },
}


class TestRefusals:
    """What has no answer is refused by both."""

    @pytest.mark.parametrize("name", BAD)
    def test_refused(self, name: str) -> None:
        """A question without an answer raises in both oracles."""
        one, other, question, options = BAD[name]
        assert_refused(one, other, *question, **options)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("logits", "ids"),
        [
            ([0.0, math.nan, 1.0], [0]),
            ([0.0, math.inf, 1.0], [0]),
            ([-math.inf, math.nan, 1.0], [0]),  # undecided, and still no logits
            ([0.0, 1.0, 2.0], [3]),
            ([0.0, 1.0, 2.0], [-1]),
            ([0.0, 1.0, 2.0], [1, 1]),
        ],
    )
    def test_weights_of_no_route(self, kind: second_routing.Kind, logits: list[float], ids: list[int]) -> None:
        """NaN and +inf have no score, and an empty slot, an unknown or a repeated expert no weight."""
        logits_TE, ids_TK, gate = np.array([logits]), np.array([ids]), Gate(len(ids), kind)
        with pytest.raises(ValueError, match=r"logit|experts"):
            second.forced_weights(logits_TE, ids_TK, gate)
        with pytest.raises(ValueError, match=r"logit|experts"):
            first_weights(floats(logits_TE), ids_TK, gate)
