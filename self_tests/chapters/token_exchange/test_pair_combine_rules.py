"""Combine with biases, failed ranks and redundant experts, worked out twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.exchange import expert_copies as first_experts
from moe_conformance.reference.token_exchange import combine_rules as first
from self_tests.chapters.exchange.second import expert_copies as second_experts
from self_tests.chapters.exchange.second.expert_copies import Handed
from self_tests.chapters.token_exchange.second import combine_rules as second
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def make_case(T: int, K: int, D: int, biases: int, seed: int) -> tuple[Floats, Ints, Floats, list[Floats], Floats]:
    """Answers, ids, weights, biases and upstream; an empty slot has NaN for an answer and for a weight."""
    random = np.random.default_rng(seed)
    ids_TK = random.integers(-1, 3, size=(T, K))
    answers_TKD, weights_TK = random.normal(size=(T, K, D)), random.normal(size=(T, K))
    answers_TKD[ids_TK < 0], weights_TK[ids_TK < 0] = np.nan, np.nan
    made = [random.normal(size=(T, D)) for _ in range(biases)]
    return answers_TKD, ids_TK, weights_TK, made, random.normal(size=(T, D))


cases = st.builds(
    make_case, st.integers(0, 3), st.integers(0, 4), st.integers(0, 3), st.integers(0, 2), st.integers(0, 10**6)
)


class TestCombine:
    @settings(pairs_agree, max_examples=120)
    @given(cases)
    def test_values_and_gradients_agree(self, case: tuple[Floats, Ints, Floats, list[Floats], Floats]) -> None:
        """Both add every bias once, unweighted, and nothing of an empty slot; so do the gradients."""
        answers_TKD, ids_TK, weights_TK, biases, g_TD = case
        leaves = [floats(array, leaf=True) for array in (answers_TKD, weights_TK, *biases)]
        y_TD = first.combine(leaves[0], torch.from_numpy(ids_TK), leaves[1], leaves[2:])
        assert_close(second.combine(answers_TKD, ids_TK, weights_TK, biases), y_TD, addend=5.0)
        gradients = torch.autograd.grad(y_TD, leaves, floats(g_TD), materialize_grads=True)
        d_answers, d_weights, d_biases = second.combine_backward(*case)
        for expected, actual in zip([d_answers, d_weights, *d_biases], gradients, strict=True):
            assert_close(expected, actual, addend=5.0)


class TestFailedRanks:
    @pairs_agree
    @given(st.integers(0, 10**6))
    def test_routings_agree(self, seed: int) -> None:
        """Both empty the slots of every expert that misses an owner, one of its shards too, and no others."""
        random = np.random.default_rng(seed)
        E, W = int(random.integers(1, 6)), 4
        owners = [random.permutation(W)[: random.integers(1, 3)].tolist() for _ in range(E)]
        ids_TK = random.integers(-1, E, size=(int(random.integers(0, 4)), 3))
        failed = random.permutation(W)[: random.integers(0, W + 1)].tolist()
        left = assert_agree(first.without_ranks, second.without_ranks, ids_TK, owners, failed)
        if not failed:
            assert ids_TK.tolist() == left[1]


def both_handed(ids: list[Ints], handed: list[Handed], copies: list[list[int]], ranks: list[list[int]]) -> list[Any]:
    """Which slots both call wrongly handed."""
    expected = second_experts.wrongly_handed(ids, handed, copies, ranks)
    told = [first_experts.Handed(*row) for row in handed]
    actual = first_experts.wrongly_handed([torch.from_numpy(each) for each in ids], told, copies, ranks)
    assert expected == list(actual)
    return expected


COPIES, RANKS = [[3, 0], [1], [2, 5]], [[0], [1], [1], [2], [0], [0, 2]]


class TestExpertCopies:
    @settings(pairs_agree, max_examples=200)
    @given(st.integers(0, 10**6))
    def test_verdicts_agree(self, seed: int) -> None:
        """Both find the slots whose rows were lost, doubled, moved, halved or made up."""
        random = np.random.default_rng(seed)
        ids = [random.integers(-1, 3, size=(int(random.integers(0, 3)), 2)) for _ in range(2)]
        handed, slots = [], [(s, t, k) for s, each in enumerate(ids) for t, k in np.ndindex(*each.shape)]
        for s, t, k in slots:
            if ids[s][t, k] >= 0:
                place = int(random.choice(COPIES[ids[s][t, k]]))
                handed += [Handed(s, t, k, place, rank) for rank in RANKS[place]]
        assert [] == both_handed(ids, handed, COPIES, RANKS)
        for _ in range(int(random.integers(0, 3))):
            change = random.integers(0, 4)
            if change == 0 and slots:
                handed.append(
                    Handed(*slots[random.integers(len(slots))], int(random.integers(6)), int(random.integers(3)))
                )
            elif change == 1 and handed:
                handed.pop(random.integers(len(handed)))
            elif change == 2 and handed:
                handed.append(handed[random.integers(len(handed))])
            elif handed:
                i = int(random.integers(len(handed)))
                handed[i] = handed[i]._replace(rank=int(random.integers(3)))
        order = random.permutation(len(handed))
        both_handed(ids, [handed[i] for i in order], COPIES, RANKS)

    def test_gradients(self) -> None:
        """Every copy gets the sum over its expert's copies; a place of no expert is left out, and memory is its own."""
        own = {place: np.random.default_rng(place).normal(size=(2, 3)) for place in range(7)}
        expected = second_experts.copy_gradients(own, COPIES)
        leaves = {place: floats(gradient) for place, gradient in own.items()}
        actual = first_experts.copy_gradients(leaves, COPIES)
        assert {0, 1, 2, 3, 5} == set(expected) == set(actual)
        for place, gradient in expected.items():
            assert_close(gradient, actual[place], addend=5.0)
        assert_close(own[3] + own[0], actual[0], addend=5.0)
        assert actual[0].tolist() == actual[3].tolist()
        assert actual[2].tolist() == actual[5].tolist()
        actual[1].zero_()
        assert_close(own[1], leaves[1])


def first_wrong(ids: list[torch.Tensor], handed: list[Handed], copies: Any, ranks: Any) -> Any:
    """The slots that the first oracle calls wrongly handed."""
    return first_experts.wrongly_handed(ids, [first_experts.Handed(*row) for row in handed], copies, ranks)


def one_slot(expert: int, *rows_of: tuple[int, int]) -> tuple[Any, ...]:
    """One slot that chose an expert, and the place and rank of each row that was handed."""
    return [np.array([[expert]])], [Handed(0, 0, 0, place, rank) for place, rank in rows_of], COPIES, RANKS


def zeros(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    """Answers, ids, weights and biases of these shapes."""
    answers, ids, weights, *biases = (np.zeros(shape) for shape in shapes)
    return answers, ids.astype(np.int64), weights, biases


FINE, WRONG, OWN = [], [(0, 0, 0)], {0: np.zeros(1), 1: np.zeros(1)}  # type: ignore[var-annotated]
NOT_THERE = [Handed(*at, 1, 1) for at in [(1, 0, 0), (0, 1, 0), (0, 0, 2), (0, -1, 0), (0, 0, 0)]]
THREE, CUT = np.array([[0, 2, -1], [2, 2, 1]]), [[0, 1], [1, 0], [2, 3]]

test_by_hand = by_hand(
    *rows(first.combine, second.combine,
        *(
            (f"nothing is broadcast: {shapes}", zeros(*shapes), REFUSED)
            for shapes in [
                ((2, 3, 4), (2, 2), (2, 3)), ((2, 3, 4), (2, 3), (2, 1)), ((2, 3, 4), (1, 3), (1, 3)),
                ((2, 3, 4), (2, 3), (2, 3), (1, 4)), ((2, 3, 4), (2, 3), (2, 3), (2, 4), (4,)),
                ((2, 3, 4), (2, 3), (2, 3), (2, 1)),
            ]
        ),
    ),
    # Experts 0 and 1 are cut over ranks 0 and 1, and 2 over 2 and 3.
    *rows(first.without_ranks, second.without_ranks,
        ("rank 1 fails", (THREE, CUT, [1]), [[-1, 2, -1], [2, 2, -1]]),
        ("rank 3 fails", (THREE, CUT, [3]), [[0, -1, -1], [-1, -1, 1]]),
        ("ranks 0 and 2 fail", (THREE, CUT, [0, 2]), [[-1, -1, -1], [-1, -1, -1]]),
        ("a rank that holds nothing fails, and the ids are as they were", (THREE, CUT, [7]), THREE.tolist()),
        ("an id beyond the experts", (np.array([[2]]), [[0], [1]], [0]), REFUSED),
        ("an id below -1", (np.array([[-2]]), [[0], [1]], [0]), REFUSED),
        ("an expert without a rank", (np.array([[0]]), [[0], []], [0]), REFUSED),
    ),
    # Expert 2 has a copy on rank 1 and another that is cut over ranks 0 and 2.
    *rows(first_wrong, second_experts.wrongly_handed,
        ("one copy", one_slot(0, (3, 2)), FINE),
        ("the other copy", one_slot(0, (0, 0)), FINE),
        ("both copies", one_slot(0, (3, 2), (0, 0)), WRONG),
        ("the right place on the wrong rank", one_slot(0, (3, 0)), WRONG),
        ("a place of another expert", one_slot(0, (1, 1)), WRONG),
        ("a row twice", one_slot(0, (3, 2), (3, 2)), WRONG),
        ("no row", one_slot(0), WRONG),
        ("both shards", one_slot(2, (5, 0), (5, 2)), FINE),
        ("both shards in another order", one_slot(2, (5, 2), (5, 0)), FINE),
        ("one of two shards", one_slot(2, (5, 0)), WRONG),
        ("one shard twice", one_slot(2, (5, 0), (5, 0)), WRONG),
        ("both shards and the other copy", one_slot(2, (5, 0), (5, 2), (2, 1)), WRONG),
        ("the copy that is whole", one_slot(2, (2, 1)), FINE),
        ("a place of no expert", one_slot(1, (4, 0)), WRONG),
        ("an empty slot", one_slot(-1), FINE),
        ("a row of an empty slot", one_slot(-1, (1, 1)), WRONG),
        ("all places may be somebody's", ([np.array([[0]])], [Handed(0, 0, 0, 1, 7)], [[0, 1]], [[3], [7]]), FINE),
        ("rows of slots that are not there, in order", ([np.array([[1, 1]])], NOT_THERE, COPIES, RANKS),
         [(0, -1, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 0, 0)]),
        *(
            (f"id {expert}, copies {copies}, ranks {ranks}", ([np.array([[expert]])], [], copies, ranks), REFUSED)
            for expert, copies, ranks in [
                (3, COPIES, RANKS), (-2, COPIES, RANKS), (0, [[0], []], RANKS), (0, [[0, 0]], RANKS),
                (0, [[0], [1, 0]], RANKS), (0, [[6]], RANKS), (0, [[-1]], RANKS), (0, [[0, 6]], RANKS),
                (0, [[0, 1]], [[0], []]), (0, [[1]], [[0], []]),
            ]
        ),
    ),
    *rows(
        lambda copies: first_experts.copy_gradients({place: floats(one) for place, one in OWN.items()}, copies),
        lambda copies: second_experts.copy_gradients(OWN, copies),
        *(
            (f"gradients of copies {copies}", (copies,), REFUSED)
            for copies in ([[0, 2]], [[2]], [[0], []], [[0, 0]], [[0], [1, 0]], [[-1]])
        ),
    ),
)  # fmt: skip
