"""Losses over ranks: a microbatch that ranks hold in parts, and the loss that counts choices over a whole step.

Sources: Qiu et al. 2025, Demons in the Detail (global-batch load balancing); arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.reference.losses.balance import choice_counts, normalised_scores, same_tokens, valid_tokens
from moe_conformance.reference.routing.routes import Score


def global_losses(
    logits: Sequence[Sequence[Tensor]],
    ids: Sequence[Sequence[Tensor]],
    *,
    score: Score,
    coefficient: float,
    padding: Sequence[Sequence[Tensor | None]] | None = None,
    remembers: bool = True,
) -> Tensor:
    """Charge every microbatch of a step for the imbalance of the step so far, -> (M,), differentiable.

    Args:
        logits: of every microbatch m and data parallel group d, logits[m][d] (T, E); T may differ.
        ids: int64 (T, K) of each, the choices.
        score: how the router scores.
        coefficient: c.
        padding: bool (T,) of each, True = padding, or None.
        remembers: whether counts are kept from one microbatch of the step to the next.

    Rule (LOSS-07): L_m = c E sum_e f_e P_e, one for all groups together: f_e the share of expert e in the
    choices of microbatches 1..m (m alone without memory) of all groups, P_e the mean of p_te over the valid
    tokens of microbatch m of all groups. Each L_m is differentiated in its own logits only; P is a mean over
    the groups already, so that LOSS-08 averages over microbatches and not over groups.

    Degenerate: M = dp = 1 is `auxiliary_loss`. A part without valid tokens adds 0; a microbatch without any
    gives L_m = 0. M = 0 gives (0,). Parts that differ in E or K, and groups that differ in number, are errors.

    Decides: LOSS-07, LOSS-08. Source: Qiu et al. 2025, Demons in the Detail.

    >>> logits = [[torch.tensor([[0.0, 40.0]])], [torch.tensor([[40.0, 0.0]])]]  # dp = 1, M = 2
    >>> ids = [[torch.tensor([[1]])], [torch.tensor([[0]])]]
    >>> global_losses(logits, ids, score="softmax", coefficient=1.0).tolist()
    [2.0, 1.0]
    >>> global_losses(logits, ids, score="softmax", coefficient=1.0, remembers=False).tolist()
    [2.0, 2.0]
    """
    padding = [[None] * len(row) for row in logits] if padding is None else padding
    dp = len(logits[0]) if logits else 1
    for table in (logits, ids, padding):
        if dp == 0 or len(table) != len(logits) or any(len(row) != dp for row in table):
            raise ValueError(f"{len(logits)} microbatches of {dp} groups; give each table one part for every group")
    losses = []
    n_E, V = torch.tensor(0), 0  # choices and valid tokens of the step so far
    for logits_of, ids_of, padding_of in zip(logits, ids, padding, strict=True):
        E, K = logits[0][0].shape[1], ids[0][0].shape[1]
        if not remembers:
            n_E, V = torch.tensor(0), 0
        p_of = []  # (V, E) of every group
        for logits_TE, ids_TK, padding_T in zip(logits_of, ids_of, padding_of, strict=True):
            same_tokens(logits_TE, ids_TK)
            if (logits_TE.shape[1], ids_TK.shape[1]) != (E, K):
                raise ValueError(f"logits {tuple(logits_TE.shape)}, ids {tuple(ids_TK.shape)}: E = {E}, K = {K} before")
            n_E = n_E + choice_counts(ids_TK, E, padding_T=padding_T)  # (E,)
            p_of.append(normalised_scores(logits_TE[valid_tokens(logits_TE, padding_T)], score))
        p_NE = torch.cat(p_of)  # (N, E); the N valid tokens of this microbatch
        V += len(p_NE)
        f_E = n_E.double() / (K * max(V, 1))  # (E,)
        P_E = p_NE.sum(dim=0) / max(len(p_NE), 1)  # (E,)
        losses.append(coefficient * E * (f_E * P_E).sum())
    return torch.stack(losses) if losses else torch.zeros(0, dtype=torch.float64)  # (M,)


def whole(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Put together the microbatch that the ranks of a tp x cp group hold in parts, -> (T, ...).

    Args:
        parts: of every rank, what it holds of its tokens, (T_r, ...): logits, ids, padding.
        places: of every rank, int64 (T_r,), which token 0..T-1 of the microbatch each row is.

    Rule (LOSS-12): every token once, however tp and cp cut or copy them. What holds of the whole holds under
    every division; `losses.py` and `z_loss.py` are to be asked about nothing else.

    Degenerate: a rank without tokens holds nothing. No rank, a token that no rank holds, or copies that differ, are
    errors. The gradient of a copied token goes to the first rank that holds it: how ranks share it is free.

    Decides: LOSS-12. Source: arithmetic.

    >>> a, b = torch.tensor([[5.0], [7.0]]), torch.tensor([[6.0], [7.0]])
    >>> whole([a, b], [torch.tensor([0, 2]), torch.tensor([1, 2])]).tolist()
    [[5.0], [6.0], [7.0]]
    """
    held: dict[int, Tensor] = {}  # place -> its row
    for rank, (part, places_T) in enumerate(zip(parts, places, strict=True)):
        for row, place in zip(part, places_T.tolist(), strict=True):
            if place in held and not torch.equal(held[place], row):
                raise ValueError(f"rank {rank} holds another copy of token {place} than the ranks before it")
            held.setdefault(place, row)
    if not parts:
        raise ValueError("no rank holds anything; give the part of every rank, (0, ...) where it has no tokens")
    if sorted(held) != list(range(len(held))):
        raise ValueError(f"ranks hold tokens {sorted(held)}; give 0 to T-1 without a gap")
    return torch.stack([held[place] for place in range(len(held))]) if held else torch.cat(list(parts))  # (T, ...)
