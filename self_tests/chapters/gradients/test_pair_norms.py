"""Norms of sharded gradients and clipping by them, worked out twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.reference.gradients import norms as first
from moe_conformance.reference.gradients import shards as first_shards
from self_tests.chapters.gradients import second
from self_tests.chapters.gradients.second import Floats, Shard
from self_tests.oracles.agreement import assert_close, check_refused, floats

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

    def test_by_hand(self) -> None:
        """A router on both ranks, an expert on rank 1, and one that is cut: each element once."""
        # Rank 0 has w = (1, 2) and a[0] = 4; rank 1 has w again, a[1] = -4, and b = (NaN, -0), which is on rank 0 too.
        ranks = [
            [shard("w", [1, 0], [2.0, 1.0]), shard("a", [0], [4.0]), shard("b", [0, 1], [math.nan, 0.0])],
            [shard("w", [0, 1], [1.0, 2.0]), shard("a", [1], [-4.0]), shard("b", [1, 0], [-0.0, math.nan])],
        ]
        sizes = {"a": 2, "b": 2, "w": 2}
        for whole in (second.whole(ranks, sizes), first_shards.whole(in_torch(ranks), sizes)):
            assert ["a", "b", "w"] == list(whole)
            assert [[4.0, -4.0], [1.0, 2.0]] == [whole["a"].tolist(), whole["w"].tolist()]
            assert math.isnan(whole["b"][0])
            assert whole["b"][1] == 0.0
        expected = {"a": 1, "b": 2, "w": 2}
        assert expected == second.copies(ranks, sizes) == first_shards.copies(in_torch(ranks), sizes)

    @pytest.mark.parametrize(
        ("ranks", "sizes"),
        [
            ([[shard("a", [0], [1.0])], [shard("a", [0], [math.nextafter(1.0, 2.0)])]], {"a": 1}),  # copies differ
            ([[shard("a", [0], [1.0])], [shard("a", [0], [math.nan])]], {"a": 1}),
            ([[shard("a", [0], [math.nan])], [shard("a", [0], [1.0])]], {"a": 1}),
            ([[shard("a", [0], [1.0])]] * 2 + [[shard("a", [0], [-1.0])]], {"a": 1}),  # only the last
            ([[shard("a", [0], [1.0])]], {"a": 2}),  # nobody holds element 1
            ([[shard("a", [0], [1.0])]], {"a": 1, "b": 1}),
            ([], {"b": 1}),
            ([[shard("a", [1], [1.0])], [shard("a", [0], [1.0])]], {"a": 1}),
            ([[shard("a", [-1, 0], [1.0, 1.0])]], {"a": 1}),
            ([[shard("c", [], [])]], {"a": 0}),
            ([[shard("a", [0, 0], [1.0, 1.0])]], {"a": 1}),
            ([[shard("a", [0], [1.0]), shard("a", [0], [1.0])]], {"a": 1}),
            ([[Shard("a", np.array([0]), np.array([1.0, 2.0]))]], {"a": 2}),
            ([[Shard("a", np.array([[0]]), np.array([[1.0]]))]], {"a": 1}),
        ],
    )
    def test_refused(self, ranks: Ranks, sizes: dict[str, int]) -> None:
        """What has no one gradient is refused by both."""
        check_refused(lambda: first_shards.whole(in_torch(ranks), sizes), lambda: second.whole(ranks, sizes))

    def test_uneven_copies_are_refused(self) -> None:
        """Half a replica beside a whole one makes a whole gradient, but no number of replicas."""
        ranks = [[shard("a", [0, 1], [1.0, 2.0])], [shard("a", [1], [2.0])]]
        assert [1.0, 2.0] == second.whole(ranks, {"a": 2})["a"].tolist()
        assert [1.0, 2.0] == first_shards.whole(in_torch(ranks), {"a": 2})["a"].tolist()
        for asked in (ranks, ranks[::-1], [[]]):
            check_refused(
                lambda asked=asked: first_shards.copies(in_torch(asked), {"a": 2}),
                lambda asked=asked: second.copies(asked, {"a": 2}),
            )


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

    @pytest.mark.parametrize(
        ("values", "p", "expected"),
        [
            ([], 2.0, 0.0),
            ([0.0, -0.0], 2.0, 0.0),
            ([2.0, -3.0, 6.0], 2.0, 7.0),  # 4 + 9 + 36 = 49
            ([2.0, -3.0, 6.0], 1.0, 11.0),
            ([2.0, -6.0, 3.0], math.inf, 6.0),
            ([3.0, 4.0, -5.0], 3.0, 6.0),  # 27 + 64 + 125 = 216
            ([1.0, math.inf], 2.0, math.inf),
            ([-math.inf, 1.0], math.inf, math.inf),
            ([-math.inf, math.inf, math.nan], 2.0, math.nan),
            ([math.nan, 1.0, math.inf], math.inf, math.nan),
            ([math.nan], 1.0, math.nan),
        ],
    )
    def test_by_hand(self, values: list[float], p: float, expected: float) -> None:
        """Sums that a head can do, over two parameters, and what is no number."""
        gradients = {"dense": np.array(values[:1]), "expert": np.array([values[1:]])}
        assert expected == pytest.approx(second.norm(gradients, p=p), rel=1e-15, nan_ok=True)
        assert expected == pytest.approx(first.norm(tensors(gradients), p=p).item(), rel=1e-15, nan_ok=True)

    def test_no_parameter_has_norm_zero(self) -> None:
        """A stage without parameters takes part."""
        assert 0.0 == second.norm({}) == first.norm({}).item()
        assert 0.0 == second.norm({}, p=math.inf) == first.norm({}, p=math.inf).item()

    @pytest.mark.parametrize("p", [0.5, 0.0, -1.0, math.nan, -math.inf])
    def test_no_norm(self, p: float) -> None:
        """Both refuse what is no norm."""
        check_refused(lambda: first.norm({"a": torch.ones(1)}, p=p), lambda: second.norm({"a": np.ones(1)}, p=p))

    @pairs_agree
    @given(st.integers(0, 10**6))
    def test_sharding_does_not_change_the_norm(self, seed: int) -> None:
        """However the elements are dealt out over ranks, in one replica or two, the norm of the model is the same."""
        norms = set()
        for replicas in (1, 2):
            ranks = dealt_out(np.random.default_rng(seed), {"only": 5}, replicas)
            norms.add(first.norm(first_shards.whole(in_torch(ranks), {"only": 5})).item())
        random = np.random.default_rng(seed)
        values = random.normal(size=5) * random.choice([1e-3, 1.0, 1e5])
        values[random.random(5) < 0.2] = 0.0
        assert {first.norm({"half": floats(values[:2]), "other": floats(values[2:])}).item()} == norms


NORM = 3.0
EDGE = NORM * (1 + 2.0**-20)


class TestLegalNorms:
    @pytest.mark.parametrize(
        ("claimed", "exact", "expected"),
        [
            ([EDGE, EDGE], NORM, True),
            ([NORM * (1 - 2.0**-20)], NORM, True),
            ([math.nextafter(EDGE, 9.0)], NORM, False),
            ([math.nextafter(NORM * (1 - 2.0**-20), 0.0)], NORM, False),
            ([NORM, NORM, math.nextafter(NORM, 4.0)], NORM, False),
            ([0.0, 0.0], 0.0, True),
            ([0.0, -0.0], 0.0, False),
            ([2.0**-1000], 0.0, False),
            ([-NORM], NORM, False),
            ([math.inf] * 2, NORM, False),
            ([math.nan] * 2, NORM, False),
            ([math.nan] * 2, math.nan, True),
            ([math.inf] * 2, math.nan, True),
            ([math.inf, math.nan], math.nan, False),
            ([math.nan] * 2, math.inf, True),
            ([math.inf, NORM], math.inf, False),
            ([1e300], math.inf, False),
            ([NORM], math.nan, False),
        ],
    )
    def test_by_hand(self, claimed: list[float], exact: float, expected: bool) -> None:
        """Within 2^-20 of the exact norm, the same on every rank, and no number where it is none."""
        assert expected is second.legal_norms(claimed, exact)
        assert expected is first.legal_norms(claimed, exact)

    @pytest.mark.parametrize(("claimed", "exact"), [([], 1.0), ([1.0], -1.0), ([1.0], -math.inf)])
    def test_refused(self, claimed: list[float], exact: float) -> None:
        """No rank claims nothing, and no norm is negative."""
        check_refused(lambda: first.legal_norms(claimed, exact), lambda: second.legal_norms(claimed, exact))


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

    @pytest.mark.parametrize(
        ("norm", "max_norm", "eps", "expected"),
        [
            (8.0, 2.0, 0.0, 0.25),
            (8.0, 8.0, 0.0, 1.0),
            (8.0, 9.0, 1e-6, 1.0),
            (8.0, 8.0, 1e-6, 8.0 / 8.000001),
            (2.0**-20, 2.0**-20, 2.0**-20, 0.5),
            (2.0**-20, 2.0**-19, 2.0**-20, 1.0),
            (1e-30, 1.0, 0.0, 1.0),
            (5.0, 0.0, 0.0, 0.0),
            (0.0, 0.0, 0.0, 1.0),
            (0.0, 0.0, 1e-6, 1.0),
            (0.0, 1e-9, 1e-6, 1.0),  # a norm of zero changes nothing, where the formula would
            (1e300, math.inf, 0.0, 1.0),
        ],
    )
    def test_factors_by_hand(self, norm: float, max_norm: float, eps: float, expected: float) -> None:
        """min(1, max_norm / (norm + eps)), and 1 for a norm of zero."""
        assert expected == pytest.approx(second.clip_factor(norm, max_norm, eps=eps), rel=1e-15)
        actual = first.clip_factor(norm, max_norm, eps=eps)
        assert expected == pytest.approx(actual, rel=1e-15)
        assert (expected == 1.0) is (actual == 1.0)

    @pytest.mark.parametrize(
        ("norm", "max_norm", "eps"),
        [
            (-1.0, 1.0, 0.0),
            (math.nan, 1.0, 0.0),
            (math.inf, 1.0, 0.0),
            (1.0, -1e-9, 0.0),
            (1.0, math.nan, 0.0),
            (1.0, 1.0, -1e-9),
            (1.0, 1.0, 1.1e-6),
            (1.0, 1.0, math.nan),
        ],
    )
    def test_no_factor(self, norm: float, max_norm: float, eps: float) -> None:
        """Both refuse what is not to be clipped by."""
        check_refused(
            lambda: first.clip_factor(norm, max_norm, eps=eps), lambda: second.clip_factor(norm, max_norm, eps=eps)
        )

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_gradients_that_are_no_numbers_are_not_clipped(self, bad: float) -> None:
        """What ranks do then is free, so that neither oracle says."""
        asked: list[Callable[[], Any]] = [
            lambda: first.clipped({"a": torch.tensor([1.0, bad])}, 1.0),
            lambda: second.clipped({"a": np.array([1.0, bad])}, 1.0),
        ]
        check_refused(*asked)

    def test_clipped_by_hand(self) -> None:
        """A norm of 7, clipped to 3.5: half of everything, the expert included."""
        gradients = {"router": np.array([[2.0], [-3.0]]), "expert": np.array([6.0, 0.0])}
        for made in (second.clipped(gradients, 3.5), first.clipped(tensors(gradients), 3.5)):
            assert [[1.0], [-1.5]] == made["router"].tolist()
            assert [3.0, 0.0] == made["expert"].tolist()
        made = first.clipped(tensors(gradients), 3.0, p=math.inf)  # the largest is 6
        assert [[1.0], [-1.5]] == made["router"].tolist()
        assert [[2.0], [-3.0]] == first.clipped(tensors(gradients), 7.0)["router"].tolist()  # norm + eps <= max_norm
