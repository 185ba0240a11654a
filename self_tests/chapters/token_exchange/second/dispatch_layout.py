"""A dispatch layout by hand: for every rank, node and expert, go and look which tokens want it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class DispatchLayout(NamedTuple):
    """Which ranks each token goes to, and how many tokens go to every rank, node and expert."""

    in_rank_TW: NDArray[np.bool_]
    per_rank_W: list[int]
    per_node_D: list[int]
    per_expert_E: list[int]


def dispatch_layout(ids_TK: Ints, owner_E: Sequence[int], node_of_W: Sequence[int]) -> DispatchLayout:
    """The layout of one rank's own tokens; a token counts once for a rank or node and once per slot for an expert."""
    nodes = len(set(node_of_W))
    for owner in owner_E:
        if not 0 <= owner < len(node_of_W):
            raise ValueError(f"owner {owner} of {len(node_of_W)} ranks")
    if sorted(set(node_of_W)) != list(range(nodes)):
        raise ValueError(f"nodes {node_of_W} are not numbered from 0 on")
    wanted = []
    for ids_K in ids_TK.tolist():
        if any(not -1 <= expert < len(owner_E) for expert in ids_K):
            raise ValueError(f"ids {ids_K} of {len(owner_E)} experts")
        wanted.append([expert for expert in ids_K if expert >= 0])

    in_rank_TW = np.zeros((ids_TK.shape[0], len(node_of_W)), dtype=np.bool_)
    per_rank_W, per_node_D = [0] * len(node_of_W), [0] * nodes
    for t, experts in enumerate(wanted):
        ranks = {owner_E[expert] for expert in experts}
        for rank in ranks:
            in_rank_TW[t, rank] = True
            per_rank_W[rank] += 1
        for node in {node_of_W[rank] for rank in ranks}:
            per_node_D[node] += 1
    per_expert_E = [sum(experts.count(e) for experts in wanted) for e in range(len(owner_E))]
    return DispatchLayout(in_rank_TW, per_rank_W, per_node_D, per_expert_E)
