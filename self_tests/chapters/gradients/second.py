"""The norm of a model's gradient and its clipping, by hand: one element after the other, wherever it is held.

    norm_p = (sum |g_i|^p)^(1/p) = m (sum (|g_i| / m)^p)^(1/p), m = max |g_i|, so that no power overflows
    c = min(1, max_norm / (norm + eps)), as a fraction of whole numbers

What is not finite passes through: the norm of an infinite element is infinite, that of a NaN is NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Shard(NamedTuple):
    """What one rank holds of one parameter's gradient: which elements, and their values."""

    parameter: str
    elements_n: Ints
    values_n: Floats


def holders(
    shards_by_rank: Sequence[Sequence[Shard]], sizes: Mapping[str, int]
) -> dict[tuple[str, int], dict[int, float]]:
    """Of every element of the model: which ranks hold it, and what each of them says it is."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for name, size in sizes.items():
        for element in range(size):
            found[name, element] = {}
    for rank, shards in enumerate(shards_by_rank):
        for name, elements_n, values_n in shards:
            if name not in sizes or elements_n.ndim != 1 or elements_n.shape != values_n.shape:
                raise ValueError(f"rank {rank}: {name} with {elements_n.shape} elements, {values_n.shape} values")
            for n in range(len(elements_n)):
                at = (name, int(elements_n[n]))
                if at not in found or rank in found[at]:
                    raise ValueError(f"rank {rank}: element {at} does not exist, or stands twice")
                found[at][rank] = float(values_n[n])
    return found


def alike(one: float, other: float) -> bool:
    """The same number, where NaN is one and both zeros are one."""
    return one == other or (math.isnan(one) and math.isnan(other))


def whole(shards_by_rank: Sequence[Sequence[Shard]], sizes: Mapping[str, int]) -> dict[str, Floats]:
    """Every parameter's gradient, put together; copies of an element must say the same."""
    made = {name: np.zeros(size, dtype=np.float64) for name, size in sizes.items()}
    for (name, element), told in holders(shards_by_rank, sizes).items():
        values = list(told.values())
        if not values or not all(alike(values[0], value) for value in values):
            raise ValueError(f"element {element} of {name}: ranks say {told}")
        made[name][element] = values[0]
    return made


def copies(shards_by_rank: Sequence[Sequence[Shard]], sizes: Mapping[str, int]) -> dict[str, int]:
    """How many ranks hold each parameter; every element of it as many."""
    whole(shards_by_rank, sizes)
    times = dict.fromkeys(sizes, 0)
    for (name, element), told in holders(shards_by_rank, sizes).items():
        if element == 0:
            times[name] = len(told)
        if times[name] != len(told):
            raise ValueError(f"{name}: element {element} is held {len(told)} times, element 0 {times[name]} times")
    return times


def norm(gradients: Mapping[str, Floats], *, p: float = 2.0) -> float:
    """The p-norm of all elements of all parameters together."""
    if not p >= 1.0:
        raise ValueError(f"p = {p} is no norm")
    sizes = [abs(float(value)) for gradient in gradients.values() for value in gradient.flatten()]
    if any(math.isnan(size) for size in sizes):
        return math.nan
    largest = 0.0
    for size in sizes:
        if size > largest:
            largest = size
    if largest in (0.0, math.inf) or math.isinf(p):
        return largest
    return largest * math.fsum((size / largest) ** p for size in sizes) ** (1.0 / p)  # type: ignore[no-any-return]


def legal_norms(claimed_by_rank: Sequence[float], exact: float) -> bool:
    """Whether all ranks claim the same bits, and a number near enough to the exact norm, or none if it is none."""
    if not claimed_by_rank or exact < 0.0:
        raise ValueError(f"{len(claimed_by_rank)} ranks, exact norm {exact}")
    patterns = set()
    for claimed in claimed_by_rank:
        patterns.add(b"NaN" if math.isnan(claimed) else struct.pack("<d", claimed))
    if len(patterns) > 1:
        return False
    claimed = claimed_by_rank[0]
    if not math.isfinite(exact) or not math.isfinite(claimed):
        return not math.isfinite(exact) and not math.isfinite(claimed)
    return abs(Fraction(claimed) - Fraction(exact)) * 2**20 <= Fraction(exact)


def clip_factor(norm: float, max_norm: float, *, eps: float = 0.0) -> float:
    """What every gradient is multiplied by."""
    if not (0.0 <= norm < math.inf) or not max_norm >= 0.0 or not 0.0 <= eps <= 1e-6:
        raise ValueError(f"norm {norm}, max_norm {max_norm}, eps {eps}")
    if norm == 0.0 or math.isinf(max_norm):
        return 1.0
    factor = Fraction(max_norm) / (Fraction(norm) + Fraction(eps))
    return float(factor) if factor < 1 else 1.0


def clipped(gradients: Mapping[str, Floats], max_norm: float, *, eps: float = 0.0, p: float = 2.0) -> dict[str, Floats]:
    """Every element of every parameter times the one factor."""
    factor = clip_factor(norm(gradients, p=p), max_norm, eps=eps)
    made = {}
    for name, gradient in gradients.items():
        made[name] = np.zeros(gradient.shape, dtype=np.float64)
        for at in np.ndindex(*gradient.shape):
            made[name][at] = factor * float(gradient[at])
    return made


def divisor(dp: int, cp: int, convention: str) -> int:
    """Of how many parts of the batch the loss is the mean: their number is counted, part by part."""
    if convention not in {"sum", "mean_over_dp"} or min(dp, cp) < 1:
        raise ValueError(f"dp {dp}, cp {cp}, convention {convention}")
    parts = [(at_dp, at_cp) for at_dp in range(dp) for at_cp in range(cp)]
    return len(parts) if convention != "sum" else 1


def accumulated(parts: Sequence[Fraction], ranks: int, tokens: int, narrow: bool) -> tuple[Fraction, ...]:
    """Of one element: the sum of what microbatches give it, and its largest errors, without and with rounded sums.

    Every addition in float32, also of the ranks' and of the tokens' numbers, errs by 2^-24 of all that is added.
    In bfloat16 each part may be rounded, none of which is larger than the largest, and then the result.
    """
    total, size, largest = Fraction(0), Fraction(0), Fraction(0)
    for part in parts:
        total += part
        size += abs(part)
        largest = max(largest, abs(part))
    without = Fraction(0)
    for _ in range(len(parts) + ranks + tokens):
        without += size / 2**24
    if not narrow:
        return total, without, without
    rounded = Fraction(0)
    for _ in range(len(parts) + 1):
        without += largest / 2**8
        rounded += size / 2**8
    return total, without, rounded + ranks * size / 2**8


def swiglu_along(gate_FD: Floats, up_FD: Floats, down_DF: Floats, x_D: Floats, v_D: Floats) -> list[float]:
    """How fast the answer of a SwiGLU expert changes as its row x moves along v: the product rule, number by number.

    With a = <gate_f, x>, p = <up_f, x> and their changes a' = <gate_f, v>, p' = <up_f, v>: of h = a s p, where
    s = 1 / (1 + exp(-a)) changes by s (1 - s) a', the change is a' s p + a s (1 - s) a' p + a s p'.
    """
    F, D = gate_FD.shape
    changes = []
    for f in range(F):
        a, da = (math.fsum(float(gate_FD[f, d]) * float(row_D[d]) for d in range(D)) for row_D in (x_D, v_D))
        p, dp = (math.fsum(float(up_FD[f, d]) * float(row_D[d]) for d in range(D)) for row_D in (x_D, v_D))
        s = 1.0 / (1.0 + math.exp(-a))
        changes.append(da * s * p + a * s * (1.0 - s) * da * p + a * s * dp)
    return [math.fsum(float(down_DF[d, f]) * changes[f] for f in range(F)) for d in range(D)]


def second_derivatives(
    x_TD: Floats,
    ids_TK: Ints,
    weights_TK: Floats,
    upstream_TD: Floats,
    directions_TD: Floats,
    experts: Sequence[tuple[Floats, Floats, Floats]],
    weights_at: str = "output",
) -> tuple[Floats, Floats | None]:
    """Of s = sum_t <dL/dx_t, v_t>: the derivative by every upstream gradient (T, D), and by every weight (T, K).

    dL/dx_td = sum_k w_tk sum_c u_tc df_c/dx_d, so that u_tc is multiplied in s by sum_k w_tk sum_d df_c/dx_d v_td, the
    change of the weighted answer c along v, and w_tk by sum_c u_tc times the change of the answer c. With weights at
    the input f is taken at w_tk x_t, and s is no longer linear in them: no derivative by weights is given.
    """
    T, D = x_TD.shape
    K = ids_TK.shape[1]
    by_upstream, by_weights = np.zeros((T, D)), np.zeros((T, K))
    for t in range(T):
        for k in range(K):
            if ids_TK[t, k] < 0:
                continue
            w = float(weights_TK[t, k])
            row_D = x_TD[t] * (w if weights_at == "input" else 1.0)
            along_D = swiglu_along(*experts[int(ids_TK[t, k])], row_D, directions_TD[t])
            for c in range(D):
                by_upstream[t, c] += w * along_D[c]
                by_weights[t, k] += along_D[c] * upstream_TD[t, c]
    return by_upstream, by_weights if weights_at == "output" else None
