"""Recorded routes, worked out twice: the weights of what was recorded, and to whom a record belongs."""

from __future__ import annotations

import math
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
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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


def replayed(ids: list[int], score: Kind, *, normalise: bool = False) -> tuple[Any, ...]:
    """One token whose exponentials are 1, 3 and 4, scale 8."""
    logits = np.array([[0.0, math.log(3.0), math.log(4.0)]])
    return (logits, np.array([ids])), {"score": score, "normalise": normalise, "scale": 8.0}


def first_record(routes: list[tuple[Place, NDArray[np.int64]]]) -> list[Place]:
    """The places that the first oracle keeps."""
    return sorted(first.record([(place, torch.from_numpy(ids)) for place, ids in routes]))


def first_replay(records: dict[Place, NDArray[np.int64]], *asked: tuple[Place, int, int]) -> Any:
    """What the first oracle replays."""
    return first.replay(
        {at: torch.from_numpy(ids) for at, ids in records.items()}, [first.Asked(*one) for one in asked]
    )


IDS, EMPTY, NAN = np.array([[3, 0], [2, -1]]), np.zeros((0, 2), dtype=np.int64), math.nan
OTHERWISE = [IDS[:1], IDS[:, :1], IDS[:, ::-1].copy(), np.where(IDS == -1, 1, IDS), IDS.reshape(1, 4)]

test_by_hand = by_hand(
    *rows(first.replayed_weights, second.replayed_weights,
        ("shares of all", *replayed([2, -1, 0], "softmax"), [[4.0, 0.0, 1.0]]),
        ("shares of all, normalised", *replayed([2, -1, 0], "softmax", normalise=True), [[6.4, 0.0, 1.6]]),
        ("shares of the recorded", *replayed([-1, 1, 0], "softmax_topk"), [[0.0, 6.0, 2.0]]),
        ("the share of one", *replayed([-1, -1, 0], "softmax_topk"), [[0.0, 0.0, 8.0]]),
        ("sigmoids 1/2 and 3/4", *replayed([0, 1, -1], "sigmoid"), [[4.0, 6.0, 0.0]]),
        ("sigmoids, normalised", *replayed([0, 1, -1], "sigmoid", normalise=True), [[3.2, 4.8, 0.0]]),
        ("one sigmoid, normalised", *replayed([-1, 2, -1], "sigmoid", normalise=True), [[0.0, 8.0, 0.0]]),
        *(
            (f"empty slots weigh 0, {score}", *replayed([-1] * 3, score, normalise=True), [[0.0] * 3])
            for score in ("sigmoid", "softmax_topk")
        ),
        ("neither normalised nor scaled", (np.array([[math.log(3.0), 0.0]]), np.array([[0, -1]])), {"score": "sigmoid"},
         [[0.75, 0.0]]),
        *(
            (f"{score} of {logits}, {ids}", (np.array(logits), np.array(ids)), {"score": score}, REFUSED)
            for score in KINDS
            for logits, ids in [
                ([[0.0, 1.0]], [[2]]), ([[0.0, 1.0]], [[-2]]), ([[0.0, 1.0]], [[1, 1]]), ([[0.0, 1.0]], [[0, -1, 0]]),
                ([[0.0, NAN]], [[0]]), ([[0.0, math.inf]], [[0]]), ([[0.0, NAN]], [[-1]]),
                ([[0.0, 1.0], [0.0, NAN]], [[0], [-1]]), ([[0.0, 1.0]] * 2, [[0]]), ([[0.0, 1.0]], [[0]] * 2),
            ]
        ),
    ),
    *rows(first.routing_calls, second.routing_calls,
        ("what is not run again", ("F0 F1 B1 B0", [1, 4]), [(1, 0), (4, 0), (1, 1), (4, 1)]),
        # Passes that are none, come twice or too early, and layers that do not ascend.
        *(
            (f"schedule {schedule!r} of layers {layers}", (schedule, layers), REFUSED)
            for schedule, layers in [
                *((wrong, [1]) for wrong in ("F0 B1", "B0 F0", "F0 F0", "F0 B0 B0", "F0 X0", "F", "F0B0", "f0", "F-1")),
                ("F0", [3, 1]), ("F0", [1, 1]), ("F0", [-1, 1]), ("", [2, 2]),
            ]
        ),
    ),
    *rows(first_record, lambda routes: sorted(second.record(routes)),
        ("a place may route as before", ([((1, 0), IDS), ((1, 1), EMPTY), ((1, 0), IDS.copy())],), [(1, 0), (1, 1)]),
        *(
            (f"but not as {again.tolist()}", ([((1, 0), IDS), ((1, 1), again), ((1, 0), IDS), ((1, 0), again)],),
             REFUSED)
            for again in OTHERWISE
        ),
    ),
    *rows(first_replay, lambda records, *asked: second.replay(records, [Asked(*one) for one in asked]),
        ("an empty record is a record", ({(0, 0): EMPTY}, ((0, 0), 0, 2)), [EMPTY]),
        ("no calls ask for nothing", ({},), []),
        # The place swapped, another microbatch, other tokens, other slots: also after a right one.
        *(
            (f"no record for {asked}", ({(1, 0): IDS}, ((1, 0), 2, 2), asked), REFUSED)
            for asked in [((0, 1), 2, 2), ((1, 1), 2, 2), ((1, 0), 1, 2), ((1, 0), 2, 1), ((1, 0), 2, 3)]
        ),
    ),
)  # fmt: skip
