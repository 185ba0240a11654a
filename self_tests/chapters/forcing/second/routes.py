"""Forcing by hand: the routes, weights and losses' inputs that a strategy leaves, for strategies that draw nothing.

A forced logit is another number in the place of the router's own, whose gradient it hands on as it is. A forced id
is another choice of experts, weighed by the router's own scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.routing.second.routes import Gate, gradient_of_token, largest_first, weights_of_chosen

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class LossView(NamedTuple):
    """What a balance loss may be told: the logits (T, E) of its scores, and each token's counted experts."""

    logits_TE: Floats
    chosen: list[set[int]]


def legal_ids(ids_TK: Ints, experts: int, *, padding_T: Bools | None = None) -> list[bool]:
    """Whether each token has K different experts, or, being padding, none at all."""
    if padding_T is not None and padding_T.shape != (ids_TK.shape[0],):
        raise ValueError(f"padding of shape {padding_T.shape}")
    verdicts = []
    for token, row in enumerate(ids_TK.tolist()):
        named = [expert for expert in range(experts) if row.count(expert) == 1]
        nobody = padding_T is not None and bool(padding_T[token]) and row.count(-1) == len(row)
        verdicts.append(nobody or len(named) == len(row))
    return verdicts


def check_ids(ids_TK: Ints, experts: int) -> None:
    """Refuse an expert out of range or chosen twice by a token."""
    if not all(legal_ids(ids_TK, experts)):
        raise ValueError(f"{ids_TK.tolist()} of {experts} experts")


def balanced(loads_E: Sequence[int]) -> bool:
    """Whether no two experts' loads differ by more than one."""
    return all(abs(one - other) <= 1 for one in loads_E for other in loads_E)


def balanced_sum(loads_by_rank: Sequence[Sequence[int]]) -> bool:
    """Whether no two experts' sums over ranks differ by more than one, or by more than the ranks where these differ."""
    if not loads_by_rank:
        raise ValueError("no ranks")
    totals = [0] * len(loads_by_rank[0])
    for loads_E in loads_by_rank:
        for expert, load in enumerate(loads_E):
            totals[expert] += load
    alike = all(sum(loads_E) == sum(loads_by_rank[0]) for loads_E in loads_by_rank)
    allowed = 1 if alike else len(loads_by_rank)
    return all(abs(one - other) <= allowed for one in totals for other in totals)


def undecided(logits: Sequence[float], ids: Sequence[int]) -> bool:
    """Whether every forced expert of a token is masked, so that any finite weights are legal."""
    return all(logits[expert] == -math.inf for expert in ids)


def undecided_weights(logits_TE: Floats, ids_TK: Ints) -> list[bool]:
    """The same for each token."""
    check_ids(ids_TK, logits_TE.shape[1])
    return [undecided(logits, ids) for logits, ids in zip(logits_TE.tolist(), ids_TK.tolist(), strict=True)]


def forced_weights(logits_TE: Floats, ids_TK: Ints, gate: Gate) -> Floats:
    """The router's weights of experts that it did not choose; 0 where all of a token's are masked."""
    check_ids(ids_TK, logits_TE.shape[1])
    weights_TK = np.zeros(ids_TK.shape)
    for token, (logits, ids) in enumerate(zip(logits_TE.tolist(), ids_TK.tolist(), strict=True)):
        if any(math.isnan(logit) or logit == math.inf for logit in logits):
            raise ValueError(f"logits {logits}")
        if not undecided(logits, ids):
            weights_TK[token] = weights_of_chosen(logits, ids, gate)
    return weights_TK


def forced_weights_backward(logits_TE: Floats, ids_TK: Ints, gate: Gate, upstream_TK: Floats) -> Floats:
    """Gradient of the forced weights with respect to the logits (T, E); 0 where all of a token's are masked."""
    d_logits_TE = np.zeros(logits_TE.shape)
    for token, (logits, ids) in enumerate(zip(logits_TE.tolist(), ids_TK.tolist(), strict=True)):
        if not undecided(logits, ids):
            d_logits_TE[token] = gradient_of_token(logits, ids, gate, upstream_TK[token].tolist())
    return d_logits_TE


def straight_through(own_TE: Floats, forced_TE: Floats) -> Floats:
    """The forced logits; an upstream gradient passes to the router's own one as it is, and none to the forced ones."""
    if own_TE.shape != forced_TE.shape:
        raise ValueError(f"shapes {own_TE.shape} and {forced_TE.shape}")
    return forced_TE.copy()


def loss_views(
    own_TE: Floats, *, top_k: int, forced_logits_TE: Floats | None = None, forced_ids_TK: Ints | None = None
) -> list[LossView]:
    """What a loss may be told under forcing: consistent logits and counts, of the strategy or of the router itself."""
    experts = own_TE.shape[1]
    if (forced_logits_TE is None) == (forced_ids_TK is None) or not 1 <= top_k <= experts:
        raise ValueError("either logits or ids are forced")

    def plain(logits_TE: Floats) -> LossView:
        rows = logits_TE.tolist()
        return LossView(logits_TE, [set(largest_first(row, list(range(experts)), top_k)) for row in rows])

    if forced_logits_TE is not None:
        return [plain(straight_through(own_TE, forced_logits_TE)), plain(own_TE)]
    assert forced_ids_TK is not None
    check_ids(forced_ids_TK, experts)
    if forced_ids_TK.shape != (own_TE.shape[0], top_k):
        raise ValueError(f"ids of shape {forced_ids_TK.shape}")
    return [plain(own_TE), LossView(own_TE, [set(ids) for ids in forced_ids_TK.tolist()])]


def groups_used(ids_TK: Ints, experts: int, groups: int) -> list[int]:
    """In how many groups of neighbouring experts each token's experts lie."""
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts in {groups} groups")
    check_ids(ids_TK, experts)
    size = experts // groups
    used = []
    for row in ids_TK.tolist():
        members = [range(group * size, (group + 1) * size) for group in range(groups)]
        used.append(sum(any(expert in row for expert in group) for group in members))
    return used
