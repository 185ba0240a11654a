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

from moe_conformance.reference.routing import initial as first_initial
from moe_conformance.reference.routing import routes as first
from self_tests.chapters.routing.second import gate as second_gate
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
        if best:  # without ids, the oracle asks for those that it would choose itself
            assert actual == first_margins(case.logits_TE, None, gate)

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


def make_gate(T: int, D: int, E: int, seed: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Tokens, weight, bias and upstream gradient."""
    random = np.random.default_rng(seed)
    return random.normal(size=(T, D)), random.normal(size=(E, D)), random.normal(size=E), random.normal(size=(T, E))


gates = st.builds(make_gate, st.integers(0, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))


class TestGate:
    @pairs_agree
    @given(gates)
    def test_logits_and_gradients_agree(self, case: tuple[Floats, ...]) -> None:
        """Both add the bias, or none, to every token's logits, and give it the sum of their gradients."""
        x_TD, weight_ED, bias_E, upstream_TE = case
        leaves = [floats(array, leaf=True) for array in case[:3]]
        logits_TE = first.logits(*leaves)
        assert_close(second_gate.logits(x_TD, weight_ED, bias_E), logits_TE)
        found = torch.autograd.grad(logits_TE, leaves, floats(upstream_TE))
        for actual, expected in zip(found, second_gate.gradients(x_TD, weight_ED, upstream_TE), strict=True):
            assert_close(expected, actual)
        unbiased_TE = first.logits(*leaves[:2])
        assert_close(second_gate.logits(x_TD, weight_ED, np.zeros_like(bias_E)), unbiased_TE)


numbers = st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf])
new_weights = st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3)


class TestInitial:
    @pairs_agree
    @given(new_weights, st.booleans())
    def test_both_find_the_same_wrong(self, rows: list[list[float]], by_expert: bool) -> None:
        """NaN, infinity and equal rows are found by both, whatever the number of experts."""
        value = np.array(rows, dtype=np.float32).reshape(-1, 2)
        expected = second_gate.usable(value, by_expert=by_expert)
        assert expected == first_initial.usable(torch.from_numpy(value), by_expert=by_expert)

    @pairs_agree
    @given(st.dictionaries(st.integers(0, 7), new_weights, max_size=4))
    def test_both_list_the_same_ranks(self, held: dict[int, list[list[float]]]) -> None:
        """Other numbers, signs of zero and shapes are found by both."""
        arrays = {rank: np.array(rows, dtype=np.float32).reshape(-1, 2) for rank, rows in held.items()}
        found = first_initial.differing({rank: torch.from_numpy(each) for rank, each in arrays.items()})
        assert second_gate.differing(arrays) == found

    def test_other_dtypes_differ(self) -> None:
        """The same number in another dtype is another parameter."""
        assert [1] == first_initial.differing({0: torch.ones(1), 1: torch.ones(1, dtype=torch.bfloat16)})
