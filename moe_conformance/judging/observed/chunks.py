"""The oracle of the layer, asked for some batches at a time.

Its dense form takes time and memory in proportion to experts times tokens, while a token needs its own experts only.
For hundreds of ranks that is too much at once. No token's result depends on another token, and the gradients and
magnitudes of parameters are sums over tokens: so the answer is the same in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_conformance.reference.exchange import layer
from moe_conformance.reference.exchange.layer import Gradients

_AT_ONCE = 16  # batches of one rank and microbatch


def solve_in_chunks(batches: Sequence[layer.Batch], solve: Callable[[Sequence[layer.Batch]], Gradients]) -> Gradients:
    """Return what `solve` says of all batches together, having asked it of a few at a time."""
    chunks = [batches[start : start + _AT_ONCE] for start in range(0, len(batches), _AT_ONCE)]
    found = [solve(chunk) for chunk in chunks]
    if len(found) == 1:
        return found[0]
    sums = {key: value.clone() for key, value in found[0].parameters.items()}
    for each in found[1:]:
        for key, value in each.parameters.items():
            sums[key] += value
    return Gradients(
        torch.cat([each.y_TD for each in found]),
        torch.cat([each.dx_TD for each in found]),
        torch.cat([each.dweights_TK for each in found]),
        sums,
    )
