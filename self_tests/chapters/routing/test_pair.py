"""Routing, worked out twice: reference.routing.routes with tensors and autograd, the longhand with loops."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.routing import routes as first
from self_tests.chapters.routing.second import routes as second
from self_tests.chapters.routing.second.routes import Gate, Limit
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]
KINDS = get_args(second.Kind)
pairs_agree = settings(max_examples=100, deadline=None, derandomize=True)

# Values whose scores and sums of scores are equal only where the logits are. They reach into both tails:
# log(1 + exp(l)) is still 1e-11 above l at 25; sigmoid is 1 at 60, 1e-39 at -90 and 1e-304 at -700.
LOGITS = [-700.0, -90.7, -30.3, -8.21, -2.7, -1.13, -0.4, 0.0, 0.31, 1.3, 2.29, 6.1, 19.7, 20.9, 25.1, 60.3]
BIASES = [-1.71, -0.313, -0.02, 0.0, 0.137, 0.29, 0.911, 2.3]


class Case(NamedTuple):
    """Logits to route, how, and the upstream gradient of the weights."""

    logits_TE: Floats
    gate: Gate
    upstream_TK: Floats


def first_route(logits_TE: Floats, gate: Gate) -> first.Routed:
    """Ask the first oracle for the routing that `gate` describes."""
    groups, rule = groups_of(gate)
    return first.route(
        floats(logits_TE),
        top_k=gate.slots,
        score=gate.kind,
        normalise=gate.normalise,
        scale=gate.scale,
        bias_E=None if gate.bias is None else torch.tensor(gate.bias, dtype=torch.float64),
        groups=groups,
        group_score=rule,
    )


def groups_of(gate: Gate) -> tuple[tuple[int, int] | None, second.GroupRule]:
    """The limit in the first oracle's words."""
    return (None, "max") if gate.limit is None else ((gate.limit.groups, gate.limit.chosen), gate.limit.rule)


def first_margins(logits_TE: Floats, ids_TK: Tensor | None, gate: Gate) -> list[float]:
    """Ask the first oracle for the margins of a choice, or of its own."""
    groups, rule = groups_of(gate)
    return first.margins(
        floats(logits_TE),
        ids_TK,
        top_k=gate.slots,
        score=gate.kind,
        bias_E=None if gate.bias is None else torch.tensor(gate.bias, dtype=torch.float64),
        groups=groups,
        group_score=rule,
    ).tolist()


def first_weights(logits_TE: Tensor, ids_TK: NDArray[np.int64], gate: Gate) -> Tensor:
    """Ask the first oracle for the weights of a given choice."""
    return first.weights(
        logits_TE, torch.from_numpy(ids_TK), score=gate.kind, normalise=gate.normalise, scale=gate.scale
    )


@st.composite
def limits(draw: st.DrawFn) -> tuple[int, int, Limit | None]:
    """Numbers of experts and slots, with a limit that can be kept or with none."""
    if draw(st.sampled_from(["groups", "groups", "none"])) == "none":
        experts = draw(st.integers(1, 9))
        return experts, draw(st.integers(1, experts)), None
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    chosen = draw(st.integers(1, groups))
    slots = draw(st.integers(1, chosen * size))
    possible = {"max": 1, "top2_sum": 2, "topk_sum": slots // chosen}
    rules = [rule for rule, addends in possible.items() if 1 <= addends <= size]
    return groups * size, slots, Limit(groups, chosen, draw(st.sampled_from(rules)))


@st.composite
def cases(draw: st.DrawFn, *, ties: bool = True, most_tokens: int = 3) -> Case:
    """Any gate over logits with ties and both tails; without ties, over distinct logits of moderate size."""
    experts, slots, limit = draw(limits())
    tokens = draw(st.integers(0, most_tokens))
    kind = draw(st.sampled_from(KINDS))
    biases = st.lists(st.sampled_from(BIASES), min_size=experts, max_size=experts)
    gate = Gate(
        slots,
        kind,
        tuple(draw(biases)) if draw(st.booleans()) else None,
        limit,
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5, 0.3])),
    )
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    shape = (tokens, experts)
    logits_TE = random.choice(LOGITS, size=shape) if ties else random.normal(size=shape)
    if ties and limit is None and experts > slots and draw(st.booleans()):
        masked = draw(st.integers(0, experts - 1))  # others are left to choose from
        logits_TE[:, masked] = -math.inf
    return Case(logits_TE, gate, random.normal(size=(tokens, slots)))


class TestPair:
    @pytest.mark.parametrize("kind", KINDS)
    @pairs_agree
    @given(cases())
    def test_choice_and_weights_agree(self, kind: second.Kind, case: Case) -> None:
        """Both oracles choose the same experts in the same order and weigh them alike, ties included."""
        gate = replace(case.gate, kind=kind)
        ids_TK, weights_TK = second.route(case.logits_TE, gate)
        routed = first_route(case.logits_TE, gate)
        assert torch.int64 == routed.ids_TK.dtype
        assert (ids_TK.shape, ids_TK.tolist()) == (tuple(routed.ids_TK.shape), routed.ids_TK.tolist())
        assert_close(weights_TK, routed.weights_TK)

    @pytest.mark.parametrize("kind", KINDS)
    @pairs_agree
    @given(cases())
    def test_gradients_agree(self, kind: second.Kind, case: Case) -> None:
        """Autograd through the first oracle gives what the formulas of the second one give."""
        gate = replace(case.gate, kind=kind)
        ids_TK, _ = second.route(case.logits_TE, gate)
        logits_TE = floats(case.logits_TE, leaf=True)
        first_weights(logits_TE, ids_TK, gate).backward(floats(case.upstream_TK))
        assert logits_TE.grad is not None
        # The addends of a quotient's or of a softmax's slope cancel; those of the other scores stand alone.
        cancels = gate.normalise or kind.startswith("softmax")
        addend = gate.scale * float(np.abs(case.upstream_TK).max(initial=0.0)) if cancels else 0.0
        expected = second.gradient(case.logits_TE, ids_TK, gate, case.upstream_TK)
        assert_close(expected, logits_TE.grad, addend=addend)

    @pairs_agree
    @given(cases(), st.randoms(use_true_random=False))
    def test_weights_of_any_choice_agree(self, case: Case, random: Random) -> None:
        """Both weigh any given experts, not only those that they would choose, in any order of slots."""
        T, E = case.logits_TE.shape
        finite = [e for e in range(E) if np.isfinite(case.logits_TE[:, e]).all()]
        assume(len(finite) >= case.gate.slots)
        ids = [random.sample(finite, case.gate.slots) for _ in range(T)]
        expected = [
            second.weights_of_chosen(row, chosen, case.gate)
            for row, chosen in zip(case.logits_TE.tolist(), ids, strict=True)
        ]
        ids_TK = np.array(ids, dtype=np.int64).reshape(T, case.gate.slots)
        actual = first_weights(floats(case.logits_TE), ids_TK, case.gate)
        assert_close(np.array(expected).reshape(T, case.gate.slots), actual)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_logits_are_widened_first(self, kind: second.Kind, dtype: torch.dtype) -> None:
        """Logits and biases of fewer bits are taken as exact numbers and computed in float64."""
        narrow_TE = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
        bias_E = torch.tensor([0.3, -0.2, 0.1, 0.7, -0.6, 0.0], dtype=dtype)
        gate = Gate(3, kind, tuple(bias_E.double().tolist()), normalise=True, scale=2.5)
        ids_TK, weights_TK = second.route(narrow_TE.double().numpy(), gate)
        routed = first.route(narrow_TE, top_k=3, score=kind, normalise=True, scale=2.5, bias_E=bias_E)
        assert ids_TK.tolist() == routed.ids_TK.tolist()
        assert_close(weights_TK, routed.weights_TK)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("normalise", [False, True])
    def test_autograd_of_the_weights_is_their_derivative(self, kind: second.Kind, normalise: bool) -> None:
        """Gradcheck: numeric differences of the first oracle's weights are its autograd gradients."""
        logits_TE = floats(np.random.default_rng(5).normal(size=(3, 7)), leaf=True)
        gate = Gate(3, kind, normalise=normalise, scale=2.5)
        ids_TK = np.array([[4, 0, 6], [1, 2, 3], [5, 6, 0]])
        assert torch.autograd.gradcheck(lambda logits: first_weights(logits, ids_TK, gate), (logits_TE,))


class TestMargins:
    @settings(pairs_agree, max_examples=200)
    @given(cases(ties=False, most_tokens=8), st.booleans(), st.randoms(use_true_random=False))
    def test_margins_agree(self, case: Case, best: bool, random: Random) -> None:
        """Both measure the same margin, of their own choice and of any other."""
        gate, (T, E) = case.gate, case.logits_TE.shape
        ids_TK = second.route(case.logits_TE, gate)[0]
        if not best:
            ids_TK = np.array([random.sample(range(E), gate.slots) for _ in range(T)]).reshape(T, gate.slots)
        choices = [second.choice_values(row, gate) for row in case.logits_TE.tolist()]
        expected = [
            second.margin_of_token(choice, ids, gate.limit)
            for choice, ids in zip(choices, ids_TK.tolist(), strict=True)
        ]
        actual = first_margins(case.logits_TE, torch.from_numpy(ids_TK), gate)
        assert expected == pytest.approx(actual, rel=1e-12, abs=1e-12)

    @pytest.mark.parametrize(
        ("ids", "chosen", "rule", "margin"),
        [
            ([0], 1, "max", 0.2),  # .9 before group 1's .7; within the group .4
            ([0], 1, "top2_sum", 0.05),  # group 0's 1.4 before 1.3: .1 for two scores
            ([2], 1, "top2_sum", -0.05),  # the better group lost by as much
            ([3], 1, "top2_sum", -0.1),  # and in its own group .6 lost against .7
            ([0], 2, "top2_sum", 0.2),  # whichever the second group was: at worst group 1 and its .7
            ([0, 2], 1, "max", -math.inf),  # two groups where one is open
            ([1, 2], 3, "max", -0.4),  # all groups open: .5 lost against .9
        ],
    )
    def test_by_hand(self, ids: list[int], chosen: int, rule: second.GroupRule, margin: float) -> None:
        """The smaller lead decides: of the worst chosen expert, or of its group, shared by the scores it sums."""
        # Scores .9 .5 | .7 .6 | .1 .0; sums 1.4, 1.3 and .1.
        logits = [0.9, 0.5, 0.7, 0.6, 0.1, 0.0]
        gate = Gate(len(ids), "softmax_topk", limit=Limit(3, chosen, rule))
        assert [margin] == pytest.approx(first_margins(np.array([logits]), torch.tensor([ids]), gate))
        assert margin == pytest.approx(second.margin_of_token(logits, ids, gate.limit))

    def test_nothing_else_to_choose(self) -> None:
        """With K = E no other choice exists, so the margin is infinite; an exact tie has margin 0."""
        logits_TE = np.array([[2.0, 2.0, 1.0]])
        assert [math.inf] == first_margins(logits_TE, torch.tensor([[0, 1, 2]]), Gate(3, "sigmoid"))
        assert [0.0] == first_margins(logits_TE, torch.tensor([[1]]), Gate(1, "sigmoid"))

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_the_own_choice(self, kind: second.Kind) -> None:
        """Without ids, the margins are those of the experts that the oracle itself would choose."""
        logits_TE = np.random.default_rng(6).normal(size=(4, 6))
        gate = Gate(2, kind, bias=(0.4, -0.9, 0.0, 0.3, 0.2, -0.1), limit=Limit(3, 2, "top2_sum"))
        own_TK = torch.from_numpy(second.route(logits_TE, gate)[0])
        assert first_margins(logits_TE, own_TK, gate) == first_margins(logits_TE, None, gate)

    @pairs_agree
    @given(cases(ties=False, most_tokens=8), st.sampled_from([1e-3, 0.1, 0.5]), st.randoms(use_true_random=False))
    def test_a_margin_bounds_the_harm_of_rounding(self, case: Case, wrong: float, random: Random) -> None:
        """Scores wrong by up to d keep a choice with a margin above 2d, and never choose one below -2d."""
        gate = replace(case.gate, kind="softmax_topk", bias=None)  # here the logits are the selection scores
        shifts = np.array([[random.uniform(-wrong, wrong) for _ in row] for row in case.logits_TE])
        shaken_TE = case.logits_TE + shifts.reshape(case.logits_TE.shape)
        ids_TK, shaken_TK = first_route(case.logits_TE, gate).ids_TK, first_route(shaken_TE, gate).ids_TK
        of_shaken = first_margins(case.logits_TE, shaken_TK, gate)
        assert [] == [margin for margin in of_shaken if margin < -2 * wrong]
        for t, margin in enumerate(first_margins(case.logits_TE, ids_TK, gate)):
            if margin > 2 * wrong:
                assert set(ids_TK[t].tolist()) == set(shaken_TK[t].tolist())


class TestDegenerate:
    @pytest.mark.parametrize("kind", KINDS)
    def test_ties_go_to_the_lowest_id(self, kind: second.Kind) -> None:
        """Among equal logits both take the lower expert first; that is legally free, but they must agree."""
        logits_TE = np.array([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
        expected = [[1, 2, 4, 0], [0, 1, 2, 3]]
        assert expected == first_route(logits_TE, Gate(4, kind)).ids_TK.tolist()
        assert expected == second.route(logits_TE, Gate(4, kind))[0].tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_masked_experts_get_neither_weight_nor_gradient(self, kind: second.Kind) -> None:
        """A logit of -inf, chosen because K leaves no other, has weight and gradient 0 and spoils none."""
        logits_TE = np.array([[-math.inf, 0.7, -math.inf, -1.2]])
        gate = Gate(3, kind, normalise=True)
        ids_TK, weights_TK = second.route(logits_TE, gate)
        routed = first_route(logits_TE, gate)
        assert [[1, 3, 0]] == ids_TK.tolist()
        assert [[1, 3, 0]] == routed.ids_TK.tolist()
        assert 0.0 == routed.weights_TK[0, 2].item()
        assert_close(weights_TK, routed.weights_TK)
        leaf, upstream_TK = floats(logits_TE, leaf=True), np.array([[0.3, -1.1, 0.8]])
        first_weights(leaf, ids_TK, gate).backward(floats(upstream_TK))
        assert leaf.grad is not None
        assert [0.0, 0.0] == leaf.grad[0, [0, 2]].tolist()
        assert_close(second.gradient(logits_TE, ids_TK, gate, upstream_TK), leaf.grad)

    @pytest.mark.parametrize("kind", ["sigmoid", "sqrtsoftplus"])
    def test_a_sum_of_zero_gives_weights_of_zero(self, kind: second.Kind) -> None:
        """Where every chosen score is 0 there is no quotient: weights and gradients are 0, never NaN."""
        logits_TE, gate = np.full((1, 3), -math.inf), Gate(2, kind, normalise=True)
        leaf, ids_TK = floats(logits_TE, leaf=True), np.array([[0, 1]])
        weights_TK = first_weights(leaf, ids_TK, gate)
        weights_TK.backward(floats(np.array([[1.3, -0.4]])))
        assert leaf.grad is not None
        assert [[0.0, 0.0]] == weights_TK.tolist()
        assert [[0.0, 0.0, 0.0]] == leaf.grad.tolist()
        assert [[0.0, 0.0]] == second.route(logits_TE, gate)[1].tolist()

    def test_an_excluded_expert_never_wins_below_zero(self) -> None:
        """Choice values below 0 still beat those of excluded groups: exclusion is -inf and not 0."""
        # Logits are the choice values here. Group 0 = [-1, -9], best -1; group 1 = [-2, -3], best -2.
        # Under "max" group 0 is chosen; its second expert (-9) is taken before group 1's -2 and any 0.
        logits_TE = np.array([[-1.0, -9.0, -2.0, -3.0]])
        gate = Gate(2, "softmax_topk", limit=Limit(2, 1, "max"))
        assert [[0, 1]] == first_route(logits_TE, gate).ids_TK.tolist()
        assert [[0, 1]] == second.route(logits_TE, gate)[0].tolist()


class TestRefusals:
    """What has no answer is refused: a NaN of the oracle would agree with anybody's NaN."""

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_score(self, kind: second.Kind, bad: float) -> None:
        """NaN and +inf logits are refused."""
        with pytest.raises(ValueError, match="logit"):
            first_route(np.array([[0.0, bad, 1.0]]), Gate(1, kind))

    @pytest.mark.parametrize("kind", ["softmax", "softmax_topk"])
    def test_no_expert_left(self, kind: second.Kind) -> None:
        """A softmax over nothing but -inf is refused, by the scores already."""
        with pytest.raises(ValueError, match="-inf"):
            first.scores(torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]]), kind)

    def test_no_chosen_expert_left(self) -> None:
        """A softmax over chosen logits of -inf alone is refused, whatever the others are."""
        with pytest.raises(ValueError, match="-inf"):
            first_weights(floats(np.array([[0.0, -math.inf]])), np.array([[1]]), Gate(1, "softmax_topk"))

    def test_empty_slots_are_not_weighed(self) -> None:
        """An id of -1 has no score."""
        with pytest.raises(ValueError, match="-1"):
            first_weights(floats(np.zeros((1, 3))), np.array([[0, -1]]), Gate(2))

    def test_unknown_scores(self) -> None:
        """A misspelt score is refused by name."""
        with pytest.raises(ValueError, match="sotfmax"):
            first.scores(torch.zeros(1, 2), "sotfmax")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("experts", "gate"),
        [
            (3, Gate(4)),
            (3, Gate(0)),
            (5, Gate(1, limit=Limit(2, 1, "max"))),
            (6, Gate(1, limit=Limit(3, 4, "max"))),
            (6, Gate(1, limit=Limit(3, 0, "max"))),
            (6, Gate(3, limit=Limit(3, 1, "max"))),
            (3, Gate(1, limit=Limit(3, 2, "top2_sum"))),
            (6, Gate(1, limit=Limit(3, 2, "topk_sum"))),
        ],
        ids=["K>E", "K=0", "uneven", "chosen>G", "chosen=0", "few experts", "no second best", "no share"],
    )
    def test_gates_that_cannot_route(self, experts: int, gate: Gate) -> None:
        """More slots than experts, uneven groups, or groups too few or too small for their rule are refused."""
        with pytest.raises(ValueError, match=r"groups|top_k"):
            first_route(np.zeros((1, experts)), gate)

    @pytest.mark.parametrize("ids", [[0, 0], [0, 3], [-1, 2]])
    def test_margins_of_no_choice(self, ids: list[int]) -> None:
        """A repeated or unknown expert is not a choice of K and has no margin."""
        with pytest.raises(ValueError, match="different experts"):
            first_margins(np.zeros((1, 3)), torch.tensor([ids]), Gate(2))
