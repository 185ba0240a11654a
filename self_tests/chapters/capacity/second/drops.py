"""Drops by hand: which slots an expert may keep, and what a drop does to the weights and their gradients.

A slot is one (token, slot) place with an id >= 0. Told from the expert: it lists the slots that chose it, and a
drop is legal when some way of reading the spec's freedoms (ties, weights of zero, rounding) explains what it kept.

    weights stay       w'_k = w_k                               dw_k = u_k, the upstream gradient
    over the kept      w'_k = s w_k / S, S = sum_kept w_j       dw_k = s (u_k - sum_kept u_j w_j / S) / S
    dropped            w'_k = 0                                 dw_k = 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.capacity.second.limits import capacities, loads

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Policy = Literal["any", "weight", "position", "choice"]


class Slot(NamedTuple):
    """A slot that chose the expert: whether it was kept, what its weight may be, and if it surely counts."""

    token: int
    slot: int
    kept: bool
    low: float
    high: float
    counts: bool


def slots_of(
    expert: int, kept_TK: Bools, ids_TK: Ints, weights_TK: Floats | None, errors_TK: Floats | None
) -> list[Slot]:
    """The slots that chose an expert; one whose weight may be 0 does not surely count."""
    found = []
    for token in range(ids_TK.shape[0]):
        for slot in range(ids_TK.shape[1]):
            if ids_TK[token, slot] != expert:
                continue
            if weights_TK is None:
                found.append(Slot(token, slot, bool(kept_TK[token, slot]), 0.0, 0.0, True))
                continue
            weight = float(weights_TK[token, slot])
            error = 0.0 if errors_TK is None else float(errors_TK[token, slot])
            counts = not -error <= weight <= error
            found.append(Slot(token, slot, bool(kept_TK[token, slot]), weight - error, weight + error, counts))
    return found


def follows(counted: Sequence[Slot], capacity: int, policy: Policy) -> bool:
    """Whether the kept are what the policy keeps of the slots that count."""
    kept = [slot for slot in counted if slot.kept]
    if len(kept) != min(len(counted), capacity):
        return False
    if policy == "any":
        return True
    if policy == "weight":  # some line that no kept weight need lie below, and no dropped one above
        lines = [slot.low for slot in counted] + [slot.high for slot in counted]
        return not counted or any(
            all(slot.high >= line if slot.kept else slot.low <= line for slot in counted) for line in lines
        )
    queue = sorted(counted, key=lambda slot: (0 if policy == "position" else slot.slot, slot.token))
    return all(slot.kept for slot in queue[:capacity])


def legal_drop(
    kept_TK: Bools,
    ids_TK: Ints,
    experts: int,
    *,
    capacity: int,
    policy: Policy,
    weights_TK: Floats | None = None,
    errors_TK: Floats | None = None,
) -> list[bool]:
    """Whether each expert may keep just these: try every set of doubtful dropped slots as having chosen."""
    check_drop(kept_TK, ids_TK, experts, capacity, policy, weights_TK, errors_TK)
    verdicts = []
    for expert in range(experts):
        slots = slots_of(expert, kept_TK, ids_TK, weights_TK, errors_TK)
        sure = [slot for slot in slots if slot.kept or slot.counts]
        doubtful = [slot for slot in slots if not (slot.kept or slot.counts)]
        readings = [extra for size in range(len(doubtful) + 1) for extra in combinations(doubtful, size)]
        verdicts.append(any(follows([*sure, *extra], capacity, policy) for extra in readings))
    return verdicts


def check_drop(
    kept_TK: Bools,
    ids_TK: Ints,
    experts: int,
    capacity: int,
    policy: str,
    weights_TK: Floats | None,
    errors_TK: Floats | None,
) -> None:
    """Refuse what is no drop of a routing."""
    for array in (kept_TK, weights_TK, errors_TK):
        if array is not None and array.shape != ids_TK.shape:
            raise ValueError(f"shapes {array.shape} and {ids_TK.shape}")
    loads(ids_TK, experts)
    if capacity < 0 or policy not in ("any", "weight", "position", "choice"):
        raise ValueError(f"capacity {capacity}, policy {policy}")
    if weights_TK is None and (policy == "weight" or errors_TK is not None):
        raise ValueError("no weights")
    for token in range(ids_TK.shape[0]):
        seen: list[int] = []
        for slot in range(ids_TK.shape[1]):
            expert = int(ids_TK[token, slot])
            if expert in seen:
                raise ValueError(f"token {token} chose expert {expert} twice")
            seen += [expert] if expert >= 0 else []
            if kept_TK[token, slot] and expert < 0:
                raise ValueError(f"token {token} keeps an empty slot")
            if weights_TK is not None and expert >= 0 and math.isnan(weights_TK[token, slot]):
                raise ValueError(f"token {token} has a weight of NaN")
            if errors_TK is not None and expert >= 0 and not errors_TK[token, slot] >= 0.0:
                raise ValueError(f"error {errors_TK[token, slot]}")


def legal_drops_by_rank(
    kept_by_rank: Sequence[Bools],
    ids_by_rank: Sequence[Ints],
    experts: int,
    *,
    factor: float,
    minimum: int = 0,
    policy: Policy,
    tokens_by_rank: Sequence[int] | None = None,
    weights_by_rank: Sequence[Floats] | None = None,
    errors_by_rank: Sequence[Floats] | None = None,
    rounding: str = "up",
) -> list[bool]:
    """Whether each rank, by itself, used one legal capacity for all its experts."""
    verdicts = []
    for rank, (kept_TK, ids_TK) in enumerate(zip(kept_by_rank, ids_by_rank, strict=True)):
        tokens = len(ids_TK) if tokens_by_rank is None else tokens_by_rank[rank]
        legal = False
        sizes = (tokens, ids_TK.shape[1], experts)
        for capacity in capacities(*sizes, factor=factor, minimum=minimum, rounding=rounding):
            by_expert = legal_drop(
                kept_TK,
                ids_TK,
                experts,
                capacity=capacity,
                policy=policy,
                weights_TK=None if weights_by_rank is None else weights_by_rank[rank],
                errors_TK=None if errors_by_rank is None else errors_by_rank[rank],
            )
            legal = legal or all(by_expert)
        verdicts.append(legal)
    return verdicts


def keep(ids_TK: Ints, experts: int, *, capacity: int, policy: Policy, weights_TK: Floats | None = None) -> Bools:
    """Hand out each expert's places one after the other, to the best slot that is left."""
    kept_TK = np.zeros(ids_TK.shape, dtype=np.bool_)
    check_drop(kept_TK, ids_TK, experts, capacity, policy, weights_TK, None)
    if policy == "any":
        raise ValueError("any drop is legal at random")
    for expert in range(experts):
        left = slots_of(expert, kept_TK, ids_TK, weights_TK, None)
        for _ in range(capacity):
            if not left:
                break
            best = left[0]  # slots come by token
            for slot in left:
                heavier = policy == "weight" and slot.low > best.low
                earlier = policy == "choice" and slot.slot < best.slot
                if heavier or earlier:
                    best = slot
            kept_TK[best.token, best.slot] = True
            left.remove(best)
    return kept_TK


def after_drop(
    ids_TK: Ints, weights_TK: Floats, kept_TK: Bools, *, renormalise: bool = False, scale: float = 1.0
) -> tuple[Ints, Floats]:
    """Ids and weights that the layer works with: -1 and 0 where dropped."""
    if not ids_TK.shape == weights_TK.shape == kept_TK.shape or (scale != 1.0 and not renormalise):
        raise ValueError("shapes differ, or the scale is in the weights already")
    new_ids_TK, new_weights_TK = np.full(ids_TK.shape, -1), np.zeros(ids_TK.shape)
    for token in range(ids_TK.shape[0]):
        slots = [slot for slot in range(ids_TK.shape[1]) if kept_TK[token, slot]]
        total = math.fsum(float(weights_TK[token, slot]) for slot in slots)
        for slot in slots:
            if ids_TK[token, slot] < 0:
                raise ValueError(f"token {token} keeps an empty slot")
            new_ids_TK[token, slot] = ids_TK[token, slot]
            weight = float(weights_TK[token, slot])
            if renormalise:
                weight = scale * (weight / total) if total != 0.0 else 0.0
            new_weights_TK[token, slot] = weight
    return new_ids_TK, new_weights_TK


def after_drop_backward(
    weights_TK: Floats, kept_TK: Bools, upstream_TK: Floats, *, renormalise: bool = False, scale: float = 1.0
) -> Floats:
    """Gradient of the weights before the drop, for an upstream gradient of those after it."""
    d_weights_TK = np.zeros(weights_TK.shape)
    for token in range(weights_TK.shape[0]):
        slots = [slot for slot in range(weights_TK.shape[1]) if kept_TK[token, slot]]
        total = math.fsum(float(weights_TK[token, slot]) for slot in slots)
        if renormalise and total == 0.0:
            continue
        mean = 0.0
        for slot in slots:
            mean += upstream_TK[token, slot] * (weights_TK[token, slot] / total) if renormalise else 0.0
        for slot in slots:
            d = float(upstream_TK[token, slot])
            d_weights_TK[token, slot] = scale * (d - mean) / total if renormalise else d
    return d_weights_TK
