"""Losses: what a router is charged, in one microbatch, for imbalance; for large logits see `z_loss.py`.

A microbatch is what one tp x cp group processes together, each token once (`losses_over_ranks.whole` puts it
together). V of its T tokens are valid: those that `padding_T` marks True are taken out before anything else,
so that nothing in them is looked at and their gradient is exactly 0. Every loss is a 0-dimensional float64
tensor, and autograd goes through the scores alone: counts are integers.

No loss takes an expert bias, a routing scale, a capacity or a drop policy, as none may change it. The ids
are an argument, so that a judge can charge any selection: where two experts nearly tie, the other is allowed.

Everywhere an error, in valid rows: a logit that is NaN or +inf, for softmax a row of nothing but -inf, an id
outside -1..E-1, arguments whose T differ.

Sources: Switch Transformer section 2.2, equations 4 to 6; DeepSeek-V3 equations 17 to 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.routing.routes import GroupScore, Score, scores, select

# A sum of scores below this counts as 0: float32 is 0 long before, and derivatives in float64 do not overflow yet.
UNDERFLOWED = 1e-100


def normalised_scores(logits_TE: Tensor, score: Score) -> Tensor:
    """Make of every token's scores shares that sum to one over all experts, (T, E) -> p (T, E).

    Rule (LOSS-02): softmax over all E experts, also for a router that has weights by softmax over the selected; else
    p_te = s_te / sum_e' s_te' with s of `routing.scores`. For every K, 1 included.

    Degenerate: a sum of 0, or below 1e-100 (every score underflowed), gives p = 0 with gradient 0: a token that
    likes no expert must not become NaN. Up to 1e-12 the spec lets p be anything from 0 to this, as libraries
    add an epsilon to the sum. An expert at -inf has p = 0.

    Decides: LOSS-02. Source: Switch Transformer section 2.2, equation 6; DeepSeek-V3, equations 19 and 20.

    >>> normalised_scores(torch.tensor([[0.0, 0.0, -torch.inf], [-900.0, -900.0, -900.0]]), "sigmoid").tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """
    if score in ("softmax", "softmax_topk"):
        return scores(logits_TE, "softmax")  # (T, E)
    s_TE = scores(logits_TE, score)  # (T, E)
    sum_T1 = s_TE.sum(dim=1, keepdim=True)  # (T, 1)
    underflowed_T1 = sum_T1 < UNDERFLOWED  # (T, 1)
    return torch.where(underflowed_T1, 0.0, s_TE / torch.where(underflowed_T1, 1.0, sum_T1))  # (T, E)


def choices(
    logits_TE: Tensor,
    *,
    score: Score,
    top_k: int,
    groups: tuple[int, int] | None = None,
    group_score: GroupScore = "top2_sum",
    padding_T: Tensor | None = None,
) -> Tensor:
    """Choose the experts that a balance loss counts, (T, E) -> int64 (T, K), best first.

    Rule (LOSS-03): the top K by score, without bias; p orders as the scores do. With `groups`, within the best
    groups by score: a router that limits groups may count either.

    Degenerate: a tie goes to the lowest id, but is free (`selection.margins` tells where). A padding
    row holds -1.

    Decides: LOSS-03. Source: DeepSeek-V3, equation 18; DeepSeek-V2, section 2.2.

    >>> choices(torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]]), score="softmax", top_k=2).tolist()
    [[1, 2], [2, 0]]
    """
    valid_T = valid_tokens(logits_TE, padding_T)
    ids_TK = torch.full((len(logits_TE), top_k), -1)  # (T, K)
    s_VE = scores(logits_TE[valid_T], score)  # (V, E)
    ids_TK[valid_T] = select(s_VE, top_k=top_k, groups=groups, group_score=group_score)
    return ids_TK


def choice_counts(ids_TK: Tensor, experts: int, *, padding_T: Tensor | None = None) -> Tensor:
    """Count how often valid tokens select each expert, int64 (T, K) -> n, int64 (E,).

    Rule (LOSS-01, LOSS-14, BIAS-05): n_e = |{(t, k): ids_tk = e, t valid}|.

    Degenerate: an empty slot (-1) counts for no expert; an expert in two slots of a token counts twice.

    Decides: BIAS-05. Source: definition of padding.

    >>> choice_counts(torch.tensor([[0, 1], [1, -1], [2, 2]]), 4, padding_T=torch.tensor([False, False, True]))
    tensor([1, 2, 0, 0])
    """
    if ids_TK.dtype != torch.int64 or ids_TK.ndim != 2 or ids_TK.shape[1] == 0:
        raise ValueError(f"ids are {ids_TK.dtype} {tuple(ids_TK.shape)}; give int64 (T, K), K >= 1")
    ids_VK = ids_TK[valid_tokens(ids_TK, padding_T)]  # (V, K)
    if bool(((ids_VK < -1) | (ids_VK >= experts)).any()):
        raise ValueError(f"ids from {ids_VK.min()} to {ids_VK.max()} for {experts} experts; give -1 to E-1")
    return torch.stack([(ids_VK == e).sum() for e in range(experts)])  # (E,)


def auxiliary_loss(
    logits_TE: Tensor, ids_TK: Tensor, *, score: Score, coefficient: float, padding_T: Tensor | None = None
) -> Tensor:
    """Charge a microbatch for imbalance, (T, E) and int64 (T, K) -> (), differentiable in the logits.

    Rule (LOSS-01, LOSS-04, LOSS-14): c E sum_e f_e P_e, f_e = n_e / (K V), P_e = the mean of p_te over valid
    tokens. V comes from the mask, K from the width of the ids, which are `choices`, or replayed or forced.

    Degenerate: V = 0 gives 0. Equal counts, K = E, or p = 1/E everywhere give c whatever the rest is.

    Decides: LOSS-01, LOSS-14, LOSS-20. Source: Switch Transformer section 2.2; DeepSeek-V3.

    >>> logits, ids = torch.zeros(3, 4), torch.tensor([[0], [0], [1]])
    >>> auxiliary_loss(logits, ids, score="sigmoid", coefficient=0.5).item()
    0.5
    >>> logits[:, 0] = torch.tensor(9.0).log()  # p = 9/12 for expert 0
    >>> round(auxiliary_loss(logits, ids, score="softmax", coefficient=0.5).item(), 6)  # 2 (2/3 3/4 + 1/3 1/12)
    1.055556
    """
    valid_T = valid_tokens(logits_TE, padding_T)
    same_tokens(logits_TE, ids_TK)
    (E, K), V = (logits_TE.shape[1], ids_TK.shape[1]), int(valid_T.sum())
    n_E = choice_counts(ids_TK, E, padding_T=padding_T)  # (E,)
    p_VE = normalised_scores(logits_TE[valid_T], score)  # (V, E)
    f_E = n_E.double() / (K * max(V, 1))  # (E,); without tokens nothing is chosen: 0
    P_E = p_VE.sum(dim=0) / max(V, 1)  # (E,)
    return coefficient * E * (f_E * P_E).sum()


def sequence_loss(
    logits_TE: Tensor,
    ids_TK: Tensor,
    sequences_T: Tensor,
    *,
    score: Score,
    coefficient: float,
    padding_T: Tensor | None = None,
    divisor: int | None = None,
) -> Tensor:
    """Charge every sequence of a microbatch for its own imbalance, and average, -> ().

    Args:
        logits_TE: (T, E).
        ids_TK: int64 (T, K), the choices.
        sequences_T: int64 (T,), which sequence, or packed segment, a token belongs to; any labels, in any order.
        score: how the router scores.
        coefficient: c.
        padding_T: bool (T,), True = padding.
        divisor: S, the number of sequences to divide by; None = those that have a valid token.

    Rule (LOSS-05, LOSS-14): (1/S) sum_s of the `auxiliary_loss` of sequence s alone, by its own V_s.

    Degenerate: a sequence without valid token adds 0; whether it counts in S is free, so a judge accepts
    either divisor. S = 1 is `auxiliary_loss`. No valid token at all: 0. A divisor below the number of
    sequences with a valid token is an error.

    Decides: LOSS-05, LOSS-06. Source: DeepSeek-V3, equations 17 to 20.

    >>> logits, ids, sequences = torch.tensor([[0.0, 40.0], [40.0, 0.0]]), torch.tensor([[1], [0]]), torch.arange(2)
    >>> [sequence_loss(logits, ids, s, score="softmax", coefficient=0.5).item() for s in (sequences, 0 * sequences)]
    [1.0, 0.5]
    """
    valid_T = valid_tokens(logits_TE, padding_T)
    same_tokens(logits_TE, ids_TK)
    if sequences_T.dtype != torch.int64 or sequences_T.shape != valid_T.shape:
        raise ValueError(f"sequences are {sequences_T.dtype} {tuple(sequences_T.shape)}; give int64 (T,)")
    labels = sequences_T[valid_T].unique().tolist()
    S = len(labels) if divisor is None else divisor
    if S < len(labels):
        raise ValueError(f"{len(labels)} sequences have valid tokens; they cannot be divided by {S}")
    total = auxiliary_loss(logits_TE[:0], ids_TK[:0], score=score, coefficient=coefficient)  # 0
    for label in labels:
        own_T = valid_T & (sequences_T == label)
        total = total + auxiliary_loss(logits_TE, ids_TK, score=score, coefficient=coefficient, padding_T=~own_T)
    return total / max(S, 1)


def valid_tokens(rows: Tensor, padding_T: Tensor | None) -> Tensor:
    """Turn a padding mask (True = padding, None = no padding) into its opposite, bool (T,).

    >>> valid_tokens(torch.zeros(3, 2), torch.tensor([True, False, False])).tolist()
    [False, True, True]
    """
    T = len(rows)
    if padding_T is None:
        return torch.ones(T, dtype=torch.bool)  # (T,)
    if padding_T.dtype != torch.bool or padding_T.shape != (T,):
        raise ValueError(f"padding is {padding_T.dtype} {tuple(padding_T.shape)}; give bool ({T},), True = padding")
    return ~padding_T


def same_tokens(logits_TE: Tensor, ids_TK: Tensor) -> None:
    """Raise unless there is a row of ids for every row of logits."""
    if len(logits_TE) != len(ids_TK):
        raise ValueError(f"{len(logits_TE)} rows of logits but {len(ids_TK)} of ids; give both for every token")
