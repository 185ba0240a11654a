"""The part of the golden of forcing on hot routes: which blocks a route may mean, and how uneven it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Oracle, given, named

_E = 6
_DIVISIONS: Sequence[Sequence[Sequence[int]]] = (
    ((0, 1), (2, 3), (4, 5)), ((5, 2), (0, 4), (3, 1)), ((0, 1, 2), (3, 4, 5)), ((0, 1, 2, 3), (4, 5)),
    (tuple(range(_E)),),
)  # fmt: skip
# The experts that every token chooses before all others, slots per token, and tokens by rank.
_ROUTES: Mapping[str, tuple[Sequence[int], int, Sequence[int]]] = {
    "hot-rank": ((2, 3), 2, (5, 3)),
    "hot-rank-and-more": ((2, 3), 3, (5, 3)),
    "hot-node": ((0, 1, 2), 2, (6, 3)),
    "hot-expert": ((4,), 2, (5, 10)),
    "cold": ((), 2, (5, 3)),
    "without-tokens": ((), 2, (0, 0)),
    "all-experts": ((), _E, (2, 1)),
}
# Ids by rank: hot, but with one that is not even.
_UNEVEN: Mapping[str, Sequence[Sequence[Sequence[int]]]] = {
    "hot-rank-uneven": (((2, 3, 0), (3, 2, 1), (2, 0, 3)), ((2, 3, 4),)),
    "hot-node-uneven": (((0, 1), (2, 0), (1, 2)), ((0, 1), (1, 0), (0, 1))),
    "hot-expert-uneven": (((4, 0), (1, 4), (4, 2)), ((4, 0), (0, 4), (4, 0))),
}
_RATIOS = (1.0, 1.5, 2.0, 4.0, 100.0)
_SHARES = (
    (4, 1, 1),
    (2, 2, 2),
    (8, 2, 2),
    (6, 0, 0),
    (3, 2, 2),
    (4, 3, 1),
)  # rows for each rank, of one slot per token


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return routes that are hot somewhere, the others of their slots in turn, forwards, and loads of draws."""
    found: dict[str, Tensor] = {}
    for case, (hot, K, tokens) in _ROUTES.items():
        for rank, T in enumerate(tokens):
            found |= named(case, "in", {f"ids_TK-{rank}": _routes(rng, hot, K, T)})
    for case, ids in _UNEVEN.items():
        found |= named(case, "in", {f"ids_TK-{rank}": ids_TK for rank, ids_TK in enumerate(ids)})
    forwards = [[_routes(rng, _DIVISIONS[0][i % 3], 2, 3) for i in starts] for starts in ((1, 2, 3, 4), (2, 0, 1, 1))]
    found |= named("forwards", "in", {"ids_NFTK": np.array(forwards)})
    for n, shares in enumerate(_SHARES):
        ids_T1 = np.concatenate(
            [rng.choice(block, (rows, 1)) for block, rows in zip(_DIVISIONS[0], shares, strict=True)]
        )
        found |= named("shares", "in", {f"ids_TK-{n}": rng.permutation(ids_T1)})
    flat, uneven, steep = (rng.integers(low, 20, (4, _E)) for low in (18, 9, 0))
    steep[:, 0] += 40
    worst = np.eye(1, _E, dtype=np.int64).repeat(4, axis=0)  # all on one rank
    return found | named("draws", "in", {"loads_VNE": np.stack([flat, uneven, steep, worst])})


def _routes(
    rng: np.random.Generator, hot: Sequence[int], K: int, T: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    ids_TK = np.zeros((T, K), dtype=np.int64)
    others = [e for e in range(_E) if e not in hot]
    n = min(K, len(hot))
    for t in range(T):
        first = [hot[(t * n + k) % len(hot)] for k in range(n)]
        turn = [others[(t * (K - n) + k) % len(others)] for k in range(K - n)]
        ids_TK[t] = rng.permutation([*first, *turn])
    return ids_TK


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return of every block whether it may have been meant, and by how much it is overloaded."""
    found: dict[str, Tensor] = {}
    for case in (*_ROUTES, *_UNEVEN):
        ids = [given(inputs, case)[f"ids_TK-{rank}"] for rank in range(2)]
        answers = {
            "hot_experts_E": _marks(oracle.hot_experts(ids, _E), _E),
            "hot_DB": [_marks(oracle.hot_blocks(ids, blocks)) for blocks in _DIVISIONS],
            "even_DB": [_marks(oracle.hot_blocks(ids, blocks, even=True)) for blocks in _DIVISIONS],
        }
        equal = [blocks for blocks in _DIVISIONS if len({len(block) for block in blocks}) == 1]
        by_ratio = [[_marks(oracle.hot_by_ratio(ids, blocks, ratio)) for ratio in _RATIOS] for blocks in equal]
        found |= named(case, "out", {**answers, "by-ratio_DAB": by_ratio})
    forwards = given(inputs, "forwards")["ids_NFTK"]
    first = [_marks(oracle.first_hot_ranks([[ids_TK] for ids_TK in run], _DIVISIONS[0])) for run in forwards]
    found |= named("forwards", "out", {"first_NB": first})
    shares = [given(inputs, "shares")[f"ids_TK-{n}"] for n in range(len(_SHARES))]
    by_share = [
        [_marks(oracle.hot_by_ratio(ids, _DIVISIONS[0], ratio)) for ratio in _RATIOS]
        for ids in [*([ids_TK] for ids_TK in shares), shares[:2]]
    ]
    found |= named("shares", "out", {"by-ratio_NAB": by_share})
    factors = [[oracle.overload(K, 12, block) for block in (1, 3, 4, 12)] for K in (1, 2, 6, 12)]
    loads_VNE = given(inputs, "draws")["loads_VNE"]
    means = [[oracle.mean_overload(list(loads_NE), blocks) for blocks in _DIVISIONS] for loads_NE in loads_VNE]
    rises = [
        oracle.imbalance_rises([list(loads_VNE[v]) for v in order], blocks)
        for order in ((0, 1, 2), (1, 0), (0, 0), (0, 2, 1), (0, 3)) for blocks in _DIVISIONS
    ]  # fmt: skip
    return found | named("draws", "out", {"overload_KB": factors, "mean_overload_VB": means, "rises_N": rises})


def _marks(chosen: Sequence[int], among: int = 3) -> list[bool]:
    return [h in chosen for h in range(among)]
