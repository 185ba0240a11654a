"""Dispatch layout: where a rank's tokens go, counted before anything is sent.

Sources: behaviour of DeepEP (get_dispatch_layout); arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DispatchLayout:
    """Where the tokens of one rank go: bool (T, W), and int64 counts of tokens by rank and node, of slots by expert."""

    in_rank_TW: Tensor
    per_rank_W: Tensor
    per_node_D: Tensor
    per_expert_E: Tensor


def dispatch_layout(ids_TK: Tensor, owner_E: Sequence[int], node_of_W: Sequence[int]) -> DispatchLayout:
    """Lay out one rank's own tokens, int64 (T, K).

    Args:
        ids_TK: its routing, -1 for an empty slot.
        owner_E: of every expert, the rank that holds it.
        node_of_W: of every rank, its node, 0, 1, ...

    Rule: a token goes to the owners of its experts and to their nodes, once each however many of its experts
    are there; to an expert it goes once for each slot.

    Degenerate: an empty slot goes nowhere. T = 0, idle ranks, nodes and experts count 0.

    Raises:
        ValueError: an id outside -1..E-1, an owner outside 0..W-1, node numbers with a gap.

    Decides: EXCH-26. Source: behaviour of DeepEP (get_dispatch_layout).

    >>> made = dispatch_layout(torch.tensor([[3, -1, 3], [0, 1, 4]]), [0, 0, 1, 2, 2], [0, 1, 1])
    >>> made.in_rank_TW.int().tolist(), made.per_rank_W.tolist()
    ([[0, 0, 1], [1, 0, 1]], [1, 0, 2])
    >>> made.per_node_D.tolist(), made.per_expert_E.tolist()
    ([1, 2], [1, 1, 0, 2, 1])
    """
    E, W, T = len(owner_E), len(node_of_W), len(ids_TK)
    nodes = len(set(node_of_W))
    if set(node_of_W) != set(range(nodes)) or not set(owner_E) <= set(range(W)):
        raise ValueError(f"nodes {list(node_of_W)}, owners {list(owner_E)}: need nodes 0, 1, ... and owners below {W}")
    in_rank_TW = torch.zeros(T, W, dtype=torch.bool)  # (T, W)
    in_node_TD = torch.zeros(T, nodes, dtype=torch.bool)  # (T, nodes)
    per_expert_E = torch.zeros(E, dtype=torch.int64)  # (E,)
    for t, ids_K in enumerate(ids_TK.tolist()):
        for e in ids_K:
            if not -1 <= e < E:
                raise ValueError(f"token {t} names expert {e} of {E}; ids are in 0..E-1, or -1 for an empty slot")
            if e >= 0:
                in_rank_TW[t, owner_E[e]] = True
                in_node_TD[t, node_of_W[owner_E[e]]] = True
                per_expert_E[e] += 1
    return DispatchLayout(in_rank_TW, in_rank_TW.sum(dim=0), in_node_TD.sum(dim=0), per_expert_E)
