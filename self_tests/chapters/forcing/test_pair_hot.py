"""Hot ranks, nodes and experts, worked out twice: reference.forcing.hot and forcing_imbalance, and the longhand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

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
    ids_TK = ids_by_rank[random.integers(len(ids_by_rank))]
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

    @pytest.mark.parametrize(
        ("ids", "even", "expected"),
        [
            ([[[2, 3, 0], [3, 2, 1]], [[5, 2, 3]]], False, [1]),  # K = 3 > N = 2: both experts of rank 1 each
            ([[[2, 3, 0], [3, 0, 1]], [[5, 2, 3]]], False, []),  # one token on rank 0
            ([[[2, 3, 0]], [[0, 1, 5]]], False, []),  # another one on each source rank
            ([[[2], [2], [3]]], False, [1]),
            ([[[2], [2], [3]]], True, [1]),
            ([[[2], [2], [3], [2]]], True, []),  # 3 and 1 rows
            ([[[2], [2]], [[3], [3]]], False, [1]),
            ([[[2], [2]], [[3], [3]]], True, []),  # even in the sum, not on each rank
            ([[[2], [3]], [[3]]], True, [1]),
            ([[[2, 3, 0, 1]]], False, [0, 1]),
            ([[[0, 1, 2, 3, 4, 5]]], True, [0, 1, 2]),  # K = E
        ],
    )
    def test_blocks_by_hand(self, ids: list[list[list[int]]], even: bool, expected: list[int]) -> None:
        """Three ranks hold experts 0 1, 2 3 and 4 5."""
        blocks = [[0, 1], [2, 3], [4, 5]]
        ids_by_rank = [np.array(rank) for rank in ids]
        assert expected == assert_agree(first.hot_blocks, second.hot_blocks, ids_by_rank, blocks, even=even)

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            ([[[1, 0], [2, 1]], [[1, 3]]], [1]),
            ([[[1, 0], [0, 1]]], []),  # two rows for one of the others
            ([[[1, 0], [1, 2]], [[0, 1], [2, 1]]], [1]),
            ([[[1, 0], [2, 1]], [[0, 1]], [[3, 0]]], []),
            ([[[3]], [[3], [3]]], [3]),
            ([[[2, 3, 1, 0]]], [0, 1, 2, 3]),
            ([[[2, 3, 1], [0, 3, 2]]], [2, 3]),
        ],
    )
    def test_experts_by_hand(self, ids: list[list[list[int]]], expected: list[int]) -> None:
        """Of four experts every token has one, and deals its other slots evenly."""
        ids_by_rank = [np.array(rank) for rank in ids]
        assert expected == assert_agree(first.hot_experts, second.hot_experts, ids_by_rank, 4)

    def test_nobody_says_nothing(self) -> None:
        """Without tokens every block and every expert may have been meant."""
        nobody = [np.zeros((0, 2), dtype=np.int64)] * 2
        assert [0, 1] == assert_agree(first.hot_blocks, second.hot_blocks, nobody, [[0, 2], [1]], even=True)
        assert [0, 1, 2] == assert_agree(first.hot_experts, second.hot_experts, nobody, 3)
        assert [0, 1] == assert_agree(first.first_hot_ranks, second.first_hot_ranks, [nobody], [[0, 2], [1]])

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ((2, 12, 3), 4.0),  # ep = 4, all K fit on one rank
            ((3, 12, 3), 4.0),
            ((6, 12, 3), 2.0),  # half of each token's slots
            ((2, 12, 1), 6.0),  # one expert: E / K
            ((5, 12, 12), 1.0),
            ((12, 12, 3), 1.0),
            ((8, 64, 16), 4.0),  # a node of two of eight ranks: ep / q
        ],
    )
    def test_overload(self, sizes: tuple[int, int, int], expected: float) -> None:
        """A hot block gets S min(K, B) rows where the mean is K S B / E."""
        assert expected == first_imbalance.overload(*sizes) == second.overload(*sizes)

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

    @pairs_agree
    @given(routes(), st.randoms(use_true_random=False))
    def test_new_names_of_experts_change_nothing(self, case: Routes, random: Any) -> None:
        """Renamed in ids and blocks alike, the same blocks are hot; permuted tokens and ranks change nothing either."""
        name = list(range(case.experts))
        random.shuffle(name)
        ids = [torch.tensor(name)[torch.from_numpy(ids_TK)].flip(0) for ids_TK in reversed(case.ids_by_rank)]
        blocks = [[name[expert] for expert in block] for block in case.blocks]
        for even in (False, True):
            expected = first.hot_blocks([torch.from_numpy(i) for i in case.ids_by_rank], case.blocks, even=even)
            assert expected == first.hot_blocks(ids, blocks, even=even)


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

    @pytest.mark.parametrize(
        ("hot", "expected"),
        [
            ([1, 2, 0, 1], [1]),
            ([2, 0], [2]),
            ([0, 0], []),
            ([0, 2], []),
            ([0, None, 2], [0]),
            ([None, 2], [1]),
            ([], [0, 1, 2]),
        ],
    )
    def test_by_hand(self, hot: list[int | None], expected: list[int]) -> None:
        """Of three ranks each forward loads the next; a forward without tokens takes its turn."""
        blocks = [[0, 3], [1, 4], [2, 5]]
        nobody = np.zeros((0, 2), dtype=np.int64)
        by_forward = [[nobody if h is None else np.array([blocks[h]])] for h in hot]
        assert expected == assert_agree(first.first_hot_ranks, second.first_hot_ranks, by_forward, blocks)


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

    @pytest.mark.parametrize(
        ("ratio", "rows", "expected"),
        [
            # Three ranks, two sources of 4 tokens, K = 1. rho = 2: a = 2 * 8 / 4 = 4.
            (2.0, [[2, 1, 1], [2, 1, 1]], [0]),
            (2.0, [[3, 1, 0], [2, 1, 1]], [0]),  # 5: less than two sources off
            (2.0, [[3, 1, 0], [3, 0, 1]], []),  # 6: two off
            (2.0, [[2, 1, 1], [1, 2, 1]], [0, 1]),  # 3 and 3, either is one off
            (2.0, [[2, 2, 0], [2, 1, 1]], []),  # 2 and 0 on one source, whichever rank of the first two is hot
            # rho = 1: a = 8 / 3 for every rank.
            (1.0, [[2, 1, 1], [1, 2, 1]], [0, 1, 2]),
            (1.0, [[4, 0, 0], [1, 2, 1]], []),
            # rho = 6: a = 48 / 8 = 6; rho = 1e9: a just below 8, all rows may be there, or all but one
            (6.0, [[3, 0, 1], [3, 1, 0]], [0]),
            (6.0, [[4, 0, 0], [4, 0, 0]], []),
            (1e9, [[4, 0, 0], [4, 0, 0]], [0]),
        ],
    )
    def test_by_hand(self, ratio: float, rows: list[list[int]], expected: list[int]) -> None:
        """The hot rank's rows are a but for rounding; each source's rows for the others differ by at most one."""
        blocks = [[0, 1], [2, 4], [3, 5]]
        ids = [np.array([[blocks[r][j % 2]] for r, n in enumerate(row) for j in range(n)]) for row in rows]
        assert expected == assert_agree(first.hot_by_ratio, second.hot_by_ratio, ids, blocks, ratio)

    def test_no_more_than_a_token_can_send(self) -> None:
        """K = 2, one expert a rank: rho = 2 asks for a = 2 * 6 / 4 = 3 = S rows, rho = 2.1 for the worst rank."""
        one_each, elsewhere = [np.array([[0, 1], [0, 2], [0, 1]])], [np.array([[1, 2], [0, 2], [0, 1]])]
        cases = [(2.0, one_each, [0]), (2.1, one_each, [0]), (2.1, elsewhere, []), (1.0, elsewhere, [0, 1, 2])]
        sources = [np.array([[0, 1], [1, 2]]), np.array([[0, 2]])]  # two rows for each are less than two sources off
        for ratio, ids, expected in [*cases, (2.0, sources, [0, 1, 2]), (2.1, sources, [])]:
            found = assert_agree(first.hot_by_ratio, second.hot_by_ratio, ids, [[0], [1], [2]], ratio)
            assert expected == found

    def test_one_rank_has_all(self) -> None:
        """With ep = 1, a = K S whatever the ratio."""
        ids = [np.array([[0, 1], [1, 2]])]
        assert [0] == assert_agree(first.hot_by_ratio, second.hot_by_ratio, ids, [[0, 1, 2]], 5.0)
        assert [0] == assert_agree(first.hot_by_ratio, second.hot_by_ratio, [], [[0, 1, 2]], 5.0)


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
        for lists, draws in zip(as_lists, tensors, strict=True):
            mean = first_imbalance.mean_overload(draws, blocks)
            assert float(second.mean_overload(lists, blocks)) == pytest.approx(mean, rel=1e-15)
            assert mean == first_imbalance.mean_overload(draws[::-1], blocks)
        assert second.imbalance_rises(as_lists, blocks) is first_imbalance.imbalance_rises(tensors, blocks)

    @pytest.mark.parametrize(
        ("loads", "expected"),
        [
            ([[[1, 1, 2]], [[1, 1, 4]]], True),
            ([[[1, 1, 4]], [[1, 1, 2]]], False),
            ([[[2, 2, 2]], [[2, 2, 2]]], False),  # no rise
            ([[[1, 1, 2]], [[2, 2, 2]], [[3, 3, 0]]], False),  # the last is the worst case itself
            ([[[1, 1, 2]], [[2, 2, 2]], [[3, 2, 1]]], True),
            ([[[1, 1, 2], [3, 2, 1]], [[2, 2, 2]]], False),  # means 4/3 and 4/3
        ],
    )
    def test_by_hand(self, loads: list[list[list[int]]], expected: bool) -> None:
        """Ranks of two and of one expert: the larger load over half of the sum, averaged over draws."""
        # [2 2 2]: 4 / 3. [1 1 4]: 4 / 3. [1 1 2]: 2 / 2 = 1. [3 3 0]: 6 / 3 = 2 = ep. [3 2 1]: 5 / 3.
        blocks = [[0, 1], [2]]
        assert expected is second.imbalance_rises(loads, blocks)
        tensors = [[torch.tensor(loads_E) for loads_E in draws] for draws in loads]
        assert expected is first_imbalance.imbalance_rises(tensors, blocks)

    def test_one_rank_has_nothing_to_rise(self) -> None:
        """With ep = 1 the ratio is always 1."""
        draws = [[torch.tensor([2, 1])], [torch.tensor([3, 0])]]
        assert 1.0 == first_imbalance.mean_overload(draws[0], [[1, 0]])
        assert first_imbalance.imbalance_rises(draws, [[0, 1]]) is True
        assert second.imbalance_rises([[[2, 1]], [[3, 0]]], [[0, 1]]) is True


IDS, TWO = np.array([[0, 1]]), [[0, 1], [2, 3]]
BAD: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    **{
        f"{ask[0].__name__} of {name}": (*ask, (ids, blocks, *more))
        for ask, more in [
            ((first.hot_blocks, second.hot_blocks), ()),
            ((first.hot_by_ratio, second.hot_by_ratio), (2.0,)),
        ]
        for name, ids, blocks in [
            ("no blocks", [], []),
            ("an empty block", [], [[0, 1], []]),
            ("an expert twice", [], [[0, 1], [1, 2]]),
            ("an expert missing", [], [[0, 1], [2, 4]]),
            ("id E", [IDS + 3], TWO),
            ("id -1", [IDS - 1], TWO),
            ("an expert chosen twice", [IDS * 0], TWO),
        ]
    },
    "hot of none": (first.hot_experts, second.hot_experts, ([], 0)),
    "hot id E": (first.hot_experts, second.hot_experts, ([IDS], 1)),
    "turns of no blocks": (first.first_hot_ranks, second.first_hot_ranks, ([], [])),
    "turns of id E": (first.first_hot_ranks, second.first_hot_ranks, ([[IDS + 3]], TWO)),
    "overload K = 0": (first_imbalance.overload, second.overload, (0, 4, 2)),
    "overload K > E": (first_imbalance.overload, second.overload, (5, 4, 2)),
    "overload B = 0": (first_imbalance.overload, second.overload, (2, 4, 0)),
    "overload B > E": (first_imbalance.overload, second.overload, (2, 4, 5)),
    "ratio below 1": (first.hot_by_ratio, second.hot_by_ratio, ([IDS], TWO, 0.99)),
    "ratio inf": (first.hot_by_ratio, second.hot_by_ratio, ([IDS], TWO, math.inf)),
    "ratio NaN": (first.hot_by_ratio, second.hot_by_ratio, ([IDS], TWO, math.nan)),
    "ratio over uneven blocks": (first.hot_by_ratio, second.hot_by_ratio, ([IDS], [[0, 1], [2]], 2.0)),
    "no draw": (first_imbalance.mean_overload, second.mean_overload, ([], TWO)),
    "no load": (
        first_imbalance.mean_overload,
        second.mean_overload,
        ([np.array([1, 0, 0, 0]), np.zeros(4, dtype=int)], TWO),
    ),
    "no blocks": (first_imbalance.mean_overload, second.mean_overload, ([np.array([1])], [])),
    "one deviation": (first_imbalance.imbalance_rises, second.imbalance_rises, ([[np.array([1, 2, 2, 2])]], TWO)),
}


class TestRefusals:
    """What has no answer is refused by both."""

    @pytest.mark.parametrize("name", BAD)
    def test_refused(self, name: str) -> None:
        """A question without an answer raises in both oracles."""
        one, other, question = BAD[name]
        assert_refused(one, other, *question)
