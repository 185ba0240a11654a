"""The oracle of the layer, called with some of the tokens at a time to bound time and memory.

The dense form takes time and memory in proportion to experts times tokens, while a token needs its own experts only.
For hundreds of ranks or experts that is too much at once. No token's result depends on another token, and gradients and
magnitudes of parameters are sums over tokens, so the results of chunks can be put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from moe_conformance.reference.exchange import layer
from moe_conformance.reference.exchange.layer import Gradients

_AT_ONCE = 1 << 23  # elements of what all experts return for all slots; the oracle keeps several such tensors


def solve_in_chunks(
    batches: Sequence[layer.Batch], experts: int, solve: Callable[[Sequence[layer.Batch]], Gradients]
) -> Gradients:
    """Return what `solve` returns for all batches together, calling it with a few batches at a time.

    Args:
        batches: One of each rank and microbatch.
        experts: The number of experts E.
        solve: The oracle; it takes the tokens of the batches in their order.
    """
    found = [solve(chunk) for chunk in _chunks(batches, experts)]
    if len(found) == 1:
        return found[0]
    sums = {key: value.clone() for key, value in found[0].parameters.items()}
    for part in found[1:]:
        for key, value in part.parameters.items():
            sums[key] += value
    return Gradients(
        torch.cat([part.y_TD for part in found]),
        torch.cat([part.dx_TD for part in found]),
        torch.cat([part.dweights_TK for part in found]),
        sums,
    )


def cut(batches: Sequence[layer.Batch], experts: int) -> list[layer.Batch]:
    """Split batches that are too large for one call of the oracle into smaller ones."""
    return [piece for batch in batches for piece in _pieces(batch, _most(batch, experts))]


def _pieces(batch: layer.Batch, most: int) -> Iterator[layer.Batch]:
    """Yield a batch in pieces of at most `most` tokens; a batch without tokens as it is."""
    for start in range(0, max(1, len(batch.x_TD)), most):
        rows = slice(start, start + most)
        yield layer.Batch(batch.x_TD[rows], batch.ids_TK[rows], batch.weights_TK[rows], batch.dy_TD[rows])


def _chunks(batches: Sequence[layer.Batch], experts: int) -> Iterator[list[layer.Batch]]:
    """Yield lists of consecutive batches, each as many as fit into one call of the oracle."""
    together: list[layer.Batch] = []
    tokens = 0
    for batch in batches:
        if together and tokens + len(batch.x_TD) > _most(batch, experts):
            yield together
            together, tokens = [], 0
        together.append(batch)
        tokens += len(batch.x_TD)
    yield together


def _most(batch: layer.Batch, experts: int) -> int:
    """Return the largest number of tokens for one call of the oracle."""
    return max(1, _AT_ONCE // max(1, experts * batch.ids_TK.shape[1] * batch.x_TD.shape[1]))
