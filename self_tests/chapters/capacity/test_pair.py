"""Capacity and drops, worked out twice: reference.capacity.limits by sorting slots, the longhand by trying readings."""

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

from moe_conformance.reference.capacity import drops as first_drops
from moe_conformance.reference.capacity import limits as first
from self_tests.chapters.capacity.second import drops as second_drops
from self_tests.chapters.capacity.second import limits as second
from self_tests.chapters.capacity.second.drops import Policy
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import by_hand, rows

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


# Expert 0 is chosen by tokens 0 (slot 1), 1 (slot 0), 2 (slot 1) and 3 (slot 0), with these weights. The slots of
# experts 1 and 2 weigh 0: by weight they may be absent.
IDS = np.array([[1, 0], [0, 1], [-1, 0], [0, 2]])
WEIGHTS = np.array([[0.0, 0.25], [0.5, 0.0], [0.0, 0.5], [0.125, 0.0]])


def of_expert_0(legal_drop: Callable[..., Any], tensor: Callable[[Any], Any]) -> Callable[..., Any]:
    """Whether the drop of expert 0 is legal, if these tokens keep its slot, and weights may be so wrong."""

    def verdict(kept: list[int], capacity: int, policy: Policy, errors: Sequence[float] = (0.0,) * 4) -> bool:
        kept_TK = np.array([[token in kept and e == 0 for e in row] for token, row in enumerate(IDS)])
        errors_TK = np.where(IDS == 0, np.array(errors)[:, None], 0.0)
        options = {"weights_TK": tensor(WEIGHTS), "errors_TK": tensor(errors_TK)}
        legal = legal_drop(tensor(kept_TK), tensor(IDS), 3, capacity=capacity, policy=policy, **options).tolist()
        assert legal[1:] == [True, True]
        return bool(legal[0])

    return verdict


def in_graph(array: Any) -> Tensor:
    """Weights and errors want gradients: they are judged as the numbers they are."""
    tensor = torch.from_numpy(array)
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


test_by_hand = by_hand(
    *rows(
        of_expert_0(first_drops.legal_drop, in_graph),
        of_expert_0(lambda *drop, **options: np.array(second_drops.legal_drop(*drop, **options)), np.array),
        ("as many as places", ([0, 3], 2, "any"), True),
        ("a place left and a slot dropped", ([0], 2, "any"), False),
        ("more than there are places", ([0, 1, 2], 2, "any"), False),
        ("all", ([0, 1, 2, 3], 4, "any"), True),
        ("a slot dropped with room for nine", ([0, 1, 2], 9, "any"), False),
        ("no places", ([], 0, "any"), True),
        ("the two of 0.5", ([1, 2], 2, "weight"), True),
        ("one of the tied", ([2], 1, "weight"), True),
        ("the other one", ([1], 1, "weight"), True),
        ("one of 0.25", ([0], 1, "weight"), False),
        ("three by weight", ([0, 1, 2], 3, "weight"), True),
        ("0.25 dropped before 0.125", ([1, 2, 3], 3, "weight"), False),
        ("the first two tokens", ([0, 1], 2, "position"), True),
        ("not the first two tokens", ([1, 2], 2, "position"), False),
        ("the first three tokens", ([0, 1, 2], 3, "position"), True),
        ("first choices before second ones", ([1, 3], 2, "choice"), True),
        ("a second choice before a first one", ([0, 1], 2, "choice"), False),
        ("first choices, then token 0", ([0, 1, 3], 3, "choice"), True),
        ("first choices, then token 2", ([1, 2, 3], 3, "choice"), False),
        # 0.25 (token 0) was dropped, 0.125 (token 3) kept. Both 1/16 off: 0.1875 either way, no order is sure.
        *(
            (f"0.25 off by {one}, 0.125 by {other}", ([1, 2, 3], 3, "weight", [one, 0.0, 0.0, other]), legal)
            for one, other, legal in [(1 / 16, 0.0, False), (1 / 16, 1 / 32, False), (1 / 16, 1 / 16, True)]
        ),
        # The slot of 1/8 that found room but was not kept is legal only if it may weigh 0, at its error exactly.
        *(
            (f"1/8 off by {error} is absent, {policy}", ([0, 1, 2], 4, policy, [0.0, 0.0, 0.0, error]), error >= 1 / 8)
            for error in (0.0, 3 / 32, 1 / 8, 1 / 4) for policy in POLICIES
        ),
    )
)  # fmt: skip
