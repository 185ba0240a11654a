"""Recorded routes, worked out twice: the weights of what was recorded, and to whom a record belongs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.routing import replay as first
from moe_conformance.reference.routing import routes as first_routing
from self_tests.chapters.routing.second import replay as second
from self_tests.chapters.routing.second.replay import Asked, Place
from self_tests.chapters.routing.second.routes import Kind
from self_tests.oracles.agreement import assert_close, check_refused, floats

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
KINDS: tuple[Kind, ...] = ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus")
kinds = st.sampled_from(KINDS)


def drawn(seed: int, masks: float = 0.0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits (T, 5) and different ids (T, 3) with empty slots; every token can be scored."""
    random = np.random.default_rng(seed)
    T = int(random.integers(0, 5))
    logits_TE = random.normal(size=(T, 5)) * 3
    logits_TE[random.random((T, 5)) < masks] = -math.inf
    logits_TE[:, 4] = random.normal(size=T)
    ids_TK = np.array([random.permutation(5)[:3] for _ in range(T)], dtype=np.int64).reshape(T, 3)
    ids_TK[random.random((T, 3)) < 0.35] = -1
    return logits_TE, ids_TK


class TestWeights:
    @settings(pairs_agree, max_examples=150)
    @given(st.integers(0, 10**6), kinds, st.booleans(), st.sampled_from([1.0, 2.5]), st.sampled_from([0.0, 0.5]))
    def test_weights_agree(self, seed: int, score: Kind, normalise: bool, scale: float, masks: float) -> None:
        """Both weigh a token's recorded experts by its present logits, and by no others where nothing else counts."""
        logits_TE, ids_TK = drawn(seed, masks)
        expected = second.replayed_weights(logits_TE, ids_TK, score=score, normalise=normalise, scale=scale)
        actual = first.replayed_weights(
            floats(logits_TE), torch.from_numpy(ids_TK), score=score, normalise=normalise, scale=scale
        )
        assert_close(expected, actual)
        assert not actual[torch.from_numpy(ids_TK) < 0].any()

    @pairs_agree
    @given(st.integers(0, 10**6), kinds, st.booleans(), st.sampled_from([0.0, 0.5]))
    def test_gradients_agree(self, seed: int, score: Kind, normalise: bool, masks: float) -> None:
        """Autograd gives the logits what the formula gives; what an empty slot is told is lost, NaN or not."""
        logits_TE, ids_TK = drawn(seed, masks)
        upstream_TK = np.random.default_rng(seed + 1).normal(size=ids_TK.shape)
        upstream_TK[ids_TK < 0] = math.nan
        leaf = floats(logits_TE, leaf=True)
        weights = first.replayed_weights(leaf, torch.from_numpy(ids_TK), score=score, normalise=normalise, scale=1.5)
        expected = second.replayed_weights_backward(
            logits_TE, ids_TK, upstream_TK, score=score, normalise=normalise, scale=1.5
        )
        if not weights.requires_grad:  # not one slot is filled
            assert not expected.any()
            return
        (actual,) = torch.autograd.grad(weights, leaf, floats(upstream_TK))
        assert_close(expected, actual, addend=1.0)

    @pytest.mark.parametrize("score", KINDS)
    def test_unchanged_logits_give_the_recorded_weights(self, score: Kind) -> None:
        """Bit for bit, where the record is what the router chose."""
        logits = floats(np.random.default_rng(5).normal(size=(6, 5)))
        for normalise in (True, False):
            routed = first_routing.route(logits, top_k=3, score=score, normalise=normalise, scale=2.5)
            again = first.replayed_weights(logits, routed.ids_TK, score=score, normalise=normalise, scale=2.5)
            assert routed.weights_TK.tolist() == again.tolist()

    @pytest.mark.parametrize(
        ("score", "normalise", "ids", "expected"),
        [
            # Logits (0, log 3, log 4): exp is (1, 3, 4), sum 8; softmax (1/8, 3/8, 1/2); scale 8.
            ("softmax", False, [2, -1, 0], [4.0, 0.0, 1.0]),
            ("softmax", True, [2, -1, 0], [6.4, 0.0, 1.6]),
            ("softmax_topk", False, [-1, 1, 0], [0.0, 6.0, 2.0]),
            ("softmax_topk", False, [-1, -1, 0], [0.0, 0.0, 8.0]),
            # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4, sigmoid(log 4) = 4/5
            ("sigmoid", False, [0, 1, -1], [4.0, 6.0, 0.0]),
            ("sigmoid", True, [0, 1, -1], [3.2, 4.8, 0.0]),
            ("sigmoid", True, [-1, 2, -1], [0.0, 8.0, 0.0]),
            ("sigmoid", True, [-1, -1, -1], [0.0, 0.0, 0.0]),
            ("softmax_topk", True, [-1, -1, -1], [0.0, 0.0, 0.0]),
        ],
    )
    def test_by_hand(self, score: Kind, normalise: bool, ids: list[int], expected: list[float]) -> None:
        """One token whose exponentials are 1, 3 and 4."""
        logits, recorded = np.array([[0.0, math.log(3.0), math.log(4.0)]]), np.array([ids])
        options: dict[str, Any] = {"score": score, "normalise": normalise, "scale": 8.0}
        found = second.replayed_weights(logits, recorded, **options)
        assert expected == pytest.approx(found[0].tolist(), rel=1e-14)
        made = first.replayed_weights(floats(logits), torch.from_numpy(recorded), **options)
        assert expected == pytest.approx(made[0].tolist(), rel=1e-14)

    def test_without_a_scale_by_hand(self) -> None:
        """The score itself, neither normalised nor scaled: sigmoid(log 3) = 3/4."""
        logits, ids = np.array([[math.log(3.0), 0.0]]), np.array([[0, -1]])
        assert [0.75, 0.0] == pytest.approx(second.replayed_weights(logits, ids, score="sigmoid")[0].tolist())
        made = first.replayed_weights(floats(logits), torch.from_numpy(ids), score="sigmoid")
        assert [0.75, 0.0] == pytest.approx(made[0].tolist())

    @pytest.mark.parametrize("score", KINDS)
    @pytest.mark.parametrize("everything", [True, False])
    def test_recorded_experts_that_are_all_masked_weigh_nothing(self, score: Kind, everything: bool) -> None:
        """Also where every expert of the token is masked."""
        logits, ids = np.array([[-math.inf, -math.inf, -math.inf if everything else 1.0]]), np.array([[1, 0, -1]])
        for normalise in (True, False):
            expected = second.replayed_weights(logits, ids, score=score, normalise=normalise)
            leaf = floats(logits, leaf=True)
            actual = first.replayed_weights(leaf, torch.from_numpy(ids), score=score, normalise=normalise)
            assert [[0.0] * 3] == expected.tolist() == actual.tolist()
            (gradient,) = torch.autograd.grad(actual, leaf, torch.ones(1, 3).double())
            assert [[0.0] * 3] == gradient.tolist()

    @pytest.mark.parametrize(
        ("logits", "ids"),
        [
            ([[0.0, 1.0]], [[2]]),
            ([[0.0, 1.0]], [[-2]]),
            ([[0.0, 1.0]], [[1, 1]]),
            ([[0.0, 1.0]], [[0, -1, 0]]),
            ([[0.0, math.nan]], [[0]]),
            ([[0.0, math.inf]], [[0]]),
            ([[0.0, math.nan]], [[-1]]),
            ([[0.0, 1.0], [0.0, math.nan]], [[0], [-1]]),
            ([[0.0, 1.0]] * 2, [[0]]),
            ([[0.0, 1.0]], [[0]] * 2),
        ],
    )
    @pytest.mark.parametrize("score", KINDS)
    def test_refused(self, logits: list[list[float]], ids: list[list[int]], score: Kind) -> None:
        """Ids that are no experts or one twice, logits without scores, another number of tokens."""
        check_refused(
            lambda: first.replayed_weights(torch.tensor(logits).double(), torch.tensor(ids), score=score),
            lambda: second.replayed_weights(np.array(logits), np.array(ids), score=score),
        )


def recorded_at(calls: tuple[Place, ...]) -> list[tuple[Place, NDArray[np.int64]]]:
    """Another route for every place, the same for one that comes again."""
    return [(place, np.array([[10 * place[0] + place[1], -1]])) for place in calls]


SCHEDULES = ["", "F0 B0 F1 B1", "F0 F1 B0 B1", "F0 F1 B1 B0", "F1 F0 F10 B10 B0", "F0", "F7 B7"]


class TestCalls:
    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("layers", [[], [0], [1, 3], [0, 2, 11]])
    @pytest.mark.parametrize("recompute", [True, False])
    def test_calls_agree(self, schedule: str, layers: list[int], recompute: bool) -> None:
        """Both list the same calls, and every schedule replays what it recorded, place by place."""
        calls = second.routing_calls(schedule, layers, recompute=recompute)
        assert calls == first.routing_calls(schedule, layers, recompute=recompute)
        routes = recorded_at(calls)
        asked = [Asked(place, 1, 2) for place in reversed(calls)]
        expected = second.replay(second.record(routes), asked)
        records = first.record([(place, torch.from_numpy(ids)) for place, ids in routes])
        actual = first.replay(records, [first.Asked(*each) for each in asked])
        assert [ids.tolist() for ids in expected] == [ids.tolist() for ids in actual]
        assert [[[10 * layer + m, -1]] for layer, m in reversed(calls)] == [ids.tolist() for ids in actual]
        assert set(calls) == set(records)

    @pytest.mark.parametrize(
        ("schedule", "layers"),
        [
            ("F0 B1", [1]),
            ("B0 F0", [1]),
            ("F0 F0", [1]),
            ("F0 B0 B0", [1]),
            ("F0 X0", [1]),
            ("F", [1]),
            ("F0B0", [1]),
            ("f0", [1]),
            ("F-1", [1]),
            ("F0", [3, 1]),
            ("F0", [1, 1]),
            ("F0", [-1, 1]),
            ("", [2, 2]),
        ],
    )
    def test_no_schedule(self, schedule: str, layers: list[int]) -> None:
        """Both refuse passes that are none, come twice or too early, and layers that do not ascend."""
        check_refused(lambda: first.routing_calls(schedule, layers), lambda: second.routing_calls(schedule, layers))


IDS = np.array([[3, 0], [2, -1]])


class TestRecords:
    @pytest.mark.parametrize(
        "again", [IDS[:1], IDS[:, :1], IDS[:, ::-1].copy(), np.where(IDS == -1, 1, IDS), IDS.reshape(1, 4)]
    )
    def test_a_place_that_routes_otherwise_is_refused(self, again: NDArray[np.int64]) -> None:
        """Other ids, another order of slots, other tokens; also when it is the last of three."""
        routes = [((1, 0), IDS), ((1, 1), again), ((1, 0), IDS.copy()), ((1, 0), again)]
        in_torch = [(place, torch.from_numpy(ids)) for place, ids in routes]
        assert {(1, 0), (1, 1)} == set(second.record(routes[:3])) == set(first.record(in_torch[:3]))
        check_refused(lambda: first.record(in_torch), lambda: second.record(routes))

    @pytest.mark.parametrize("asked", [((0, 1), 2, 2), ((1, 1), 2, 2), ((1, 0), 1, 2), ((1, 0), 2, 1), ((1, 0), 2, 3)])
    def test_a_replay_without_its_record_is_refused(self, asked: tuple[Place, int, int]) -> None:
        """The place swapped, another microbatch, other tokens, other slots: also after a right one."""
        right = ((1, 0), 2, 2)
        check_refused(
            lambda: first.replay({(1, 0): torch.from_numpy(IDS)}, [first.Asked(*right), first.Asked(*asked)]),
            lambda: second.replay({(1, 0): IDS}, [Asked(*right), Asked(*asked)]),
        )

    def test_no_tokens_replay_nothing(self) -> None:
        """An empty record is a record, and no calls ask for nothing."""
        empty = np.zeros((0, 2), dtype=np.int64)
        answers: list[Callable[[], Any]] = [
            lambda: second.replay(second.record([((0, 0), empty)]), [Asked((0, 0), 0, 2)]),
            lambda: first.replay(first.record([((0, 0), torch.from_numpy(empty))]), [first.Asked((0, 0), 0, 2)]),
        ]
        assert [(0, 2), (0, 2)] == [tuple(answer()[0].shape) for answer in answers]
        assert () == second.replay({}, []) == first.replay({}, [])
