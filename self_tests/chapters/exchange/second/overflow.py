"""Whether an output can overflow, by hand: every magnitude on its way, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.exchange.second.layer import Applied, Floats, Tokens
from self_tests.chapters.experts.second import SwiGLU, sigmoid


def reached(tokens: Tokens, experts: Sequence[SwiGLU], applied: Applied) -> Floats:
    """The largest magnitude that can come up on the way to each output (T, D)."""
    T, D = tokens.x_TD.shape
    found = np.zeros((T, D))
    for t in range(T):
        for k, e in enumerate(tokens.ids_TK[t]):
            if e < 0:
                continue
            weight = float(tokens.weights_TK[t, k])
            row = tokens.x_TD[t] * weight if applied == "input" else tokens.x_TD[t]
            largest, hidden = 0.0, []
            for gate, up in zip(experts[e].gate_FD, experts[e].up_FD, strict=True):
                a = sum(float(g) * float(x) for g, x in zip(gate, row, strict=True))
                b = sum(float(u) * float(x) for u, x in zip(up, row, strict=True))
                hidden.append(abs(a * sigmoid(a) * b))
                largest = max(largest, hidden[-1])
                largest = max(largest, sum(abs(float(g) * float(x)) for g, x in zip(gate, row, strict=True)))
                largest = max(largest, sum(abs(float(u) * float(x)) for u, x in zip(up, row, strict=True)))
            for d in range(D):
                own = sum(abs(float(down)) * h for down, h in zip(experts[e].down_DF[d], hidden, strict=True))
                scale = max(abs(weight), 1.0) if applied == "output" else 1.0
                found[t, d] += scale * max(own, largest)
    return found


def must_be_finite(
    tokens: Tokens, experts: Sequence[SwiGLU], applied: Applied, largest: float, digits: int, addends: int
) -> NDArray[np.bool_]:
    """Where even the sum of all magnitudes, grown by a half unit in every step, is a number of the dtype."""
    grown = reached(tokens, experts, applied)
    for _ in range(addends):
        grown = grown * (1 + 2.0**-digits)
    return grown <= largest
