"""Capacity and drops, worked out twice: reference.capacity.limits by sorting slots, the longhand by trying readings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.capacity import drops as first_drops
from moe_conformance.reference.capacity import limits as first
from self_tests.chapters.capacity.second import drops as second_drops
from self_tests.chapters.capacity.second import limits as second
from self_tests.chapters.capacity.second.drops import Policy
from self_tests.oracles.agreement import floats
from self_tests.oracles.asked_twice import assert_agree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
POLICIES: list[Policy] = ["any", "weight", "position", "choice"]
ROUNDING = 2.0**-24


class Drop(NamedTuple):
    """One rank's routing, and what is said to have been kept of it."""

    ids_TK: Ints
    weights_TK: Floats
    errors_TK: Floats
    kept_TK: Bools
    experts: int
    capacity: int


def make_ids(random: np.random.Generator, tokens: int, slots: int, experts: int, empty: float = 0.2) -> Ints:
    """Different experts in each token, low ids the favourites; some slots empty."""
    ids_TK = np.full((tokens, slots), -1, dtype=np.int64)
    favour = 0.5 ** np.arange(experts)
    for token in range(tokens):
        chosen = random.choice(experts, size=slots, replace=False, p=favour / favour.sum())
        ids_TK[token] = np.where(random.random(slots) < empty, -1, chosen)
    return ids_TK


@st.composite
def drops(draw: st.DrawFn, *, most_tokens: int = 6) -> Drop:
    """Mostly legal drops: sixteenths as weights, for ties and zeros, errors as large, and up to two slots changed."""
    experts = draw(st.integers(1, 5))
    slots = draw(st.integers(1, experts))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    ids_TK = make_ids(random, draw(st.integers(0, most_tokens)), slots, experts)
    weights_TK = random.integers(0, draw(st.sampled_from([2, 4, 17])), size=ids_TK.shape) / 16
    errors_TK = random.choice([0.0, 1 / 32, 1 / 16], size=ids_TK.shape) * draw(st.sampled_from([0, 1]))
    capacity = draw(st.integers(0, 5))
    policy = draw(st.sampled_from(POLICIES[1:]))
    kept_TK = second_drops.keep(ids_TK, experts, capacity=capacity, policy=policy, weights_TK=weights_TK)
    for token, slot in zip(*np.nonzero((ids_TK >= 0) & (weights_TK == 0)), strict=True):
        kept_TK[token, slot] &= bool(random.integers(2))
    chosen = np.argwhere(ids_TK >= 0)
    for _ in range(draw(st.integers(0, 2)) if len(chosen) else 0):
        token, slot = chosen[random.integers(len(chosen))]
        kept_TK[token, slot] ^= True
    return Drop(ids_TK, weights_TK, errors_TK, kept_TK, experts, capacity)


class TestCapacities:
    @settings(pairs_agree, max_examples=300)
    @given(st.integers(0, 41), st.integers(1, 13), st.integers(0, 12), st.data())
    def test_capacities_agree(self, tokens: int, experts: int, less: int, data: st.DataObject) -> None:
        """Both name the same legal capacities, a few roundings beside whole numbers too, and with a minimum."""
        top_k = max(1, experts - less)
        whole = data.draw(st.integers(0, 7)) * experts / max(1, top_k * tokens)
        nudged = whole * (1 + data.draw(st.integers(-6, 6)) * ROUNDING)
        factor = data.draw(st.sampled_from([nudged, nudged, 0.0, 0.1, 1 / 3, 0.5, 1.0, 1.25, 2.0, 1e-9]))
        options = {"minimum": data.draw(st.integers(0, 9)), "rounding": data.draw(st.sampled_from(["up", "down"]))}
        assert_agree(first.capacities, second.capacities, tokens, top_k, experts, factor=factor, **options)

    @pytest.mark.parametrize(
        ("question", "factor", "minimum", "expected"),
        [
            ((6, 1, 3), 1.5, 0, [3, 4]),  # 9 / 3: six tokens, three experts, half as many places again
            ((10, 3, 8), 1.25, 5, [5]),
            ((8, 3, 4), 1.0, 7, [7]),
            ((10, 3, 5), 1.0, 7, [7]),  # the minimum covers both
            ((7, 2, 4), 0.25, 0, [1]),  # 0.875
            ((0, 2, 4), 1.0, 0, [0]),
            ((0, 2, 3), 1.0, 2, [2]),
            ((5, 2, 3), 0.0, 0, [0]),
            ((3, 1, 3), 5 * (1 + 4 * ROUNDING), 0, [5, 6]),  # x = 5 + 20 roundings, and 4 x is as much and more
            ((3, 1, 3), 5 * (1 + 5 * ROUNDING), 0, [6]),  # 25 are too many
            ((3, 1, 3), 5 * (1 - 3 * ROUNDING), 0, [5, 6]),
            ((3, 1, 3), 5 * (1 - 4 * ROUNDING), 0, [5]),  # 20 off, but 4 x is 80 roundings squared short of 20
            ((4, 1, 4), 5 * (1 + 4 * ROUNDING), 0, [5, 6]),  # E a power of two, but a has more than 24 bits
            ((1, 1, 1), 1 + 4 * ROUNDING, 0, [2]),  # a = 2^22 + 1: everything fits float32
            ((1, 2, 2), 1 + 4 * ROUNDING, 0, [2]),  # and 2 a
            ((4, 1, 4), 1 + 4 * ROUNDING, 0, [1, 2]),  # but 4 a is 2^24 + 4
            ((2, 2, 4), 1 + 4 * ROUNDING, 0, [1, 2]),
            ((2**24 - 2**12, 1, 2**12), 1.0, 0, [2**12 - 1]),
            ((2**24, 1, 2**12), 1.0, 0, [2**12, 2**12 + 1]),  # a K T is not below 2^24
            ((1, 1, 2**22 - 1), 2.0**22, 0, [1, 2]),  # x = 1 + 1 / (2^22 - 1), off by 2^-22 of x exactly
            ((1, 1, 2**22 + 1), 2.0**22, 0, [1, 2]),  # x = 1 - 1 / (2^22 + 1), likewise
        ],
    )
    def test_by_hand(self, question: tuple[int, int, int], factor: float, minimum: int, expected: list[int]) -> None:
        """Of T tokens, K choices and E experts: the mean number of choices times the factor, rounded up."""
        found = assert_agree(first.capacities, second.capacities, *question, factor=factor, minimum=minimum)
        assert expected == found

    @pairs_agree
    @given(st.integers(0, 200), st.integers(1, 8), st.integers(0, 60), st.sampled_from([0.3, 1.0, 1.1, 1.25, 7 / 3]))
    def test_honest_float32_is_legal(self, tokens: int, top_k: int, more: int, factor: float) -> None:
        """Every order of multiplying and dividing in float32, and in float64, is rounded to a legal capacity."""
        experts = top_k + more
        legal = first.capacities(tokens, top_k, experts, factor=factor)
        lower = first.capacities(tokens, top_k, experts, factor=factor, rounding="down")
        for number in (np.float32, np.float64):
            f, k, t, e = (number(value) for value in (factor, top_k, tokens, experts))
            orders = [f * k * t / e, k * t / e * f, t / e * k * f, f / e * t * k, k / e * t * f, f * (k / e) * t]
            orders += [number(1.0) / e * f * t * k, t * f * (k / e), f * (k * t) / e]
            assert {math.ceil(x) for x in orders} <= set(legal)
            assert {math.floor(x) for x in orders} <= set(lower)

    def test_float32_needs_the_freedom(self) -> None:
        """Seven tokens that choose all three experts fill seven places, and 1 / 3 * 7 * 3 is more in float32."""
        x = np.float32(1) / np.float32(3) * np.float32(7) * np.float32(3)
        assert (8, (7, 8)) == (math.ceil(x), first.capacities(7, 3, 3, factor=1.0))


class TestLoads:
    @pairs_agree
    @given(drops())
    def test_loads_and_fits_agree(self, drop: Drop) -> None:
        """Both count the same choices and keep as many as fit, empty slots counting nowhere."""
        n_E = assert_agree(first.loads, second.loads, drop.ids_TK, drop.experts)
        kept_E = assert_agree(first.fits, second.fits, drop.ids_TK, drop.experts, drop.capacity)
        assert [min(n, drop.capacity) for n in n_E] == kept_E

    @pairs_agree
    @given(st.lists(drops(), min_size=1, max_size=3), st.integers(0, 5), st.integers(1, 4))
    def test_lossless_capacities_agree(self, ranks: list[Drop], minimum: int, multiple: int) -> None:
        """Both find the same capacity that drops nothing on any rank of the group."""
        ids = [rank.ids_TK for rank in ranks]
        options = {"minimum": minimum, "multiple": multiple}
        C = assert_agree(first.lossless_capacity, second.lossless_capacity, ids, 5, **options)
        largest = max(max(second.loads(ids_TK, 5)) for ids_TK in ids)
        assert (True, 0) == (max(minimum, largest) <= C < max(minimum, largest) + multiple, C % multiple)

    def test_padded_rows(self) -> None:
        """C places from every rank; where unchosen tokens fill them, no more than there are tokens."""
        for tokens in range(6):
            for capacity in range(6):
                assert_agree(first.padded_rows, second.padded_rows, tokens, capacity)


def judged(drop: Drop, policy: Policy, *, errors: bool = True) -> list[bool]:
    """What both say of a drop under a policy."""
    options: dict[str, Any] = {"capacity": drop.capacity, "policy": policy, "weights_TK": drop.weights_TK}
    if errors:
        options["errors_TK"] = drop.errors_TK
    found = assert_agree(
        first_drops.legal_drop, second_drops.legal_drop, drop.kept_TK, drop.ids_TK, drop.experts, **options
    )
    assert drop.experts == len(found)
    return list(found)


class TestDrops:
    @pytest.mark.parametrize("policy", POLICIES)
    @settings(pairs_agree, max_examples=120)
    @given(drops(), st.booleans())
    def test_verdicts_agree(self, policy: Policy, drop: Drop, errors: bool) -> None:
        """Both find the same experts' drops legal, with ties, weights of zero and errors of weights."""
        assert_agree(
            first_drops.legal_drop,
            second_drops.legal_drop,
            drop.kept_TK,
            drop.ids_TK,
            drop.experts,
            capacity=drop.capacity,
            policy=policy,
            weights_TK=drop.weights_TK,
            errors_TK=drop.errors_TK if errors else None,
        )

    @pytest.mark.parametrize("policy", ["any", "position", "choice"])
    @pairs_agree
    @given(drops())
    def test_verdicts_without_weights_agree(self, policy: Policy, drop: Drop) -> None:
        """Without weights every slot has chosen, and both agree on what is legal."""
        options: dict[str, Any] = {"capacity": drop.capacity, "policy": policy}
        question = (drop.kept_TK, drop.ids_TK, drop.experts)
        assert_agree(first_drops.legal_drop, second_drops.legal_drop, *question, **options)

    @pytest.mark.parametrize("policy", POLICIES[1:])
    @pairs_agree
    @given(drops())
    def test_what_is_kept_agrees_and_is_legal(self, policy: Policy, drop: Drop) -> None:
        """Both keep the same slots, as many as fit, and call that legal under the policy and under any."""
        options: dict[str, Any] = {"capacity": drop.capacity, "policy": policy, "weights_TK": drop.weights_TK}
        kept = assert_agree(first_drops.keep, second_drops.keep, drop.ids_TK, drop.experts, **options)[1]
        made = drop._replace(kept_TK=np.array(kept, dtype=bool).reshape(drop.ids_TK.shape))
        assert [True] * drop.experts == judged(made, policy) == judged(made, "any", errors=False)
        stayed = np.where(made.kept_TK, drop.ids_TK, -1)
        assert second.fits(drop.ids_TK, drop.experts, drop.capacity) == second.loads(stayed, drop.experts)

    # Expert 0 is chosen by tokens 0 (slot 1), 1 (slot 0), 2 (slot 1) and 3 (slot 0), with these weights.
    IDS = np.array([[1, 0], [0, 1], [-1, 0], [0, 2]])
    WEIGHTS = np.array([[0.0, 0.25], [0.5, 0.0], [0.0, 0.5], [0.125, 0.0]])

    @pytest.mark.parametrize(
        ("policy", "capacity", "kept", "legal"),
        [
            ("any", 2, [0, 3], True),
            ("any", 2, [0], False),  # a place left and a slot dropped
            ("any", 2, [0, 1, 2], False),  # more than there are places
            ("any", 4, [0, 1, 2, 3], True),
            ("any", 9, [0, 1, 2], False),
            ("any", 0, [], True),
            ("weight", 2, [1, 2], True),  # the two of 0.5
            ("weight", 1, [2], True),  # either of the tied
            ("weight", 1, [1], True),
            ("weight", 1, [0], False),
            ("weight", 3, [0, 1, 2], True),
            ("weight", 3, [1, 2, 3], False),  # 0.25 dropped before 0.125
            ("position", 2, [0, 1], True),
            ("position", 2, [1, 2], False),
            ("position", 3, [0, 1, 2], True),
            ("choice", 2, [1, 3], True),  # the first choices of tokens 1 and 3, before the second one of 0
            ("choice", 2, [0, 1], False),
            ("choice", 3, [0, 1, 3], True),
            ("choice", 3, [1, 2, 3], False),
        ],
    )
    def test_by_hand(self, policy: Policy, capacity: int, kept: list[int], legal: bool) -> None:
        """Worked out from the list of expert 0's four slots; the other experts keep all or, full, none."""
        kept_TK = np.array([[token in kept and e == 0 for e in row] for token, row in enumerate(self.IDS)])
        drop = Drop(self.IDS, self.WEIGHTS, np.zeros((4, 2)), kept_TK, 3, capacity)
        # The slots of experts 1 and 2 weigh 0: by weight they may be absent.
        assert [legal, True, True] == judged(drop, policy)

    @pytest.mark.parametrize(
        ("errors", "legal"),
        # 0.25 (token 0) was dropped, 0.125 (token 3) kept. Both 1/16 off: 0.1875 either way, no order is sure.
        [([0.0, 0.0], False), ([1 / 16, 0.0], False), ([1 / 16, 1 / 32], False), ([1 / 16, 1 / 16], True)],
    )
    def test_errors_of_both_weights_by_hand(self, errors: list[float], legal: bool) -> None:
        """A dropped weight surely exceeds a kept one only beyond the errors of both."""
        errors_TK = np.zeros((4, 2))
        errors_TK[0, 1], errors_TK[3, 0] = errors
        kept_TK = np.array([[False, False], [True, False], [False, True], [True, False]])
        drop = Drop(self.IDS, self.WEIGHTS, errors_TK, kept_TK, 3, 3)
        assert [legal, True, True] == judged(drop, "weight")

    def test_weights_may_belong_to_a_graph(self) -> None:
        """Weights and errors that want gradients are judged as the numbers they are."""
        w_TK, errors_TK = floats(self.WEIGHTS, leaf=True), floats(np.zeros((4, 2)), leaf=True)
        ids_TK, options = torch.from_numpy(self.IDS), {"capacity": 2, "policy": "weight"}
        kept_TK = first_drops.keep(ids_TK, 3, weights_TK=w_TK, **options)
        assert second_drops.keep(self.IDS, 3, weights_TK=self.WEIGHTS, **options).tolist() == kept_TK.tolist()
        legal_E = first_drops.legal_drop(kept_TK, ids_TK, 3, weights_TK=w_TK, errors_TK=errors_TK, **options)
        assert [True] * 3 == legal_E.tolist()

    @pytest.mark.parametrize(("error", "legal"), [(0.0, False), (3 / 32, False), (1 / 8, True), (1 / 4, True)])
    def test_a_weight_that_may_be_zero_may_be_absent(self, error: float, legal: bool) -> None:
        """The slot of 1/8 that found room but was not kept is legal only if it may weigh 0, at its error exactly."""
        errors_TK = np.zeros((4, 2))
        errors_TK[3, 0] = error
        kept_TK = np.array([[False, True], [True, False], [False, True], [False, False]])
        drop = Drop(self.IDS, self.WEIGHTS, errors_TK, kept_TK, 3, 4)
        for policy in POLICIES:
            assert [legal, True, True] == judged(drop, policy)
