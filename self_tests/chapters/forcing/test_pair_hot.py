"""Hot ranks, nodes and experts, worked out twice: reference.forcing.hot and forcing_imbalance, and the longhand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.forcing import hot as first
from moe_conformance.reference.forcing import imbalance as first_imbalance
from self_tests.chapters.forcing.second import hot as second
from self_tests.oracles.asked_twice import assert_agree, assert_refused
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Routes(NamedTuple):
    """Ids of every source rank, and the experts of every block."""

    ids_by_rank: list[Ints]
    blocks: list[list[int]]

    @property
    def experts(self) -> int:
        """E, of all blocks."""
        return sum(map(len, self.blocks))


def deal_blocks(random: np.random.Generator, blocks: int, held: int, *, uneven: bool = False) -> list[list[int]]:
    """Experts dealt out to blocks in any order, of one size or, if there are several, of different ones."""
    order = [int(expert) for expert in random.permutation(blocks * held)]
    cuts = [held * i for i in range(blocks + 1)]
    if uneven and blocks > 1 and held > 1:
        cuts[1] += 1
    return [order[low:high] for low, high in pairwise(cuts)]


def hot_route(random: np.random.Generator, tokens: int, top_k: int, block: Sequence[int], experts: int) -> Ints:
    """A block filled evenly by each token as far as it can, then the other experts in turn; slots in any order."""
    inside = min(top_k, len(block))
    others = [expert for expert in range(experts) if expert not in block]
    rows = []
    for t in range(tokens):
        row = [block[(t * inside + j) % len(block)] for j in range(inside)]
        row += [others[(t * (top_k - inside) + j) % len(others)] for j in range(top_k - inside)]
        rows.append(random.permutation(row))
    return np.array(rows, dtype=np.int64).reshape(tokens, top_k)


def spoil(random: np.random.Generator, ids_by_rank: Sequence[Ints], experts: int) -> None:
    """Route one token of one rank anew."""
    ids_TK = ids_by_rank[random.integers(len(ids_by_rank))]  # type: ignore[call-overload]
    if len(ids_TK):
        ids_TK[random.integers(len(ids_TK))] = random.permutation(experts)[: ids_TK.shape[1]]


@st.composite
def routes(draw: st.DrawFn, *, block_size: int | None = None) -> Routes:
    """Mostly one hot block, the same on all source ranks; ranks without tokens, and now and then a token elsewhere."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    blocks = deal_blocks(
        random, draw(st.integers(1, 4)), block_size or draw(st.integers(1, 3)), uneven=draw(st.booleans())
    )
    experts = sum(map(len, blocks))
    top_k, hot = draw(st.integers(1, experts)), int(random.integers(len(blocks)))
    ids = [
        hot_route(random, draw(st.integers(0, 4)), top_k, blocks[hot], experts) for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.sampled_from([0, 0, 1])):
        spoil(random, ids, experts)
    return Routes(ids, blocks)


class TestHotBlocks:
    @pytest.mark.parametrize("even", [False, True])
    @settings(pairs_agree, max_examples=120)
    @given(routes())
    def test_hot_blocks_agree(self, even: bool, case: Routes) -> None:
        """Both find the same blocks hot."""
        assert_agree(first.hot_blocks, second.hot_blocks, case.ids_by_rank, case.blocks, even=even)

    @settings(pairs_agree, max_examples=120)
    @given(routes(block_size=1))
    def test_hot_experts_agree(self, case: Routes) -> None:
        """Both find the same experts hot, with the others loaded evenly by each rank."""
        assert_agree(first.hot_experts, second.hot_experts, case.ids_by_rank, case.experts)

    def test_overloads_agree(self) -> None:
        """Both give the same ratio for all small sizes, and it is that of a hot route's loads."""
        random = np.random.default_rng(2)
        for held, ep in product(range(1, 4), range(1, 4)):
            for top_k in range(1, held * ep + 1):
                blocks = deal_blocks(random, ep, held)
                ratio = first_imbalance.overload(top_k, held * ep, held)
                assert second.overload(top_k, held * ep, held) == pytest.approx(ratio, rel=1e-15)
                ids_TK = hot_route(random, 5, top_k, blocks[0], held * ep)
                rows = np.isin(ids_TK, blocks[0]).sum()
                assert ratio == pytest.approx(rows / (ids_TK.size / ep), rel=1e-15)


class TestAlternating:
    @settings(pairs_agree, max_examples=120)
    @given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 1, 1, 2]), st.integers(0, 10**6))
    def test_turns_agree(self, ep: int, forwards: int, step: int, seed: int) -> None:
        """Both find the same first rank of a round, whatever goes round, and none where something else does."""
        random = np.random.default_rng(seed)
        blocks = deal_blocks(random, ep, int(random.integers(1, 3)))
        experts, start = sum(map(len, blocks)), int(random.integers(ep))
        top_k = int(random.integers(1, experts + 1))
        by_forward = [
            [hot_route(random, int(random.integers(0, 3)), top_k, blocks[(start + step * i) % ep], experts)] * 2
            for i in range(forwards)
        ]
        assert_agree(first.first_hot_ranks, second.first_hot_ranks, by_forward, blocks)


def ratio_route(
    random: np.random.Generator, tokens: int, top_k: int, blocks: list[list[int]], hot: int, rows: int
) -> Ints:
    """A route with so many rows for the hot block and the others even: slot by slot, in runs of one block."""
    others = [block for i, block in enumerate(blocks) if i != hot]
    left = tokens * top_k - rows
    runs = [(blocks[hot], rows)] + [(b, left // len(others) + (i < left % len(others))) for i, b in enumerate(others)]
    used: list[list[int]] = [[] for _ in range(tokens)]
    place = 0
    for block, length in runs:
        for _ in range(length):
            row = used[place % tokens]
            row.append(next(expert for expert in block if expert not in row))
            place += 1
    return np.array([random.permutation(row) for row in used], dtype=np.int64).reshape(tokens, top_k)


class TestRatio:
    @settings(pairs_agree, max_examples=200)
    @given(st.integers(2, 4), st.integers(1, 3), st.sampled_from([1.0, 1.3, 2.0, 3.0, 7.0]), st.integers(0, 10**6))
    def test_ranks_agree(self, ep: int, top_k: int, ratio: float, seed: int) -> None:
        """Both find the same ranks loaded by the ratio, rounded on each source rank, and some rows beside it."""
        random = np.random.default_rng(seed)
        blocks = deal_blocks(random, ep, 4)
        ids = []
        for _ in range(int(random.integers(1, 4))):
            tokens = int(random.integers(0, 9))
            exact = ratio * top_k * tokens / (ratio + ep - 1)
            rows = round(exact + random.choice([-1.4, -0.5, 0.0, 0.0, 0.5, 1.4]))
            ids.append(ratio_route(random, tokens, top_k, blocks, 1, min(max(rows, 0), tokens * top_k)))
        if random.integers(4) == 0:
            spoil(random, ids, 4 * ep)
        assert_agree(first.hot_by_ratio, second.hot_by_ratio, ids, blocks, ratio)

    @settings(pairs_agree, max_examples=60)
    @given(routes(), st.sampled_from([1.0, 2.0, 50.0]))
    def test_a_ratio_that_cannot_be(self, case: Routes, ratio: float) -> None:
        """Both fall back to the worst rank where no more rows can go there."""
        if len({len(block) for block in case.blocks}) > 1:
            assert_refused(first.hot_by_ratio, second.hot_by_ratio, case.ids_by_rank, case.blocks, ratio)
        else:
            assert_agree(first.hot_by_ratio, second.hot_by_ratio, case.ids_by_rank, case.blocks, ratio)


class TestImbalance:
    @settings(pairs_agree, max_examples=120)
    @given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
    def test_means_and_rises_agree(self, ep: int, held: int, seed: int) -> None:
        """Both average the same ratios, and see the same ones rise."""
        random = np.random.default_rng(seed)
        blocks = deal_blocks(random, ep, held)
        by_deviation = []
        for _ in range(int(random.integers(2, 4))):
            draws = [random.integers(0, 4, size=ep * held) for _ in range(int(random.integers(1, 4)))]
            by_deviation.append([loads_E + (loads_E.sum() == 0) for loads_E in draws])
        as_lists = [[loads_E.tolist() for loads_E in draws] for draws in by_deviation]
        tensors = [[torch.from_numpy(loads_E) for loads_E in draws] for draws in by_deviation]
        for lists, draws in zip(as_lists, tensors, strict=True):  # type: ignore[assignment]
            mean = first_imbalance.mean_overload(draws, blocks)  # type: ignore[arg-type]
            assert float(second.mean_overload(lists, blocks)) == pytest.approx(mean, rel=1e-15)
            assert mean == first_imbalance.mean_overload(draws[::-1], blocks)  # type: ignore[arg-type]
        assert second.imbalance_rises(as_lists, blocks) is first_imbalance.imbalance_rises(tensors, blocks)


BLOCKS, THREE, UNEVEN = [[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 1], [2]]
ONE_EACH, TWO = [[0], [1], [2]], [[0, 1], [2, 3]]
NOBODY = np.zeros((0, 2), dtype=np.int64)
EVEN = {"even": True}


def by_rank(*ids: list[list[int]]) -> list[Ints]:
    """Ids of every source rank."""
    return [np.array(rank) for rank in ids]


def spread(*by_source: list[int]) -> list[Ints]:
    """One expert per token: so many rows of each source rank for each of three blocks."""
    return by_rank(*([[THREE[r][j % 2]] for r, n in enumerate(rows) for j in range(n)] for rows in by_source))


def in_turn(*hot: int | None) -> list[list[Ints]]:
    """Forwards of one source rank, which load these blocks; None is a forward without tokens."""
    return [[NOBODY if block is None else np.array([THREE[block]])] for block in hot]


NO_ROUTES = [
    ("no blocks", [], []),
    ("an empty block", [], [[0, 1], []]),
    ("an expert twice", [], [[0, 1], [1, 2]]),
    ("an expert missing", [], [[0, 1], [2, 4]]),
    ("id E", by_rank([[3, 4]]), TWO),
    ("id -1", by_rank([[-1, 0]]), TWO),
    ("an expert chosen twice", by_rank([[0, 0]]), TWO),
]

test_by_hand = by_hand(
    *rows(first.hot_blocks, second.hot_blocks,
        ("one token on another rank", (by_rank([[2, 3, 0], [3, 0, 1]], [[5, 2, 3]]), BLOCKS), []),
        ("another block on each source rank", (by_rank([[2, 3, 0]], [[0, 1, 5]]), BLOCKS), []),
        ("one block in all rows", (by_rank([[2], [2], [3]]), BLOCKS), [1]),
        ("2 and 1 rows are even", (by_rank([[2], [2], [3]]), BLOCKS), EVEN, [1]),
        ("3 and 1 rows are not even", (by_rank([[2], [2], [3], [2]]), BLOCKS), EVEN, []),
        ("any rows of the block", (by_rank([[2], [2]], [[3], [3]]), BLOCKS), [1]),
        ("even in the sum, not on each rank", (by_rank([[2], [2]], [[3], [3]]), BLOCKS), EVEN, []),
        ("even on each rank", (by_rank([[2], [3]], [[3]]), BLOCKS), EVEN, [1]),
        ("K = 2 blocks: either may be meant", (by_rank([[2, 3, 0, 1]]), BLOCKS), [0, 1]),
        ("K = E: each may be meant", (by_rank([[0, 1, 2, 3, 4, 5]]), BLOCKS), EVEN, [0, 1, 2]),
        ("without tokens every block may be meant", ([NOBODY, NOBODY], [[0, 2], [1]]), EVEN, [0, 1]),
        *((f"hot blocks of {name}", (ids, blocks), REFUSED) for name, ids, blocks in NO_ROUTES),
    ),
    *rows(first.hot_experts, second.hot_experts,
        ("two rows, and one for each of the others", (by_rank([[1, 0], [1, 2]], [[0, 1], [2, 1]]), 4), [1]),
        ("one rank without the expert", (by_rank([[1, 0], [2, 1]], [[0, 1]], [[3, 0]]), 4), []),
        ("K = 1", (by_rank([[3]], [[3], [3]]), 4), [3]),
        ("K = E: each expert may be meant", (by_rank([[2, 3, 1, 0]]), 4), [0, 1, 2, 3]),
        ("two experts in each token", (by_rank([[2, 3, 1], [0, 3, 2]]), 4), [2, 3]),
        ("without tokens every expert may be meant", ([NOBODY, NOBODY], 3), [0, 1, 2]),
        ("no experts", ([], 0), REFUSED),
        ("id E", (by_rank([[0, 1]]), 1), REFUSED),
    ),
    *rows(first.first_hot_ranks, second.first_hot_ranks,
        ("each forward loads the next rank", (in_turn(1, 2, 0, 1), THREE), [1]),
        ("rank 0 comes after rank 2", (in_turn(2, 0), THREE), [2]),
        ("rank 2 does not come after rank 0", (in_turn(0, 2), THREE), []),
        ("the same rank again", (in_turn(0, 0), THREE), []),
        ("a forward without tokens takes its turn", (in_turn(0, None, 2), THREE), [0]),
        ("a forward without tokens takes the first turn", (in_turn(None, 2), THREE), [1]),
        ("no forward", ([], THREE), [0, 1, 2]),
        ("no tokens", ([[NOBODY, NOBODY]], [[0, 2], [1]]), [0, 1]),
        ("turns of no blocks", ([], []), REFUSED),
        ("turns of id E", ([by_rank([[3, 4]])], TWO), REFUSED),
    ),
    *rows(first.hot_by_ratio, second.hot_by_ratio,
        # Three ranks, two sources of 4 tokens, K = 1. rho = 2: a = 2 * 8 / 4 = 4.
        ("rho = 2: a = 4 rows", (spread([2, 1, 1], [2, 1, 1]), THREE, 2.0), [0]),
        ("5 rows are less than two sources off", (spread([3, 1, 0], [2, 1, 1]), THREE, 2.0), [0]),
        ("6 rows are two sources off", (spread([3, 1, 0], [3, 0, 1]), THREE, 2.0), []),
        ("3 rows on either rank are one off", (spread([2, 1, 1], [1, 2, 1]), THREE, 2.0), [0, 1]),
        ("2 and 0 rows on one source are uneven", (spread([2, 2, 0], [2, 1, 1]), THREE, 2.0), []),
        ("rho = 1: a = 8 / 3 for every rank", (spread([2, 1, 1], [1, 2, 1]), THREE, 1.0), [0, 1, 2]),
        ("rho = 1 without rows for the others", (spread([4, 0, 0], [1, 2, 1]), THREE, 1.0), []),
        ("rho = 6: a = 48 / 8 = 6", (spread([3, 0, 1], [3, 1, 0]), THREE, 6.0), [0]),
        ("rho = 6, the others uneven in turn", (spread([3, 0, 1], [3, 0, 1]), THREE, 6.0), [0]),
        ("rho = 6 and 8 rows", (spread([4, 0, 0], [4, 0, 0]), THREE, 6.0), []),
        ("rho = 1e9: all rows", (spread([4, 0, 0], [4, 0, 0]), THREE, 1e9), [0]),
        # K = 2, one expert a rank, 3 tokens: rho = 2 asks for a = 2 * 6 / 4 = 3 = S rows, rho = 2.1 for the worst rank.
        ("a = S rows", (by_rank([[0, 1], [0, 2], [0, 1]]), ONE_EACH, 2.0), [0]),
        ("more than S rows: the worst rank", (by_rank([[0, 1], [0, 2], [0, 1]]), ONE_EACH, 2.1), [0]),
        ("more than S rows, elsewhere", (by_rank([[1, 2], [0, 2], [0, 1]]), ONE_EACH, 2.1), []),
        ("the mean, elsewhere", (by_rank([[1, 2], [0, 2], [0, 1]]), ONE_EACH, 1.0), [0, 1, 2]),
        ("two rows each: less than two off", (by_rank([[0, 1], [1, 2]], [[0, 2]]), ONE_EACH, 2.0), [0, 1, 2]),
        ("two rows each: not the worst rank", (by_rank([[0, 1], [1, 2]], [[0, 2]]), ONE_EACH, 2.1), []),
        ("with ep = 1 all rows, whatever the ratio", (by_rank([[0, 1], [1, 2]]), [[0, 1, 2]], 5.0), [0]),
        ("with ep = 1 and no source", ([], [[0, 1, 2]], 5.0), [0]),
        *((f"ratio of {name}", (ids, blocks, 2.0), REFUSED) for name, ids, blocks in NO_ROUTES),
        *((f"ratio {rho}", (by_rank([[0, 1]]), TWO, rho), REFUSED) for rho in (0.99, math.inf, math.nan)),
        ("ratio over uneven blocks", (by_rank([[0, 1]]), UNEVEN, 2.0), REFUSED),
    ),
    *rows(first_imbalance.overload, second.overload,
        ("all K fit on one of ep = 4 ranks", (3, 12, 3), 4.0),
        ("one rank", (5, 12, 12), 1.0),
        ("K = E", (12, 12, 3), 1.0),
        ("a node of two of eight ranks: ep / q", (8, 64, 16), 4.0),
        *((f"overload of {sizes}", sizes, REFUSED) for sizes in [(0, 4, 2), (5, 4, 2), (2, 4, 0), (2, 4, 5)]),
    ),
    *rows(first_imbalance.mean_overload, lambda loads, blocks: float(second.mean_overload(loads, blocks)),
        ("one rank has the mean", ([np.array([2, 1])], [[1, 0]]), 1.0),
        ("no draw", ([], TWO), REFUSED),
        ("a draw without load", ([np.array([1, 0, 0, 0]), np.zeros(4, dtype=int)], TWO), REFUSED),
        ("no blocks", ([np.array([1])], []), REFUSED),
    ),
    # Ranks of two and of one expert. [2 2 2]: 4 / 3. [1 1 4]: 4 / 3. [1 1 2]: 1. [3 3 0]: 2 = ep. [3 2 1]: 5 / 3.
    *rows(
        lambda loads, blocks: first_imbalance.imbalance_rises(
            [[torch.tensor(n_E) for n_E in n] for n in loads], blocks
        ),
        second.imbalance_rises,
        ("1 to 4/3", ([[[1, 1, 2]], [[1, 1, 4]]], UNEVEN), True),
        ("4/3 to 1", ([[[1, 1, 4]], [[1, 1, 2]]], UNEVEN), False),
        ("no rise", ([[[2, 2, 2]], [[2, 2, 2]]], UNEVEN), False),
        ("the last is the worst case itself", ([[[1, 1, 2]], [[2, 2, 2]], [[3, 3, 0]]], UNEVEN), False),
        ("1, 4/3, 5/3", ([[[1, 1, 2]], [[2, 2, 2]], [[3, 2, 1]]], UNEVEN), True),
        ("1, 4/3, 17/12: a quarter of the first rise", ([[[1, 1, 2]], [[2, 2, 2]], [[9, 8, 7]]], UNEVEN), False),
        ("means 4/3 and 4/3", ([[[1, 1, 2], [3, 2, 1]], [[2, 2, 2]]], UNEVEN), False),
        ("with ep = 1 nothing can rise", ([[[2, 1]], [[3, 0]]], [[0, 1]]), True),
        ("one deviation", ([[[1, 2, 2, 2]]], TWO), REFUSED),
    ),
)  # fmt: skip
