"""Balancing by quantiles: a bias, subtracted from the scores, that admits every expert's balanced share.

A token selects the K experts with the highest z = s - b; expert e gets it, all else being equal, if s_te - b_e
lies above the token's cutoff. So s_te minus the cutoff tells which b_e would admit the token, and the bias
that admits q = K V / E of the V valid tokens is a quantile of these differences.

Source: Kimi K3 technical report section 2.3.3 (quantile balancing).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from moe_conformance.reference.losses.balance import valid_tokens


def cutoffs(scores_TE: Tensor, bias_E: Tensor, *, top_k: int) -> Tensor:
    """Say from where a token admits no more experts, (T, E) and (E,) -> (T,).

    Rule (BIAS-12): a_t is the (K+1)-th highest of s_te - b_e over the experts, the best that is left out.

    Degenerate: K = E leaves none out, and is an error here.

    >>> cutoffs(torch.tensor([[0.5, 0.75, 0.25]]), torch.tensor([0.0, 1.0, 0.0]), top_k=1).tolist()
    [0.25]
    """
    E = scores_TE.shape[1]
    if not 1 <= top_k < E:
        raise ValueError(f"top_k = {top_k} of {E} experts leaves no best one out; choose 1 to {E - 1}")
    if bias_E.shape != (E,):
        raise ValueError(f"bias {tuple(bias_E.shape)} for {E} experts; give one number for each")
    z_TE = scores_TE.double() - bias_E.double()  # (T, E)
    if not bool(z_TE.isfinite().all()):
        raise ValueError("scores minus bias hold a number that is not finite; nothing can be ordered by it")
    return z_TE.sort(dim=1, descending=True).values[:, top_k]  # (T,)


def quantile_bounds(
    parts: Sequence[Tensor],
    bias_E: Tensor,
    *,
    top_k: int,
    padding: Sequence[Tensor | None] | None = None,
    memory: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Bound the bias after a step from below and above, -> (E,), (E,); all in between is allowed.

    Args:
        parts: the scores (T, E) of every microbatch and rank of the step, each token once.
        bias_E: (E,), the bias of the step, which is subtracted from scores.
        top_k: K.
        padding: bool (T,) of every part, True = padding, or None.
        memory: r in [0, 1), how much of the old bias stays.

    Rule (BIAS-12): with d the differences s_te - a_t of the V valid tokens, highest first, and q = K V / E: from
    the (ceil(q)+1)-th to the floor(q)-th of d; with memory, r b + (1 - r) times each. Common constants are
    free: ask `outside`.

    Degenerate: where d has no such place the bound is -inf or +inf: below all, or above all, is allowed. K = E
    has no cutoff and V = 0 no token: the bias does not move, and both bounds are it.

    Decides: BIAS-12. Source: Kimi K3 technical report section 2.3.3.

    >>> parts = [torch.tensor([[0.5, 0.25, 0.0], [0.75, 0.5, 0.25]]), torch.tensor([[0.0, 0.25, 1.0]])]
    >>> [bound.tolist() for bound in quantile_bounds(parts, torch.zeros(3), top_k=1)]  # a = 1/4, 1/2, 1/4; q = 1
    [[0.25, 0.0, -0.25], [0.25, 0.0, 0.75]]
    """
    if not 0 <= memory < 1:
        raise ValueError(f"memory = {memory}; give 0 <= r < 1")
    paddings = [None] * len(parts) if padding is None else padding
    valid = [s_TE[valid_tokens(s_TE, mask_T)] for s_TE, mask_T in zip(parts, paddings, strict=True)]
    E = len(bias_E)
    if any(s_TE.shape[1:] != (E,) for s_TE in parts):
        raise ValueError(f"scores {[tuple(s_TE.shape) for s_TE in parts]} for {E} biases; give (T, E), one E")
    s_VE = torch.cat([torch.zeros(0, E, dtype=torch.float64), *(s_TE.double() for s_TE in valid)])  # (V, E)
    V, b_E = len(s_VE), bias_E.detach().double()
    if not bool(b_E.isfinite().all()) or not bool(s_VE.isfinite().all()):
        raise ValueError("a score or bias is not finite; nothing can be ordered by it")
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k = {top_k} of {E} experts: choose 1 to {E}")
    if V == 0 or top_k == E:
        return b_E, b_E
    d_VE = s_VE - cutoffs(s_VE, b_E, top_k=top_k)[:, None]  # (V, E)
    d_VE = d_VE.sort(dim=0, descending=True).values  # (V, E)
    floor, ceil = top_k * V // E, -(-top_k * V // E)  # of q
    high_E = d_VE[floor - 1] if floor >= 1 else torch.full_like(b_E, inf)  # (E,); d_VE counts from 0
    low_E = d_VE[ceil] if ceil < V else torch.full_like(b_E, -inf)  # (E,)
    return memory * b_E + (1 - memory) * low_E, memory * b_E + (1 - memory) * high_E


def outside(bias_E: Tensor, low_E: Tensor, high_E: Tensor) -> float:
    """Measure how far a new bias lies outside its bounds, a constant common to all experts being free.

    Rule (BIAS-12): the least max_e distance of b'_e + c from [low_e, high_e] over all c: half of what the largest
    low_e - b'_e exceeds the smallest high_e - b'_e by. 0 is allowed; an estimate by histogram may be off by one
    bin's width.

    Decides: BIAS-12. Source: arithmetic.

    >>> low, high = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> [outside(torch.tensor([7.0, 7.0 + gap]), low, high) for gap in (0.0, 1.0, 3.0)]
    [0.0, 0.0, 1.0]
    """
    if not bias_E.shape == low_E.shape == high_E.shape or not bool(bias_E.isfinite().all()):
        raise ValueError(f"bias {bias_E.tolist()}: give a finite one, shaped as its bounds")
    if bool((low_E > high_E).any()):
        raise ValueError(f"bounds {low_E.tolist()} lie above {high_E.tolist()}")
    least_shift = (low_E.double() - bias_E.double()).max().item()
    largest_shift = (high_E.double() - bias_E.double()).min().item()
    return max(0.0, (least_shift - largest_shift) / 2)
