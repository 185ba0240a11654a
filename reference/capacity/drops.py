"""Drops: which slots an expert of capacity C keeps.

A policy says which slots come before which; an expert keeps the first C of those that selected it. Ties, and
weights closer than their rounding errors, leave several outcomes: `legal_drop` judges any, `keep` gives one.

Sources: GShard section 2.2, Switch Transformer section 2.2; behaviour of Megatron-Core and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.reference.capacity.after_drops import check_kept
from moe_conformance.reference.capacity.limits import capacities, loads

Policy = Literal["any", "weight", "position", "choice"]
"""Who stays: anyone ("any", at random), the heaviest, the first tokens, or the first choices of the tokens."""


def legal_drop(
    kept_TK: Tensor,
    ids_TK: Tensor,
    experts: int,
    *,
    capacity: int,
    policy: Policy,
    weights_TK: Tensor | None = None,
    errors_TK: Tensor | None = None,
) -> Tensor:
    """Say of each expert whether it may keep just these slots, bool (T, K) and int64 (T, K) -> bool (E,).

    Args: `weights_TK` are those that would be applied, each wrong by at most `errors_TK` (default 0).

    Rule: it keeps at most C; a dropped slot finds no room (C are kept), and does not come before a kept one.
    Before means: heavier beyond the errors of both weights ("weight"); of an earlier token ("position"); an
    earlier choice, and of an earlier token among equal choices ("choice", slots in falling selection score).

    Degenerate: a dropped slot of weight 0, within its error, may never have chosen: it may be absent
    although there was room, and before any. Ties of weights are free. C >= n_e: all kept. Raises on a slot
    kept though empty, an expert twice in a token, a NaN weight, "weight" without weights, an unknown policy.

    Decides: DROP-03, DROP-05, DROP-06. Source: GShard section 2.2.

    >>> ids, w = torch.tensor([[1, 0], [2, 1], [1, 2]]), torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.7, 0.3]])
    >>> kept = torch.tensor([[False, True], [True, True], [True, True]])  # of expert 1: tokens 1, 2, not 0
    >>> for policy in ("any", "weight", "position", "choice"):
    ...     print(policy, legal_drop(kept, ids, 3, capacity=2, policy=policy, weights_TK=w).tolist())
    any [True, True, True]
    weight [True, False, True]
    position [True, False, True]
    choice [True, False, True]
    """
    w_TK, d_TK = _check(ids_TK, experts, capacity, policy, weights_TK, errors_TK)
    check_kept(kept_TK, ids_TK)
    legal = []
    for e in range(experts):
        slots = (ids_TK == e).nonzero().tolist()  # (n_e, 2), of (t, k)
        kept = [(t, k) for t, k in slots if kept_TK[t, k]]
        dropped = [(t, k) for t, k in slots if not kept_TK[t, k]]
        if weights_TK is not None:
            dropped = [slot for slot in dropped if abs(w_TK[slot]) > d_TK[slot]]  # those that surely chose
        room = len(kept) < capacity
        # Of a slot, the earliest and the latest that it can stand in the order of the policy.
        earliest = {slot: _place(policy, slot, float(w_TK[slot] + d_TK[slot])) for slot in kept}
        latest = {slot: _place(policy, slot, float(w_TK[slot] - d_TK[slot])) for slot in dropped}
        overtaken = any(latest[i] < earliest[j] for i in dropped for j in kept)
        legal.append(len(kept) <= capacity and not (dropped and room) and not overtaken)
    return torch.tensor(legal, dtype=torch.bool)  # (E,)


def legal_drops_by_rank(
    kept_by_rank: Sequence[Tensor],
    ids_by_rank: Sequence[Tensor],
    experts: int,
    *,
    factor: float,
    policy: Policy,
    minimum: int = 0,
    tokens_by_rank: Sequence[int] | None = None,
    weights_by_rank: Sequence[Tensor] | None = None,
    errors_by_rank: Sequence[Tensor] | None = None,
    rounding: Literal["up", "down"] = "up",
) -> tuple[bool, ...]:
    """Say of each rank whether it may keep just these slots.

    Args: as `legal_drop`, by rank; `tokens_by_rank` are the T_r of the capacities, if not all rows of ids; `rounding`
    of the capacities.

    Rule: the ranks are judged one by one, each by an allowed capacity of its own tokens, the same for all its
    experts. No rank sees another's tokens. A capacity over a group is that of one rank with all tokens of
    the group: concatenate them.

    Degenerate: a rank with T = 0 keeps nothing and changes no other rank's drops.

    Decides: DROP-03, DROP-05, DROP-06, DROP-07. Source: GShard section 2.2 (capacity within a local group).

    >>> ids, kept = torch.tensor([[0], [0], [0], [1]]), torch.tensor([[True], [True], [False], [True]])
    >>> legal_drops_by_rank([kept, kept[:2]], [ids, ids[:2]], 2, factor=1.0, policy="position")
    (True, False)
    """
    W = len(ids_by_rank)
    weights: Sequence[Tensor | None] = weights_by_rank or [None] * W
    errors: Sequence[Tensor | None] = errors_by_rank or [None] * W
    verdicts = []
    for r, (kept_TK, ids_TK) in enumerate(zip(kept_by_rank, ids_by_rank, strict=True)):
        tokens = len(ids_TK) if tokens_by_rank is None else tokens_by_rank[r]
        by_capacity = [
            legal_drop(kept_TK, ids_TK, experts, capacity=C, policy=policy, weights_TK=weights[r], errors_TK=errors[r])
            for C in capacities(tokens, ids_TK.shape[1], experts, factor=factor, minimum=minimum, rounding=rounding)
        ]
        verdicts.append(any(bool(legal_E.all()) for legal_E in by_capacity))
    return tuple(verdicts)


def keep(ids_TK: Tensor, experts: int, *, capacity: int, policy: Policy, weights_TK: Tensor | None = None) -> Tensor:
    """Choose the slots to keep, int64 (T, K) -> bool (T, K), one of the allowed outcomes.

    Rule: of each expert the first C slots in the order of the policy. A tie of weights goes to the smaller
    (t, k), but is free. Raises as `legal_drop`, and for "any", which has no order to go by.

    Decides: DROP-09, DROP-10, DROP-11. Source: GShard section 2.2.

    >>> ids, w = torch.tensor([[1, 0], [2, 1], [1, 2]]), torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.7, 0.3]])
    >>> for policy in ("weight", "position", "choice"):
    ...     print(keep(ids, 3, capacity=1, policy=policy, weights_TK=w).int().tolist())
    [[0, 1], [1, 0], [1, 0]]
    [[1, 1], [1, 0], [0, 0]]
    [[1, 1], [1, 0], [0, 0]]
    """
    w_TK, _ = _check(ids_TK, experts, capacity, policy, weights_TK, None)
    if policy == "any":
        raise ValueError("policy 'any' keeps slots at random: judge what was kept by legal_drop")
    kept_TK = torch.zeros_like(ids_TK, dtype=torch.bool)  # (T, K)
    for e in range(experts):
        slots: list[tuple[int, int]] = [(t, k) for t, k in (ids_TK == e).nonzero().tolist()]
        for slot in sorted(slots, key=lambda slot: (_place(policy, slot, float(w_TK[slot])), slot))[:capacity]:
            kept_TK[slot] = True
    return kept_TK


def _place(policy: Policy, slot: tuple[int, int], weight: float) -> tuple[float, ...]:
    """Place a slot (t, k) in the order of a policy: the lowest comes first."""
    t, k = slot
    return {"any": (), "weight": (-weight,), "position": (t,), "choice": (k, t)}[policy]


def _check(
    ids_TK: Tensor,
    experts: int,
    capacity: int,
    policy: Policy,
    weights_TK: Tensor | None,
    errors_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return weights and errors in float64, zeros where none are given; raise on what has no result."""
    if capacity < 0:
        raise ValueError(f"capacity {capacity} is negative")
    if policy not in ("any", "weight", "position", "choice"):
        raise ValueError(f"policy {policy!r} is none of {Policy}")
    loads(ids_TK, experts)  # raises on an id out of range
    for t, ids_K in enumerate(ids_TK.tolist()):
        chosen = [e for e in ids_K if e >= 0]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"token {t} chooses an expert twice: {ids_K}")
    if weights_TK is None and (policy == "weight" or errors_TK is not None):
        raise ValueError("no weights: the policy by weight, and errors of weights, need them")
    zeros_TK = torch.zeros(ids_TK.shape, dtype=torch.float64)  # (T, K)
    w_TK = zeros_TK if weights_TK is None else weights_TK.detach().double()  # (T, K)
    d_TK = zeros_TK if errors_TK is None else errors_TK.detach().double()  # (T, K)
    if not ids_TK.shape == w_TK.shape == d_TK.shape:
        raise ValueError(f"weights {tuple(w_TK.shape)}, errors {tuple(d_TK.shape)} for ids {tuple(ids_TK.shape)}")
    if bool(((ids_TK >= 0) & (w_TK.isnan() | ~(d_TK >= 0))).any()):  # what stands in an empty slot says nothing
        raise ValueError("a weight is NaN, or an error of one is not a number of at least 0")
    return w_TK, d_TK
