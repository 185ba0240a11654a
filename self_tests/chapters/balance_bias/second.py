"""The balancing bias by hand: by signs of integers, and by quantiles, read off their two inequalities.

E experts, n_e choices of expert e, u the rate, a any common constant; K slots, V valid tokens of the step:

    signs       b_e <- b_e + u sign(sum_j n_j - E n_e) + a
    quantiles   z_te = s_te - b_e, a_t the (K+1)-th highest of z_t, d_te = s_te - a_t, q = K V / E:
                |{t: d_te > b'_e}| <= ceil(q) and |{t: d_te >= b'_e}| >= floor(q)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

COUNTED = "training"
UNCOUNTED = ("recomputed", "evaluation", "no_grad", "forced")


class Forward(NamedTuple):
    """One forward of a router, what kind it was, and how many choices fell on each expert."""

    kind: str
    loads: list[int]


class Update(NamedTuple):
    """The update at the end of an optimiser step."""


def check_loads(loads: Sequence[int], experts: int) -> None:
    """Loads are one number of choices per expert."""
    if len(loads) != experts or experts == 0 or min(loads) < 0:
        raise ValueError(f"loads {loads} of {experts} experts")


def summed_loads(loads: Sequence[Sequence[int]], routers: Sequence[Sequence[int]]) -> list[list[int]]:
    """What every rank knows after the loads of its router's ranks were added; every rank has one router."""
    found: list[list[int]] = []
    for rank, own in enumerate(loads):
        mates = [part for part in routers for member in part if member == rank]
        if len(mates) != 1:
            raise ValueError(f"rank {rank} trains {len(mates)} routers")
        total = [0] * len(own)
        for mate in mates[0]:
            if not 0 <= mate < len(loads):
                raise ValueError(f"there is no rank {mate}")
            check_loads(loads[mate], len(own))
            for e, n in enumerate(loads[mate]):
                total[e] += n
        found.append(total)
    for part in routers:
        if any(not 0 <= member < len(loads) for member in part):
            raise ValueError(f"router of ranks {part}, but there are {len(loads)}")
    return found


def moved(bias: Sequence[float], loads: Sequence[int], rate: float, *, centred: bool = False) -> list[float]:
    """One update: up by the rate below the mean load, down above it; centred, the changes add up to zero."""
    if rate < 0.0 or not math.isfinite(rate):
        raise ValueError(f"rate {rate}")
    check_loads(loads, len(bias))
    mean_load = Fraction(sum(loads), len(loads))
    changes = []
    for n in loads:
        direction = 1 if n < mean_load else -1 if n > mean_load else 0
        changes.append(Fraction(rate) * direction)
    common = sum(changes, Fraction(0)) / len(changes) if centred else Fraction(0)
    return [float(Fraction(b) + change - common) for b, change in zip(bias, changes, strict=True)]


def less_their_mean(bias: Sequence[float]) -> list[float]:
    """Biases less their mean, worked out exactly: what is left when a common constant does not matter."""
    mean = sum((Fraction(b) for b in bias), Fraction(0)) / len(bias)
    return [float(Fraction(b) - mean) for b in bias]


def after(
    bias: Sequence[float], events: Sequence[Forward | Update], rate: float, *, centred: bool = False
) -> tuple[list[float], list[int]]:
    """Bias and counters of one router after these events, each counted by what happened since the last update."""
    now, since = list(bias), [0] * len(bias)
    for event in events:
        if isinstance(event, Update):
            now, since = moved(now, since, rate, centred=centred), [0] * len(bias)
            continue
        check_loads(event.loads, len(bias))
        if event.kind == COUNTED:
            since = [n + more for n, more in zip(since, event.loads, strict=True)]
        elif event.kind not in UNCOUNTED:
            raise ValueError(f"no forward is {event.kind!r}")
    return now, since


def grown(rate: float, updates: int) -> tuple[float, float]:
    """How far apart an expert below and one above the mean move, and how far float32 may miss that.

    Each of the two biases is rounded once per update, by at most 2^-24 of how far apart they end.
    """
    apart = 0.0
    for _ in range(updates):
        apart += 2.0 * rate
    return apart, 2 * updates * apart / 2**24


def cutoff(scores: Sequence[float], bias: Sequence[float], slots: int) -> float:
    """The best value that a token did not choose: take the highest away, K times, and look."""
    if not 1 <= slots < len(scores) or len(bias) != len(scores):
        raise ValueError(f"{slots} slots, {len(scores)} scores and {len(bias)} biases")
    if not all(math.isfinite(value) for value in (*scores, *bias)):
        raise ValueError(f"scores {scores}, biases {bias}")
    left = [score - b for score, b in zip(scores, bias, strict=True)]
    for _ in range(slots):
        left.remove(max(left))
    return max(left)


def valid_rows(parts: Sequence[Floats], padding: Sequence[Bools | None] | None, experts: int) -> list[list[float]]:
    """Scores of all tokens of the step that are not padding."""
    masks = [None] * len(parts) if padding is None else list(padding)
    if len(masks) != len(parts):
        raise ValueError(f"{len(masks)} masks for {len(parts)} parts")
    rows: list[list[float]] = []
    for scores_TE, mask_T in zip(parts, masks, strict=True):
        T, E = scores_TE.shape
        if E != experts or (mask_T is not None and (mask_T.dtype != np.bool_ or mask_T.shape != (T,))):
            raise ValueError(f"scores of {T} tokens for {E} experts, biases of {experts}")
        rows += [scores_TE[t].tolist() for t in range(T) if mask_T is None or not mask_T[t]]
    if not all(math.isfinite(score) for row in rows for score in row):
        raise ValueError("a score is not finite")
    return rows


def legal_range(
    parts: Sequence[Floats],
    bias: Sequence[float],
    slots: int,
    padding: Sequence[Bools | None] | None = None,
    memory: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Least and greatest legal new bias of every expert, before a common constant.

    The least value that at most ceil(q) tokens exceed is one of the d, or -inf; the greatest value that at
    least floor(q) tokens reach is one of the d, or +inf.
    """
    E = len(bias)
    if not 0.0 <= memory < 1.0 or not 1 <= slots <= E or not all(math.isfinite(b) for b in bias):
        raise ValueError(f"memory {memory}, {slots} slots, biases {bias}")
    rows = valid_rows(parts, padding, E)
    if slots == E or not rows:
        return list(bias), list(bias)
    q = Fraction(slots * len(rows), E)
    cutoffs = [cutoff(row, bias, slots) for row in rows]
    low, high = [], []
    for e in range(E):
        d = [row[e] - a for row, a in zip(rows, cutoffs, strict=True)]
        least = min(v for v in [-math.inf, *d] if sum(x > v for x in d) <= math.ceil(q))
        greatest = max(v for v in [*d, math.inf] if sum(x >= v for x in d) >= math.floor(q))
        low.append(memory * bias[e] + (1.0 - memory) * least)
        high.append(memory * bias[e] + (1.0 - memory) * greatest)
    return low, high


def missed(bias: Sequence[float], low: Sequence[float], high: Sequence[float]) -> float:
    """How far outside its range the worst bias lies at best, if all may be moved by one constant.

    An expert i that is too low and another j that is too high are drawn together by a shift that halves it.
    """
    if not len(bias) == len(low) == len(high) or not all(math.isfinite(b) for b in bias):
        raise ValueError(f"biases {bias}, ranges from {low} to {high}")
    if any(bottom > top for bottom, top in zip(low, high, strict=True)):
        raise ValueError(f"ranges from {low} to {high}")
    worst = 0.0
    for i in range(len(bias)):
        for j in range(len(bias)):
            worst = max(worst, ((low[i] - bias[i]) + (bias[j] - high[j])) / 2.0)
    return worst
