"""Norms of sharded gradients, clipping by them, and bounds of accumulated gradients, worked out twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.reference.gradients import accumulation
from moe_conformance.reference.gradients import norms as first
from moe_conformance.reference.gradients import shards as first_shards
from self_tests.chapters.gradients import second
from self_tests.chapters.gradients.second import Floats, Shard
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Ranks = list[list[Shard]]


def shard(name: str, elements: list[int], values: list[float]) -> Shard:
    """A piece of one gradient."""
    return Shard(name, np.array(elements, dtype=np.int64), np.array(values, dtype=np.float64))


def in_torch(shards_by_rank: Ranks) -> list[list[first_shards.Shard]]:
    """The pieces in the first oracle's words."""
    return [
        [first_shards.Shard(name, torch.from_numpy(at), torch.from_numpy(values)) for name, at, values in shards]
        for shards in shards_by_rank
    ]


def dealt_out(random: np.random.Generator, sizes: dict[str, int], replicas: int) -> Ranks:
    """Every parameter cut into uneven shards, in any order of elements, each replica otherwise; some are empty."""
    ranks: Ranks = [[] for _ in range(4)]
    for name, size in sizes.items():
        values = random.normal(size=size) * random.choice([1e-3, 1.0, 1e5])
        values[random.random(size) < 0.2] = 0.0
        for holders in np.split(random.permutation(4)[: 2 * replicas], replicas):
            cut = int(random.integers(0, size + 1))
            order = random.permutation(size)
            for rank, elements in zip(holders, (order[:cut], order[cut:]), strict=True):
                ranks[rank].append(Shard(name, elements.astype(np.int64), values[elements]))
    return ranks


def tensors(gradients: dict[str, Floats], *, leaf: bool = False) -> dict[str, Tensor]:
    """Gradients by name, as tensors."""
    return {name: floats(gradient, leaf=leaf) for name, gradient in gradients.items()}


SIZES = {"router": 3, "nothing": 0, "expert 5": 7, "bias": 1}


class TestShards:
    @pairs_agree
    @given(st.integers(0, 10**6), st.sampled_from([1, 2]))
    def test_the_whole_agrees(self, seed: int, replicas: int) -> None:
        """Both put every element in its place, whoever holds it, and count the replicas."""
        ranks = dealt_out(np.random.default_rng(seed), SIZES, replicas)
        expected, actual = second.whole(ranks, SIZES), first_shards.whole(in_torch(ranks), SIZES)
        assert list(SIZES) == list(expected) == list(actual)
        for name in SIZES:
            assert torch.float64 == actual[name].dtype
            assert expected[name].tolist() == actual[name].tolist()
        counted = {name: replicas if size else 0 for name, size in SIZES.items()}
        assert counted == second.copies(ranks, SIZES) == first_shards.copies(in_torch(ranks), SIZES)


class TestNorms:
    @pairs_agree
    @given(st.integers(0, 10**6), st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]))
    def test_norms_agree(self, seed: int, p: float) -> None:
        """Both find the same norm of parameters of any shape and very different sizes."""
        random = np.random.default_rng(seed)
        shapes = [(), (3,), (2, 5), (0, 7), (1, 2, 3)][: int(random.integers(0, 6))]
        made = {str(i): random.normal(size=shape) * 2.0 ** random.integers(-40, 40) for i, shape in enumerate(shapes)}
        expected = {name: np.asarray(gradient, dtype=np.float64) for name, gradient in made.items()}
        actual = first.norm(tensors(expected), p=p)
        assert (torch.float64, ()) == (actual.dtype, tuple(actual.shape))
        assert second.norm(expected, p=p) == pytest.approx(actual.item(), rel=1e-13)


class TestClipping:
    @pairs_agree
    @given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-7, 1e-6]), st.sampled_from([1.0, 2.0, math.inf]))
    def test_clipped_gradients_agree(self, seed: int, eps: float, p: float) -> None:
        """Both multiply dense and expert parameters by one factor, and keep shapes."""
        random = np.random.default_rng(seed)
        gradients = {"router": random.normal(size=(2, 3)), "none": np.zeros((0, 4)), "expert": random.normal(size=5)}
        max_norm = float(random.choice([0.0, 0.1, 2.0, 50.0, math.inf]))
        expected = second.clipped(gradients, max_norm, eps=eps, p=p)
        actual = first.clipped(tensors(gradients), max_norm, eps=eps, p=p)
        assert list(expected) == list(actual)
        for name in expected:
            assert_close(expected[name], actual[name])
        if max_norm > 49.0:
            assert gradients["expert"].tolist() == actual["expert"].tolist()


def whole_and_copies(ranks: Ranks, sizes: dict[str, int]) -> tuple[list[Any], dict[str, int]]:
    """The first oracle's gradients in order, and how often each is held."""
    parts = in_torch(ranks)
    return list(first_shards.whole(parts, sizes).items()), first_shards.copies(parts, sizes)


def a(elements: list[int], values: list[float]) -> Shard:
    """A piece of the gradient of a."""
    return shard("a", elements, values)


def two(values: list[float]) -> dict[str, Floats]:
    """These numbers over a dense parameter and an expert."""
    return {"dense": np.array(values[:1]), "expert": np.array([values[1:]])}


def as_tensors(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle that is given a dictionary of arrays."""
    return lambda gradients, *rest, **options: oracle(tensors(gradients), *rest, **options)


def factor(oracle: Any) -> Callable[[float, float, float], float]:
    """The factor of a norm, the largest norm and eps."""
    return lambda norm, max_norm, eps: oracle.clip_factor(norm, max_norm, eps=eps)


INF, NAN = math.inf, math.nan
ONE, NORM = a([0], [1.0]), 3.0
EDGE, LOW = NORM * (1 + 2.0**-20), NORM * (1 - 2.0**-20)
HALF = [[a([0, 1], [1.0, 2.0])], [a([1], [2.0])]]
CUT = [
    [shard("w", [1, 0], [2.0, 1.0]), a([0], [4.0]), shard("b", [0], [-0.0])],
    [shard("w", [0, 1], [1.0, 2.0]), a([1], [-4.0]), shard("b", [0], [0.0])],
]
CLIPPED = {"router": np.array([[2.0], [-3.0]]), "expert": np.array([6.0, 0.0])}

test_by_hand = by_hand(
    *rows(
        first_shards.divisor,
        second.divisor,
        ("losses are summed, whatever the sizes", (4, 3, "sum"), 1),
        ("the mean over data and context parallel ranks", (4, 3, "mean_over_dp"), 12),
        ("one rank is its own mean", (1, 1, "mean_over_dp"), 1),
        ("context parallel ranks alone", (1, 2, "mean_over_dp"), 2),
        ("another convention", (2, 1, "mean"), REFUSED),
        ("no rank", (0, 2, "mean_over_dp"), REFUSED),
        ("no context parallel rank", (2, 0, "sum"), REFUSED),
    ),
    *rows(
        whole_and_copies,
        lambda ranks, sizes: (list(second.whole(ranks, sizes).items()), second.copies(ranks, sizes)),
        ("a router on both ranks and an expert that is cut: each element once", (CUT, {"a": 2, "b": 1, "w": 2}),
         ([("a", [4.0, -4.0]), ("b", [0.0]), ("w", [1.0, 2.0])], {"a": 1, "b": 2, "w": 2})),
    ),
    *rows(
        lambda ranks, sizes: first_shards.whole(in_torch(ranks), sizes)["a"],
        lambda ranks, sizes: second.whole(ranks, sizes)["a"],
        ("half a replica beside a whole one", (HALF, {"a": 2}), [1.0, 2.0]),
        ("copies differ by one bit", ([[ONE], [a([0], [math.nextafter(1.0, 2.0)])]], {"a": 1}), REFUSED),
        ("the second copy is NaN", ([[ONE], [a([0], [NAN])]], {"a": 1}), REFUSED),
        ("the first copy is NaN", ([[a([0], [NAN])], [ONE]], {"a": 1}), REFUSED),
        ("only the last copy differs", ([[ONE], [ONE], [a([0], [-1.0])]], {"a": 1}), REFUSED),
        ("nobody holds element 1", ([[ONE]], {"a": 2}), REFUSED),
        ("nobody holds b", ([[ONE]], {"a": 1, "b": 1}), REFUSED),
        ("no rank", ([], {"b": 1}), REFUSED),
        ("an element beyond the end", ([[a([1], [1.0])], [ONE]], {"a": 1}), REFUSED),
        ("an element before the start", ([[a([-1, 0], [1.0, 1.0])]], {"a": 1}), REFUSED),
        ("an unknown parameter", ([[shard("c", [], [])]], {"a": 0}), REFUSED),
        ("an element twice in a piece", ([[a([0, 0], [1.0, 1.0])]], {"a": 1}), REFUSED),
        ("an element in two pieces of a rank", ([[ONE, ONE]], {"a": 1}), REFUSED),
        ("more values than elements", ([[Shard("a", np.array([0]), np.array([1.0, 2.0]))]], {"a": 2}), REFUSED),
        ("two dims", ([[Shard("a", np.array([[0]]), np.array([[1.0]]))]], {"a": 1}), REFUSED),
    ),
    *rows(lambda ranks: first_shards.copies(in_torch(ranks), {"a": 2}), lambda ranks: second.copies(ranks, {"a": 2}),
        *((f"{name} has no number of replicas", (r,), REFUSED) for name, r in [("half", HALF), ("turned", HALF[::-1])]),
        ("nothing has no number of replicas", ([[]],), REFUSED),
    ),
    *rows(as_tensors(first.norm), second.norm,
        *(
            (f"the {p}-norm of {values}", (two(values),), {"p": p}, expected)
            for values, p, expected in [
                ([], 2.0, 0.0), ([0.0, -0.0], 2.0, 0.0), ([2.0, -3.0, 6.0], 2.0, 7.0), ([2.0, -3.0, 6.0], 1.0, 11.0),
                ([2.0, -6.0, 3.0], INF, 6.0), ([3.0, 4.0, -5.0], 3.0, 6.0), ([1.0, INF], 2.0, INF),
                ([-INF, 1.0], INF, INF), ([-INF, INF, NAN], 2.0, NAN), ([NAN, 1.0, INF], INF, NAN), ([NAN], 1.0, NAN),
            ]
        ),
        ("a stage without parameters", ({},), 0.0),
        ("the square root of squares", (two([3.0, -4.0]),), 5.0),
        ("a stage without parameters has no largest", ({},), {"p": INF}, 0.0),
        *((f"p = {p} is no norm", (two([1.0]),), {"p": p}, REFUSED) for p in (0.5, 0.0, -1.0, NAN, -INF)),
    ),
    # Within 2^-20 of the exact norm, the same on every rank, and no number where it is none.
    *rows(first.legal_norms, second.legal_norms,
        *(
            (f"{claimed} for {exact}", (claimed, exact), legal)
            for claimed, exact, legal in [
                ([EDGE, EDGE], NORM, True), ([LOW], NORM, True), ([math.nextafter(EDGE, 9.0)], NORM, False),
                ([math.nextafter(LOW, 0.0)], NORM, False), ([NORM, NORM, math.nextafter(NORM, 4.0)], NORM, False),
                ([0.0, 0.0], 0.0, True), ([0.0, -0.0], 0.0, False), ([2.0**-1000], 0.0, False), ([-NORM], NORM, False),
                ([INF] * 2, NORM, False), ([NAN] * 2, NORM, False), ([NAN] * 2, NAN, True), ([INF] * 2, NAN, True),
                ([INF, NAN], NAN, False), ([NAN] * 2, INF, True), ([INF, NORM], INF, False), ([1e300], INF, False),
                ([NORM], NAN, False), ([], 1.0, REFUSED), ([1.0], -1.0, REFUSED), ([1.0], -INF, REFUSED),
            ]
        ),
    ),
    # min(1, max_norm / (norm + eps)), and 1 for a norm of zero, where the formula would change something.
    *rows(first.clip_factor, second.clip_factor, ("eps is 0", (8.0, 8.0), 1.0)),
    *rows(factor(first), factor(second),
        *(
            (f"norm, largest, eps {sizes}", sizes, expected)
            for sizes, expected in [
                ((8.0, 2.0, 0.0), 0.25), ((8.0, 8.0, 0.0), 1.0), ((8.0, 9.0, 1e-6), 1.0),
                ((8.0, 8.0, 1e-6), 8.0 / 8.000001), ((2.0**-20, 2.0**-20, 2.0**-20), 0.5),
                ((2.0**-20, 2.0**-19, 2.0**-20), 1.0), ((1e-30, 1.0, 0.0), 1.0), ((5.0, 0.0, 0.0), 0.0),
                ((0.0, 0.0, 0.0), 1.0), ((0.0, 0.0, 1e-6), 1.0), ((0.0, 1e-9, 1e-6), 1.0), ((1e300, INF, 0.0), 1.0),
                ((-1.0, 1.0, 0.0), REFUSED), ((NAN, 1.0, 0.0), REFUSED), ((INF, 1.0, 0.0), REFUSED),
                ((1.0, -1e-9, 0.0), REFUSED), ((1.0, NAN, 0.0), REFUSED), ((1.0, 1.0, -1e-9), REFUSED),
                ((1.0, 1.0, 1.1e-6), REFUSED), ((1.0, 1.0, NAN), REFUSED),
            ]
        ),
    ),
    *rows(
        lambda gradients, *largest, **p: list(first.clipped(tensors(gradients), *largest, **p).values()),
        lambda *question, **p: list(second.clipped(*question, **p).values()),
        ("a norm of 7, clipped to 3.5", (CLIPPED, 3.5), [[[1.0], [-1.5]], [3.0, 0.0]]),
        ("the largest is 6, clipped to 3", (CLIPPED, 3.0), {"p": INF}, [[[1.0], [-1.5]], [3.0, 0.0]]),
        ("norm + eps <= max_norm", (CLIPPED, 7.0), [[[2.0], [-3.0]], [6.0, 0.0]]),
        *((f"what ranks do with {bad} is free", (two([1.0, bad]), 1.0), REFUSED) for bad in (NAN, INF)),
    ),
)  # fmt: skip


numbers = st.sampled_from([0.0, 1.0, -1.0, 2.0**-6, -(2.0**-6), 3.0, 96.0, -0.625])


class TestAccumulationPair:
    @pairs_agree
    @given(
        st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=20),
        st.integers(1, 4),
        st.integers(0, 64),
        st.booleans(),
    )
    def test_sums_and_bounds_agree(self, parts: list[list[float]], ranks: int, tokens: int, narrow: bool) -> None:
        """Both have the same sum and the same two bounds of every element, which such numbers have exactly."""
        found = accumulation.accumulated(torch.tensor(parts).reshape(-1, 2), ranks=ranks, tokens=tokens, narrow=narrow)
        for n in range(2):
            expected = second.accumulated([Fraction(part[n]) for part in parts], ranks, tokens, narrow)
            assert expected == tuple(Fraction(each[n].item()) for each in found)
