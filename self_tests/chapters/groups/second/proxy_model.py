"""The second oracle of whole layers and of the proxy model: token by token, in NumPy, forward only.

Gradients are held against it by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Parameters = Mapping[tuple[str, int | None], Array]


def layer(
    x_TD: Array,
    p: Parameters,
    top_k: int,
    score: str,
    normalise: bool,
    scale: float,
    dropped: Collection[tuple[int, int]] = (),
) -> Array:
    """Every token by itself: score all experts, keep the best, add up what they and the shared ones say.

    What the k-th best of token t says is left out where (t, k) was dropped.
    """
    rows = []
    for t, x in enumerate(x_TD):
        logits = [float(row @ x) for row in p["router", None]]
        if score == "softmax":
            exponentials = [math.exp(logit) for logit in logits]
            values = [each / sum(exponentials) for each in exponentials]
        else:
            values = [1 / (1 + math.exp(-logit)) for logit in logits]
        chosen = sorted(range(len(values)), key=lambda e: -values[e])[:top_k]
        kept = [values[e] for e in chosen]
        if normalise:
            kept = [each / sum(kept) for each in kept]
        y = np.zeros_like(x)
        for k, (e, weight) in enumerate(zip(chosen, kept, strict=True)):
            if (t, k) in dropped:
                continue
            y += scale * weight * swiglu(x, p["gate", e], p["up", e], p["down", e])
        shared, j = np.zeros_like(x), 0
        while ("shared_gate", j) in p:
            shared += swiglu(x, p["shared_gate", j], p["shared_up", j], p["shared_down", j])
            shared += p.get(("shared_bias", j), 0.0)
            j += 1
        if ("shared_score", None) in p:
            shared /= 1 + math.exp(-float(p["shared_score", None][0] @ x))
        rows.append(y + shared)
    return np.stack(rows)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """One expert's answer to one token, hidden unit by hidden unit."""
    answer = np.zeros(len(down))
    for unit in range(len(gate)):
        z = float(gate[unit] @ x)
        answer += down[:, unit] * (z / (1 + math.exp(-z))) * float(up[unit] @ x)
    return answer


def model(x_SD: Array, blocks: list[Parameters], top_k: int, score: str) -> Array:
    """Every block after the other on one sequence; the mean of a token is added up anew from the first."""
    h_SD = x_SD
    for p in blocks:
        mixed = []
        for t in range(len(h_SD)):
            mean = sum(h_SD[s] for s in range(t + 1)) / (t + 1)
            mixed.append(h_SD[t] + p["mix_out", None] @ np.tanh(p["mix_in", None] @ mean))
        h_SD = np.stack(mixed)
        h_SD = h_SD + layer(h_SD, p, top_k, score, False, 1.0)
    return h_SD
