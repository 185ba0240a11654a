"""What an exchange costs at least, or may cost, worked out twice: rows, bytes and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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
        splits_WW = np.zeros_like(pairs)
        for pair in second_exchange.deliveries(ids, second_exchange.Placement(groups, held)):
            splits_WW[pair.source, pair.destination] += pair.source != pair.destination
        assert splits_WW.tolist() == pairs.tolist()


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

    @pairs_agree
    @given(st.lists(st.integers(0, 30), max_size=5), st.integers(1, 9))
    def test_most_rows_agree(self, rows: list[int], multiple: int) -> None:
        """Both find the same rows, of which none may be padding beyond two multiples per expert."""
        most = assert_agree(first_bytes.most_rows, second_bytes.most_rows, rows, multiple)
        assert sum(rows) + multiple * len(rows) <= most < sum(rows) + 2 * multiple * len(rows) or not rows


# Ranks 0 and 1 on one node, 2 and 3 on the other. Experts 0, 1 on rank 0; 2 on 1; 3, 4 on 2; 5 on 3.
# Rank 0: token 0 to ranks 0, 2, 2; token 1 to 1, 3, 2; token 2 to 3. Rank 1: token 0 to 1, 0, 0. Rank 2: nothing.
# Rank 3: token 0 to 2; token 1 to 0 and 1.
IDS = [
    np.array([[0, 3, 4], [2, 5, 3], [5, -1, -1]]),
    np.array([[2, 0, 1]]),
    np.zeros((0, 3), dtype=np.int64),
    np.array([[4, -1, 4], [1, 2, -1]]),
]
FOUR = IDS, [[0, 1, 2, 3]], [[0, 1], [2], [3, 4], [5]]
# Two shards are two owners, and a replica of another group is none.
TWO_BY_TWO = (
    [np.array([[0, 0]]), np.array([[0, -1]]), np.array([[-1, 0]]), np.array([[-1, -1]])],
    [[0, 1], [2, 3]],
    [[0]] * 4,
)
NOT_HELD = [
    (f"{ids} of groups {groups}", ([np.array(each) for each in ids], groups, [[0], [1]]), REFUSED)
    for ids, groups in [
        ([[[9]], [[0]]], [[0, 1]]),
        ([[[-2]], [[0]]], [[0, 1]]),
        ([[[1]], [[0]]], [[0], [1]]),
        ([[[0]], [[0]]], [[0]]),
        ([[[0]], [[1]]], [[0, 1], [1]]),
    ]
]


def moved(oracle: Any) -> Callable[..., bool]:
    """Whether a backward is legal, told three numbers of each direction."""
    return lambda forward, backward, **weights: oracle.legal_backward(
        oracle.Moved(*forward), oracle.Moved(*backward), **weights
    )


def one(question: Any) -> tuple[Any]:
    """A question of one argument."""
    return (question,)


test_by_hand = by_hand(
    *rows(first.pair_rows, second.pair_rows,
        ("rows by pair", FOUR, [[0, 1, 3, 2], [2, 0, 0, 0], [0, 0, 0, 0], [1, 1, 2, 0]]),
        ("rows by pair, to shards", TWO_BY_TWO, [[0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]),
        *NOT_HELD,
    ),
    *rows(first.least_rows, second.least_rows,
        ("rows by token and rank", FOUR, [[0, 1, 2, 2], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]),
        ("rows by token, to shards", TWO_BY_TWO, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]),
        *NOT_HELD,
    ),
    *rows(first.all_gather_rows, second.all_gather_rows,
        ("gathered", ([3, 1, 0, 2], [[2, 0, 3, 1]]), [[0, 3, 3, 3], [1, 0, 1, 1], [0, 0, 0, 0], [2, 2, 2, 0]]),
        ("gathered in groups", ([1] * 4, [[0, 1], [2, 3]]), [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]),
    ),
    *rows(first.place_rows, second.place_rows,
        ("places", ([2, 2, 2, 5], [[0, 1, 2], [3]], [1, 2, 1, 4]),
         [[0, 4, 2, 0], [2, 0, 2, 0], [2, 4, 0, 0], [0, 0, 0, 0]]),
    ),
    *rows(first.ratio, second.ratio,
        *((f"{n} of {least} rows", (n, least), ratio) for n, least, ratio in [(7, 3, 7 / 3), (2, 2, 1.0), (0, 0, 1.0)]),
        *((f"{n} of {least} rows", (n, least), REFUSED) for n, least in [(1, 2), (-1, -1), (0, -1), (-1, 0)]),
    ),
    # Bits to whole bytes, four bytes for each block that is begun, then the alignment.
    *rows(first_bytes.row_bytes, second_bytes.row_bytes,
        ("DeepSeek-V3's rows", (7168, 8, 128), 7168 + 56 * 4),
        ("rows without scales", (7168, 16, None), 14336),
        ("a block that is begun", (129, 8, 128), 129 + 8),
        ("half a byte", (5, 6, 2), 4 + 12),
        ("aligned", (128, 8, 128), {"alignment": 16}, 144),
        ("aligned already", (124, 8, 128), {"alignment": 16}, 128),
        ("with ids and weights", (128, 8, 128), {"top_k": 3}, 180),
        ("with ids and weights, aligned", (128, 8, 128), {"top_k": 3, "alignment": 16}, 192),
        *((f"a row of {sizes}", sizes, REFUSED) for sizes in [(0, 8, 128), (8, 0, 128), (8, 8, 0), (8, 8, -1)]),
        ("K = -1", (8, 8, None), {"top_k": -1}, REFUSED),
        ("alignment 0", (8, 8, None), {"alignment": 0}, REFUSED),
    ),
    # Each expert's rows up to the multiple, and a multiple more for each expert.
    *rows(first_bytes.most_rows, second_bytes.most_rows,
        ("no padding", ([3, 7],), 12),
        *(
            (f"{rows_N} in multiples of {multiple}", (rows_N, multiple), most)
            for rows_N, multiple, most in [
                ([], 4, 0), ([1, 4, 5], 4, 8 + 8 + 12), ([3, 7], 1, 12), ([8], 8, 16), ([9], 8, 24),
                ([1, -1], 2, REFUSED), ([1], 0, REFUSED), ([1], -2, REFUSED),
            ]
        ),
    ),
    *rows(first_calls.legal_calls, second_calls.legal_calls,
        *(
            (f"{calls} calls of {ranks} ranks", (calls, ranks), legal)
            for calls, ranks, legal in [
                (0, 1, True), (1, 1, False), (0, 2, True), (9, 2, True), (-1, 2, REFUSED), (0, 0, REFUSED),
                (1, -1, REFUSED),
            ]
        ),
    ),
    *rows(first_calls.same_calls, second_calls.same_calls,
        ("one number of one rank", one([[3]]), True),
        ("one number for all cases and ranks", one([[3, 3], [3, 3, 3]]), True),
        ("the last rank makes another", one([[3, 3], [3, 4]]), False),
        ("the same in each case, another on rank 1", one([[3, 4], [3, 4]]), False),
        ("another in the second case", one([[3, 3], [4, 4]]), False),
        ("no calls", one([[0, 0], [0]]), True),
        *((f"calls {calls}", one(calls), REFUSED) for calls in ([], [[]], [[1], []])),  # type: ignore[var-annotated]
    ),
    # Five rows out and three back, with seven bytes beside them that are not needed again.
    *rows(moved(first_calls), moved(second_calls),
        ("as many rows", ((5, 3, 7), (5, 3, 0)), True),
        ("fewer rows", ((5, 3, 7), (4, 2, 0)), True),
        ("more in dispatch", ((5, 3, 7), (6, 3, 0)), False),
        ("more in combine", ((5, 3, 7), (5, 4, 0)), False),
        ("swapped", ((5, 3, 7), (3, 5, 0)), False),
        ("counts again", ((5, 3, 7), (5, 3, 1)), False),
        ("weights", ((5, 3, 7), (5, 3, 20)), {"weight_bytes": 20}, True),
        ("more than the weights", ((5, 3, 7), (5, 3, 21)), {"weight_bytes": 20}, False),
        ("nothing", ((5, 3, 7), (0, 0, 0)), True),
        ("weights of -1", ((1, 1, 1), (1, 1, 1)), {"weight_bytes": -1}, REFUSED),
        *(
            (f"{forward} forward, {backward} back", (forward, backward), REFUSED)
            for bad in ((0, 0, -1), (0, -1, 0), (-1, 0, 0))
            for forward, backward in (((1, 1, 1), bad), (bad, (1, 1, 1)))
        ),
    ),
    # From the second step on, all are alike.
    *rows(first_calls.settled, second_calls.settled,
        ("the first step may differ", one(["abc", "ab", "ab"]), True),
        ("the last may not", one(["ab", "ab", "abc"]), False),
        ("the second may not", one(["ab", "abc", "ab", "ab"]), False),
        ("the same calls in another order", one(["ab", "ab", "ba"]), False),
        ("calls with their sizes", one([[("a", 4)], [("b", 4)], [("b", 4)]]), True),
        ("no calls at all", one(["", "", ""]), True),
        ("calls in the first step alone", one(["a", "", ""]), True),
        ("fewer calls in the last of five", one(["ab", "ab", "ab", "ab", "a"]), False),
        *((f"{len(steps)} steps", one(steps), REFUSED) for steps in ([], ["ab"], ["ab", "ab"])),
    ),
    # What every step leaves: growing once, or in some steps, is none.
    *rows(first_calls.growth, second_calls.growth,
        ("in every step", one([900, 930, 961, 991]), 30),
        ("in the first more than after it", one([900, 5000, 5030, 5060]), 30),
        ("in some steps", one([900, 930, 930, 960]), 0),
        ("after a fall", one([900, 800, 830, 900]), 0),
        ("not at all", one([7, 7, 7]), 0),
        ("growth in one step", one([900, 930]), REFUSED),
        ("growth in no step", one([]), REFUSED),
    ),
    # Within the replicas of the expert, all or some.
    *rows(first_calls.legal_reduction, second_calls.legal_reduction,
        *(
            (f"{group} of replicas {replicas}", (group, replicas), legal)
            for group, replicas, legal in [
                ([1, 3], [3, 1], True), ([1, 3], [1, 3, 5], True), ([1], [1, 3], True), ([1, 2], [1, 3], False),
                ([1, 3, 5], [1, 3], False), ([2], [2], True), ([2, 1], [2], False), ([0, 1, 2, 3], [1, 3], False),
                ([], [1], REFUSED), ([1], [], REFUSED), ([], [], REFUSED),
            ]
        ),
    ),
)  # fmt: skip
