"""Load counters: pairs per expert, and a trace of what the router decided.

Sources: arithmetic: definition of a histogram; behaviour of torchtitan's and vLLM's counters of tokens per
expert, and of Megatron-Core's router trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.reference.overload.timelines import Kind, Label


@dataclass(frozen=True)
class RoutedPass:
    """One pass of a layer on one rank: int64 (T, K) ids as dispatch received them, bool (T,) True = padding."""

    kind: Kind
    label: Label
    ids_TK: Tensor
    padding_T: Tensor | None = None


def expert_counts(passes: Sequence[RoutedPass], experts: int) -> Tensor:
    """Count the routed pairs of every expert, int64 (E,), over the passes of the ranks covered (LOAD-29).

    Rule: each training forward once, "forward" or "alone"; recomputed, backward and evaluation passes add
    nothing, and neither does padding. After or before drops: as the ids are.

    Degenerate: an expert without tokens has 0, an empty slot (-1) counts nowhere, T = 0 adds nothing. What
    the ids of padding hold is not looked at.

    Decides: LOAD-29. Source: definition of a histogram.

    >>> ids = torch.tensor([[2, 0], [2, -1], [1, 0]])
    >>> once = RoutedPass("forward", "a", ids, torch.tensor([False, False, True]))
    >>> expert_counts([once, RoutedPass("recomputed", "a", ids), RoutedPass("evaluation", "b", ids)], 4).tolist()
    [1, 0, 2, 0]
    """
    if experts < 1:
        raise ValueError(f"there are {experts} experts; a histogram needs one")
    counts_E = torch.zeros(experts, dtype=torch.int64)  # (E,)
    for routed in passes:
        ids_TK, padding_T = routed.ids_TK, routed.padding_T
        if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
            raise ValueError(f"ids are {ids_TK.dtype} of shape {tuple(ids_TK.shape)}, not int64 (T, K)")
        if padding_T is not None and (padding_T.dtype != torch.bool or padding_T.shape != ids_TK.shape[:1]):
            raise ValueError(f"padding is {padding_T.dtype} of shape {tuple(padding_T.shape)}, not bool (T,)")
        if routed.kind not in ("forward", "alone"):
            continue
        real_TK = ids_TK if padding_T is None else ids_TK[~padding_T]
        for expert in real_TK.flatten().tolist():
            if not -1 <= expert < experts:
                raise ValueError(f"id {expert} is none of {experts} experts, and not an empty slot (-1)")
            if expert >= 0:
                counts_E[expert] += 1
    return counts_E


def trace(passes: Sequence[RoutedPass]) -> dict[Label, tuple[frozenset[int], ...]]:
    """Write down the routing of every forward pass, one set of experts per token (LOAD-30).

    Rule: one record per forward, training or not, under its own label; a recomputed pass adds none.

    Degenerate: T = 0 is an empty record, a token without experts an empty set. Padding stands as it was
    delivered.

    Decides: LOAD-30. Source: behaviour of Megatron-Core's router trace.

    >>> trace([RoutedPass("forward", (3, 0), torch.tensor([[2, 0], [-1, 1]])),
    ...        RoutedPass("recomputed", (3, 0), torch.tensor([[2, 0], [-1, 1]]))])
    {(3, 0): (frozenset({0, 2}), frozenset({1}))}
    """
    records: dict[Label, tuple[frozenset[int], ...]] = {}
    for routed in passes:
        if routed.kind in ("recomputed", "backward"):
            continue
        if routed.label in records:
            raise ValueError(f"two forward passes are called {routed.label}")
        rows = routed.ids_TK.tolist()
        records[routed.label] = tuple(frozenset(expert for expert in ids_K if expert >= 0) for ids_K in rows)
    return records
