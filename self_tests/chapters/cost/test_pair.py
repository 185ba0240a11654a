"""What an exchange costs at least, or may cost, worked out twice: rows, bytes and calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.cost import calls as first_calls
from moe_conformance.reference.cost import rows as first
from moe_conformance.reference.cost import wire_bytes as first_bytes
from self_tests.chapters.cost.second import calls as second_calls
from self_tests.chapters.cost.second import rows as second
from self_tests.chapters.cost.second import wire_bytes as second_bytes
from self_tests.chapters.exchange.second import deliveries as second_exchange
from self_tests.oracles.asked_twice import assert_agree, assert_refused

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Ints = NDArray[np.int64]
Lists = list[list[int]]
EXCHANGES = [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1), (6, 1, 1), (3, 2, 1)]


def drawn(seed: int, exchange: tuple[int, int, int]) -> tuple[list[Ints], Lists, Lists]:
    """Ids of all ranks, groups, and experts dealt out in any way; several of a token's experts share a rank."""
    ep, etp, edp = exchange
    random = np.random.default_rng(seed)
    experts = ep * int(random.integers(1, 4))
    placement = second_exchange.contiguous(ep * etp * edp, experts, ep, etp)
    order = random.permutation(experts)
    held = [[int(order[e]) for e in each] for each in placement.held]
    K = int(random.integers(0, 4))
    ids = [random.integers(-1, experts, size=(int(T), K)) for T in random.integers(0, 4, size=ep * etp * edp)]
    return ids, [list(each) for each in placement.exchange_groups], held


def matrix(rows: Lists) -> list[Any]:
    """Rows as `assert_agree` returns them."""
    return [[len(rows), len(rows[0])], rows]


exchanges = st.sampled_from(EXCHANGES)


class TestRows:
    @settings(pairs_agree, max_examples=150)
    @given(st.integers(0, 10**6), exchanges)
    def test_rows_agree(self, seed: int, exchange: tuple[int, int, int]) -> None:
        """Both count the same rows by pair and by token, and by pair there are never fewer."""
        ids, groups, held = drawn(seed, exchange)
        pairs = np.array(assert_agree(first.pair_rows, second.pair_rows, ids, groups, held)[1])
        least = np.array(assert_agree(first.least_rows, second.least_rows, ids, groups, held)[1])
        tokens = [len(each) for each in ids]
        gathered = np.array(assert_agree(first.all_gather_rows, second.all_gather_rows, tokens, groups)[1])
        assert (least <= pairs).all()
        assert (least <= gathered).all()
        assert not any(each.diagonal().any() for each in (pairs, least, gathered))
        splits = np.array(second_exchange.splits(ids, second_exchange.Placement(groups, held)))
        np.fill_diagonal(splits, 0)
        assert splits.tolist() == pairs.tolist()

    # Ranks 0 and 1 on one node, 2 and 3 on the other. Experts 0, 1 on rank 0; 2 on 1; 3, 4 on 2; 5 on 3.
    HELD = ([0, 1], [2], [3, 4], [5])
    # Rank 0: token 0 to ranks 0, 2, 2; token 1 to 1, 3, 2; token 2 to 3. Rank 1: token 0 to 1, 0, 0. Rank 2: nothing.
    # Rank 3: token 0 to 2; token 1 to 0 and 1.
    IDS = (
        np.array([[0, 3, 4], [2, 5, 3], [5, -1, -1]]),
        np.array([[2, 0, 1]]),
        np.zeros((0, 3), dtype=np.int64),
        np.array([[4, -1, 4], [1, 2, -1]]),
    )

    def test_by_hand(self) -> None:
        """Four ranks: by pair, and by token and rank."""
        question = list(self.IDS), [[0, 1, 2, 3]], list(self.HELD)
        pairs = [[0, 1, 3, 2], [2, 0, 0, 0], [0, 0, 0, 0], [1, 1, 2, 0]]
        assert matrix(pairs) == assert_agree(first.pair_rows, second.pair_rows, *question)
        least = [[0, 1, 2, 2], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
        assert matrix(least) == assert_agree(first.least_rows, second.least_rows, *question)
        gathered = [[0, 3, 3, 3], [1, 0, 1, 1], [0, 0, 0, 0], [2, 2, 2, 0]]
        assert matrix(gathered) == assert_agree(
            first.all_gather_rows, second.all_gather_rows, [3, 1, 0, 2], [[2, 0, 3, 1]]
        )
        places = [[0, 4, 2, 0], [2, 0, 2, 0], [2, 4, 0, 0], [0, 0, 0, 0]]
        question = [2, 2, 2, 5], [[0, 1, 2], [3]], [1, 2, 1, 4]
        assert matrix(places) == assert_agree(first.place_rows, second.place_rows, *question)
        moved, smallest = sum(map(sum, pairs)), sum(map(sum, least))
        assert 12 / 9 == assert_agree(first.ratio, second.ratio, moved, smallest)

    def test_shards_and_replicas(self) -> None:
        """Two shards are two owners, and a replica of another group is none."""
        ids = [np.array([[0, 0]]), np.array([[0, -1]]), np.array([[-1, 0]]), np.array([[-1, -1]])]
        groups, held = [[0, 1], [2, 3]], [[0]] * 4
        pairs = [[0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
        assert matrix(pairs) == assert_agree(first.pair_rows, second.pair_rows, ids, groups, held)
        least = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
        assert matrix(least) == assert_agree(first.least_rows, second.least_rows, ids, groups, held)
        gathered = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
        assert matrix(gathered) == assert_agree(first.all_gather_rows, second.all_gather_rows, [1] * 4, groups)

    @settings(pairs_agree, max_examples=30)
    @given(st.integers(0, 10**6), exchanges)
    def test_tokens_and_slots_carry_no_meaning(self, seed: int, exchange: tuple[int, int, int]) -> None:
        """Permuted tokens and slots, and experts that are listed in another order, cost the same."""
        ids, groups, held = drawn(seed, exchange)
        random = np.random.default_rng(seed)
        moved = [each[random.permutation(len(each))][:, random.permutation(each.shape[1])] for each in ids]
        for rows in (first.pair_rows, first.least_rows):
            was = rows([torch.from_numpy(each) for each in ids], groups, held)
            now = rows([torch.from_numpy(each) for each in moved], groups[::-1], [each[::-1] for each in held])
            assert was.tolist() == now.tolist()

    @pytest.mark.parametrize(
        ("ids", "groups"),
        [([[[9]], [[0]]], [[0, 1]]), ([[[-2]], [[0]]], [[0, 1]]), ([[[1]], [[0]]], [[0], [1]]),
         ([[[0]], [[0]]], [[0]]), ([[[0]], [[1]]], [[0, 1], [1]])],
    )  # fmt: skip
    def test_refused(self, ids: list[Lists], groups: Lists) -> None:
        """Experts that nobody in the group holds, and ranks in no group or in two."""
        question = [np.array(each) for each in ids], groups, [[0], [1]]
        assert_refused(first.pair_rows, second.pair_rows, *question)
        assert_refused(first.least_rows, second.least_rows, *question)

    def test_ratio(self) -> None:
        """Of what moved to what had to; of nothing to nothing it is 1."""
        for question, expected in [((3, 2), 1.5), ((2, 2), 1.0), ((0, 0), 1.0), ((5, 0), 1.0), ((7, 3), 7 / 3)]:
            assert expected == assert_agree(first.ratio, second.ratio, *question)
        for question in [(1, 2), (-1, -1), (0, -1), (-1, 0)]:
            assert_refused(first.ratio, second.ratio, *question)


class TestBytes:
    @pairs_agree
    @given(*[st.integers(-1, 9)] * 4, st.none() | st.integers(0, 99))
    def test_metadata_agrees(self, ranks: int, experts: int, top_k: int, rows: int, entry: int | None) -> None:
        """Both allow the same bytes beside the rows, or refuse."""
        question = ranks, experts, top_k, rows
        if min(ranks, experts, top_k) > 0 and rows >= 0 and entry != 0:
            assert_agree(first_bytes.metadata_bytes, second_bytes.metadata_bytes, *question, map_entry=entry)
        else:
            assert_refused(first_bytes.metadata_bytes, second_bytes.metadata_bytes, *question, map_entry=entry)

    def test_metadata_by_hand(self) -> None:
        """3 ranks and 5 experts: 18 numbers of 8 bytes; 7 rows with 2 slots of 16 bytes."""
        expected = 8 * 18 + 7 * 2 * 16
        assert expected == assert_agree(first_bytes.metadata_bytes, second_bytes.metadata_bytes, 3, 5, 2, 7)
        assert 144 == assert_agree(first_bytes.metadata_bytes, second_bytes.metadata_bytes, 3, 5, 2, 0)
        for question in [(0, 5, 2, 7), (3, 0, 2, 7), (3, 5, 0, 7), (3, 5, 2, -1)]:
            assert_refused(first_bytes.metadata_bytes, second_bytes.metadata_bytes, *question)

    @settings(pairs_agree, max_examples=150)
    @given(
        st.integers(1, 40),
        st.integers(1, 17),
        st.none() | st.integers(1, 45),
        st.integers(0, 3),
        st.sampled_from([1, 2, 3, 16, 128]),
    )
    def test_row_bytes_agree(self, hidden: int, bits: int, block: int | None, top_k: int, alignment: int) -> None:
        """Both find the same size of a row, of odd bits and short last blocks too."""
        options = {"top_k": top_k, "alignment": alignment}
        made = assert_agree(first_bytes.row_bytes, second_bytes.row_bytes, hidden, bits, block, **options)
        assert made % alignment == 0

    @pytest.mark.parametrize(
        ("question", "options", "expected"),
        [
            ((7168, 8, 128), {}, 7168 + 56 * 4),  # DeepSeek-V3's rows
            ((7168, 16, None), {}, 14336),
            ((129, 8, 128), {}, 129 + 8),
            ((128, 8, 128), {}, 128 + 4),
            ((100, 8, 128), {}, 100 + 4),
            ((3, 4, None), {}, 2),
            ((5, 6, 2), {}, 4 + 12),
            ((128, 8, 128), {"alignment": 16}, 144),
            ((124, 8, 128), {"alignment": 16}, 128),
            ((128, 8, 128), {"top_k": 3}, 180),
            ((128, 8, 128), {"top_k": 3, "alignment": 16}, 192),
        ],
    )
    def test_row_bytes_by_hand(self, question: tuple[Any, ...], options: dict[str, int], expected: int) -> None:
        """Bits to whole bytes, four bytes for each block that is begun, then the alignment."""
        assert expected == assert_agree(first_bytes.row_bytes, second_bytes.row_bytes, *question, **options)

    @pytest.mark.parametrize(
        ("question", "options"),
        [((0, 8, 128), {}), ((8, 0, 128), {}), ((8, 8, 0), {}), ((8, 8, -1), {}), ((8, 8, None), {"top_k": -1}),
         ((8, 8, None), {"alignment": 0})],
    )  # fmt: skip
    def test_no_row(self, question: tuple[Any, ...], options: dict[str, int]) -> None:
        """Nothing has no size."""
        assert_refused(first_bytes.row_bytes, second_bytes.row_bytes, *question, **options)

    @pytest.mark.parametrize(
        ("rows", "multiple", "expected"),
        [([], 4, 0), ([0, 0], 4, 8), ([1, 4, 5], 4, 8 + 8 + 12), ([3, 7], 1, 12), ([8], 8, 16), ([9], 8, 24)],
    )
    def test_most_rows(self, rows: list[int], multiple: int, expected: int) -> None:
        """Each expert's rows up to the multiple, and a multiple more for each expert."""
        assert expected == assert_agree(first_bytes.most_rows, second_bytes.most_rows, rows, multiple)

    def test_most_rows_without_padding_by_hand(self) -> None:
        """A multiple of one, unless another is given."""
        assert 12 == assert_agree(first_bytes.most_rows, second_bytes.most_rows, [3, 7])

    @pairs_agree
    @given(st.lists(st.integers(0, 30), max_size=5), st.integers(1, 9))
    def test_most_rows_agree(self, rows: list[int], multiple: int) -> None:
        """Both find the same rows, of which none may be padding beyond two multiples per expert."""
        most = assert_agree(first_bytes.most_rows, second_bytes.most_rows, rows, multiple)
        assert sum(rows) + multiple * len(rows) <= most < sum(rows) + 2 * multiple * len(rows) or not rows

    @pytest.mark.parametrize(("rows", "multiple"), [([1, -1], 2), ([1], 0), ([1], -2)])
    def test_no_most_rows(self, rows: list[int], multiple: int) -> None:
        """Fewer rows than none, and no multiple."""
        assert_refused(first_bytes.most_rows, second_bytes.most_rows, rows, multiple)


class TestCalls:
    def test_calls_of_one_rank(self) -> None:
        """One rank makes none; two may make any number."""
        for calls, ranks, expected in [(0, 1, True), (1, 1, False), (9, 1, False), (0, 2, True), (9, 2, True)]:
            assert expected is assert_agree(first_calls.legal_calls, second_calls.legal_calls, calls, ranks)
        for question in [(-1, 2), (0, 0), (1, -1)]:
            assert_refused(first_calls.legal_calls, second_calls.legal_calls, *question)

    @pytest.mark.parametrize(
        ("calls", "expected"),
        [
            ([[3]], True),
            ([[3, 3], [3, 3, 3]], True),
            ([[3, 3], [3, 4]], False),
            ([[3, 4], [3, 4]], False),  # the same in each case, another on rank 1
            ([[3, 3], [4, 4]], False),
            ([[0, 0], [0]], True),
        ],
    )
    def test_same_calls(self, calls: Lists, expected: bool) -> None:
        """One number for all cases and ranks."""
        assert expected is assert_agree(first_calls.same_calls, second_calls.same_calls, calls)

    def test_no_calls_to_compare(self) -> None:
        """No case, or one of nobody."""
        for calls in ([], [[]], [[1], []]):
            assert_refused(first_calls.same_calls, second_calls.same_calls, calls)

    @pytest.mark.parametrize(
        ("backward", "weight_bytes", "expected"),
        [
            ((5, 3, 0), 0, True),
            ((4, 2, 0), 0, True),
            ((6, 3, 0), 0, False),
            ((5, 4, 0), 0, False),
            ((3, 5, 0), 0, False),  # swapped
            ((5, 3, 1), 0, False),  # counts again
            ((5, 3, 20), 20, True),
            ((5, 3, 21), 20, False),
            ((0, 0, 0), 0, True),
        ],
    )
    def test_backward(self, backward: tuple[int, int, int], weight_bytes: int, expected: bool) -> None:
        """Five rows out and three back, with seven bytes beside them that are not needed again."""
        asked = {"weight_bytes": weight_bytes}
        second_says = second_calls.legal_backward(second_calls.Moved(5, 3, 7), second_calls.Moved(*backward), **asked)
        first_says = first_calls.legal_backward(first_calls.Moved(5, 3, 7), first_calls.Moved(*backward), **asked)
        assert (expected, expected) == (first_says, second_says)

    @pytest.mark.parametrize("change", [(0, 0, -1), (0, -1, 0), (-1, 0, 0)])
    def test_less_than_nothing(self, change: tuple[int, int, int]) -> None:
        """No direction moves less than nothing."""
        for oracle in (first_calls, second_calls):
            good, bad = oracle.Moved(1, 1, 1), oracle.Moved(*change)
            for forward, backward, weight_bytes in [(good, bad, 0), (bad, good, 0), (good, good, -1)]:
                with pytest.raises(ValueError, match=r"-1"):
                    oracle.legal_backward(forward, backward, weight_bytes=weight_bytes)

    @pytest.mark.parametrize(
        ("steps", "expected"),
        [
            (["abc", "ab", "ab"], True),  # the first may differ
            (["ab", "ab", "abc"], False),
            (["ab", "abc", "ab", "ab"], False),
            (["ab", "ab", "ba"], False),  # the same calls in another order
            (["", "", ""], True),
            (["a", "", ""], True),
            (["ab", "ab", "ab", "ab", "a"], False),
        ],
    )
    def test_settled(self, steps: list[str], expected: bool) -> None:
        """From the second step on, all are alike."""
        for oracle in (first_calls, second_calls):
            assert expected is oracle.settled(steps)
            assert expected is oracle.settled([[(kind, 4) for kind in step] for step in steps])
        for few in (steps[:2], steps[:1], []):
            assert_refused(first_calls.settled, second_calls.settled, few)

    @pytest.mark.parametrize(
        ("after", "expected"),
        [
            ([900, 930, 961, 991], 30),
            ([900, 5000, 5030, 5060], 30),
            ([900, 930, 930, 960], 0),
            ([900, 800, 830, 900], 0),
            ([7, 7, 7], 0),
        ],
    )
    def test_growth(self, after: list[int], expected: int) -> None:
        """What every step leaves: growing once, or in some steps, is none."""
        assert expected == assert_agree(first_calls.growth, second_calls.growth, after)
        for few in (after[:2], []):
            assert_refused(first_calls.growth, second_calls.growth, few)

    @pytest.mark.parametrize(
        ("group", "edp_group", "expected"),
        [
            ([1, 3], [3, 1], True),
            ([1, 3], [1, 3, 5], True),
            ([1], [1, 3], True),
            ([1, 2], [1, 3], False),
            ([1, 3, 5], [1, 3], False),
            ([2], [2], True),  # a call with oneself, which moves nothing
            ([2, 1], [2], False),
            ([0, 1, 2, 3], [1, 3], False),
        ],
    )
    def test_reduction(self, group: list[int], edp_group: list[int], expected: bool) -> None:
        """Within the replicas of the expert, all or some."""
        question = group, edp_group
        assert expected is assert_agree(first_calls.legal_reduction, second_calls.legal_reduction, *question)

    def test_no_reduction(self) -> None:
        """Nobody reduces nothing."""
        for question in [([], [1]), ([1], []), ([], [])]:
            assert_refused(first_calls.legal_reduction, second_calls.legal_reduction, *question)
