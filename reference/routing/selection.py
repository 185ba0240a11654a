"""Selection: the K best experts of a token, among all or among its best groups, and how clear the choice was.

Written for one token at a time, on plain numbers: the sort key is the rule. A tie goes to the lower id, but
is free; `margins` tells a judge where.

Sources: DeepSeek-V2 section 2.2.2 (device-limited routing), DeepSeek-V3 section 2.1.2 (node-limited routing).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf
from typing import Literal

import torch
from torch import Tensor

GroupScore = Literal["max", "top2_sum", "topk_sum"]


def group_mask(
    selection_TE: Tensor, groups: tuple[int, int], *, top_k: int, group_score: GroupScore = "top2_sum"
) -> Tensor:
    """Return which experts a token may select from under group-limited routing, (T, E) -> bool (T, E).

    Rule: `groups = (G, chosen)` cuts the experts into G runs of E/G neighbours; the `chosen` groups with
    the highest group scores stay eligible. A group's score, from its selection scores (bias included), is

    * "max": the best one (DeepSeek-V2; V3's released code where there is no bias),
    * "top2_sum": the sum of the best two (V3's released code with a bias; torchtitan always),
    * "topk_sum": the sum of the best floor(K / chosen) (V3's text; Megatron-Core always).

    V3 chooses K = 8 of 4 groups, which makes the last two equal. Degenerate: chosen = G allows every
    expert; a tie goes to the lower group; a group with fewer experts than its score adds up is an error.

    >>> s = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]])
    >>> group_mask(s, (3, 1), top_k=2, group_score="max").int().tolist()
    [[1, 1, 0, 0, 0, 0]]
    >>> group_mask(s, (3, 1), top_k=2, group_score="top2_sum").int().tolist()
    [[0, 0, 1, 1, 0, 0]]
    """
    T, E = selection_TE.shape
    G, chosen = groups
    _check(E, top_k, groups, group_score)
    summands = _summands(group_score, top_k, chosen)
    mask_TE = torch.zeros(T, E, dtype=torch.bool)  # (T, E)
    for t, s_E in enumerate(selection_TE.tolist()):
        s_G = _group_scores(s_E, G, summands)
        for g in sorted(range(G), key=lambda g: (-s_G[g], g))[:chosen]:
            mask_TE[t, g * (E // G) : (g + 1) * (E // G)] = True
    return mask_TE


def select(
    selection_TE: Tensor,
    *,
    top_k: int,
    groups: tuple[int, int] | None = None,
    group_score: GroupScore = "top2_sum",
) -> Tensor:
    """Choose K experts per token by selection score, (T, E) -> int64 (T, K), best first.

    Rule: the K highest selection scores among the eligible experts. The others are left out, which is to
    score them -inf and not 0: a score plus a negative bias may lie below 0, and then an excluded expert
    would win.

    Degenerate: a tie goes to the lowest id, but is free. K = E selects all; experts at -inf come
    last; T = 0 gives (0, K).

    >>> select(torch.tensor([[0.1, 0.7, 0.7], [-3.0, -2.0, -1.0]]), top_k=2).tolist()
    [[1, 2], [2, 1]]
    """
    T, E = selection_TE.shape
    _check(E, top_k, groups, group_score)
    mask_TE = torch.ones(T, E, dtype=torch.bool)  # (T, E)
    if groups is not None:
        mask_TE = group_mask(selection_TE, groups, top_k=top_k, group_score=group_score)  # (T, E)
    ids = []
    for s_E, eligible_E in zip(selection_TE.tolist(), mask_TE.tolist(), strict=True):
        eligible = [e for e in range(E) if eligible_E[e]]
        ids.append(sorted(eligible, key=lambda e: (-s_E[e], e))[:top_k])  # K
    return torch.tensor(ids, dtype=torch.int64).reshape(T, top_k)  # (T, K)


def margins(
    selection_TE: Tensor,
    ids_TK: Tensor,
    *,
    groups: tuple[int, int] | None = None,
    group_score: GroupScore = "top2_sum",
) -> Tensor:
    """Measure how clearly a given selection wins over every other, (T, E) and int64 (T, K) -> (T,).

    Rule: the lowest chosen minus the highest unselected selection score among eligible experts; with groups,
    the lesser of this and of the same gap between group scores, divided by the number of scores that a
    group adds up.

    So, if each selection score may be wrong by d: a margin above 2d proves that no other set is allowed, and
    a set chosen from such scores has a margin of at least -2d. The second is a judge's test for an allowed
    near-tie.

    Degenerate: with nothing left to choose (K = E) +inf; an exact tie 0; a wrong choice is negative, one
    from too many groups -inf. A chosen group need not show in the K experts: the groups that favour the
    selection most are assumed. An id that is repeated or not in 0..E-1 is an error.

    Decides: ROUTE-01, ROUTE-04. Source: arithmetic.

    >>> s = torch.tensor([[4.0, 3.0, 1.0]])
    >>> [margins(s, torch.tensor([ids_K])).item() for ids_K in ([1, 0], [0, 2], [2, 1, 0])]
    [2.0, -2.0, inf]
    >>> s = torch.tensor([[9.0, 5.0, 4.0, 8.0, 0.0, 1.0]])  # groups of 14, 12, 1: a gap of 2 over two scores
    >>> margins(s, torch.tensor([[0]]), groups=(3, 1)).item()
    1.0
    """
    E, K = selection_TE.shape[1], ids_TK.shape[1]
    _check(E, K, groups, group_score)
    G, chosen = groups or (1, 1)
    summands = 1 if groups is None else _summands(group_score, K, chosen)
    everything = set(range(E))
    eligible = {picked: [e for e in range(E) if e // (E // G) in picked] for picked in combinations(range(G), chosen)}
    margin_T = []
    for s_E, ids_K in zip(selection_TE.tolist(), ids_TK.tolist(), strict=True):
        own = set(ids_K)
        if len(own) < K or not own <= everything:
            raise ValueError(f"selection {ids_K} is not {K} different experts of {E}")
        s_G = _group_scores(s_E, G, summands)
        margin = -inf
        for picked, experts in eligible.items():
            if own.issubset(experts):
                among_groups = _gap(s_G, picked, range(G)) / summands
                margin = max(margin, min(among_groups, _gap(s_E, ids_K, experts)))
        margin_T.append(margin)
    return torch.tensor(margin_T, dtype=torch.float64)  # (T,)


def _gap(scores: Sequence[float], chosen: Sequence[int], among: Sequence[int]) -> float:
    """Subtract the highest score left over from the lowest chosen; +inf when none is left over."""
    left_over = [scores[i] for i in among if i not in chosen]
    if not left_over:
        return inf
    lowest, highest = min(scores[i] for i in chosen), max(left_over)
    return 0.0 if lowest == highest else lowest - highest  # -inf - -inf is a tie too


def _group_scores(s_E: Sequence[float], G: int, summands: int) -> list[float]:
    """Score the G groups of one token: the sum of the best `summands` scores of each."""
    size = len(s_E) // G
    return [sum(sorted(s_E[g * size : (g + 1) * size], reverse=True)[:summands]) for g in range(G)]  # G


def _summands(group_score: GroupScore, top_k: int, chosen: int) -> int:
    """Count the scores that add up to a group's score."""
    return {"max": 1, "top2_sum": 2, "topk_sum": top_k // chosen}[group_score]


def _check(E: int, top_k: int, groups: tuple[int, int] | None, group_score: GroupScore) -> None:
    """Raise where no token can be routed: too few experts, or groups that do not divide them."""
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k = {top_k} of {E} experts: choose 1 to {E}")
    if groups is None:
        return
    G, chosen = groups
    if G < 1 or E % G or not 1 <= chosen <= G:
        raise ValueError(f"groups = {groups} for {E} experts: G must divide E, and 1 to G groups be chosen")
    if chosen * (E // G) < top_k:
        raise ValueError(f"{chosen} groups of {E // G} experts hold fewer than top_k = {top_k}: choose more groups")
    if not 1 <= _summands(group_score, top_k, chosen) <= E // G:
        raise ValueError(f"groups of {E // G} cannot be scored by {group_score} at top_k = {top_k}, groups = {groups}")
