"""What becomes of a loss, by hand: put together from ranks, attached, averaged, added over layers, reported.

M microbatches, dp data parallel groups, Y layers with a router; a table [m][d] holds one entry for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.losses.second.balance import Loss
from self_tests.chapters.routing.second.routes import Gate, gradient

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Entry = TypeVar("Entry")


def put_together(parts: Sequence[NDArray[np.generic]], places: Sequence[Ints]) -> list[list[object]]:
    """Rows of a microbatch in order of place, from ranks that hold some of them, perhaps several the same."""
    if not parts or len(parts) != len(places):
        raise ValueError(f"{len(parts)} parts with {len(places)} lists of places")
    rows: dict[int, list[object]] = {}
    for part, place in zip(parts, places, strict=True):
        if len(part) != len(place):
            raise ValueError(f"{len(part)} rows with {len(place)} places")
        for row, at in zip(part.tolist(), place.tolist(), strict=True):
            if at < 0 or rows.setdefault(at, row) != row:
                raise ValueError(f"place {at} is negative or its copies differ")
    for at in range(len(rows)):
        if at not in rows:
            raise ValueError(f"nobody holds place {at}")
    return [rows[at] for at in range(len(rows))]


def attached(
    logits_TE: Floats, ids_TK: Ints, gate: Gate, upstream_TK: Floats, losses: Sequence[Loss], scale: float
) -> Floats:
    """Gradient of the logits: what comes back through the weights, plus `scale` times that of every loss."""
    result_TE = gradient(logits_TE, ids_TK, gate, upstream_TK)
    for t, e in np.ndindex(*result_TE.shape):
        addends = [result_TE[t, e], *(scale * loss.gradient_TE[t, e] for loss in losses)]
        result_TE[t, e] = math.fsum(addends)
    return result_TE


def through_router(x_TD: Floats, router_ED: Floats, dlogits_TE: Floats) -> tuple[Floats, Floats]:
    """From l_te = sum_d x_td W_ed: dx_td = sum_e g_te W_ed and dW_ed = sum_t g_te x_td."""
    (T, D), (E, D2) = x_TD.shape, router_ED.shape
    if D != D2 or dlogits_TE.shape != (T, E):
        raise ValueError(f"x {x_TD.shape}, router {router_ED.shape}, gradient {dlogits_TE.shape}")
    dx_TD, drouter_ED = np.zeros((T, D)), np.zeros((E, D))
    for t in range(T):
        for e in range(E):
            for d in range(D):
                dx_TD[t, d] += dlogits_TE[t, e] * router_ED[e, d]
                drouter_ED[e, d] += dlogits_TE[t, e] * x_TD[t, d]
    return dx_TD, drouter_ED


def entries(table: Sequence[Sequence[Entry]]) -> list[Entry]:
    """All entries of a table that is rectangular and not empty."""
    flat = [entry for row in table for entry in row]
    if not flat or len({len(row) for row in table}) != 1:
        raise ValueError(f"rows of {[len(row) for row in table]} entries")
    return flat


def weighed_sum(gradients: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Sum of weight times gradient, one element at a time."""
    if len({gradient.shape for gradient in gradients}) != 1:
        raise ValueError(f"gradients of shapes {[gradient.shape for gradient in gradients]}")
    total = np.zeros(gradients[0].shape, dtype=np.float64)
    for at in np.ndindex(*total.shape):
        total[at] = math.fsum(w * float(g[at]) for w, g in zip(weights, gradients, strict=True))
    return total


def mean(table: Sequence[Sequence[Floats]]) -> Floats:
    """Finished gradient of the mean convention: every pair of microbatch and group weighs 1 / (M dp)."""
    flat = entries(table)
    return weighed_sum(flat, [1.0 / len(flat)] * len(flat))


def scaled_sum(table: Sequence[Sequence[Floats]], scale: float) -> Floats:
    """Finished gradient of the sum convention: every pair weighs the declared scale."""
    flat = entries(table)
    return weighed_sum(flat, [scale] * len(flat))


def by_tokens(table: Sequence[Sequence[Floats]], valid: Sequence[Sequence[int]]) -> Floats:
    """Finished gradient divided by tokens: a pair weighs its part of all valid tokens; of none, zero."""
    flat, V = entries(table), entries(valid)
    if [len(row) for row in table] != [len(row) for row in valid] or min(V) < 0:
        raise ValueError(f"token numbers {valid} for a table of {len(table)} rows")
    return weighed_sum(flat, [float(Fraction(n, sum(V))) if sum(V) else 0.0 for n in V])


def of_model(losses_by_layer: Sequence[float | None]) -> float:
    """The sum over the layers that have a router."""
    return math.fsum(loss for loss in losses_by_layer if loss is not None)


def report(losses_by_layer: Sequence[Floats | None], coefficient: float | None = None) -> float:
    """The mean over microbatches, groups and layers with a router; without the coefficient if it is given."""
    tables = [table for table in losses_by_layer if table is not None]
    if not tables or coefficient == 0.0 or len({table.shape for table in tables}) != 1 or tables[0].shape[1] == 0:
        raise ValueError(f"tables of shapes {[table.shape for table in tables]}, coefficient {coefficient}")
    values = [float(value) / (coefficient or 1.0) for table in tables for row in table for value in row]
    return math.fsum(values) / len(values) if values else 0.0


def counted_forwards(kinds: Sequence[str]) -> list[int]:
    """Which forwards enter losses and loads: training ones, each at its first run."""
    counted: list[int] = []
    for i, kind in enumerate(kinds):
        if kind not in ("training", "recomputed", "evaluation", "no_grad"):
            raise ValueError(f"no forward is {kind!r}")
        if kind == "recomputed" and not counted:
            raise ValueError("nothing to recompute yet")
        if kind == "training":
            counted.append(i)
    return counted
