"""The oracle of the layer, asked for some tokens at a time.

Its dense form takes time and memory in proportion to experts times tokens, while a token needs its own experts only.
For hundreds of ranks or experts that is too much at once. No token's result depends on another token, and the gradients
and magnitudes of parameters are sums over tokens: so the answer is the same in pieces.
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
    """Return what `solve` says of all batches together, having asked it of a few at a time.

    Args:
        batches: Of each rank and microbatch.
        experts: How many there are.
        solve: The oracle, of batches one after the other.
    """
    found = [solve(chunk) for chunk in _chunks(batches, experts)]
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


def cut(batches: Sequence[layer.Batch], experts: int) -> list[layer.Batch]:
    """Cut batches that are too much by themselves into smaller ones, by tokens."""
    return [piece for batch in batches for piece in _pieces(batch, _most(batch, experts))]


def _pieces(batch: layer.Batch, most: int) -> Iterator[layer.Batch]:
    """Yield a batch in pieces of at most so many tokens; one of no tokens as it is."""
    for start in range(0, max(1, len(batch.x_TD)), most):
        rows = slice(start, start + most)
        yield layer.Batch(batch.x_TD[rows], batch.ids_TK[rows], batch.weights_TK[rows], batch.dy_TD[rows])


def _chunks(batches: Sequence[layer.Batch], experts: int) -> Iterator[list[layer.Batch]]:
    """Yield the batches in their order, as many together as are not too much."""
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
    """Return how many tokens are not too much."""
    return max(1, _AT_ONCE // max(1, experts * batch.ids_TK.shape[1] * batch.x_TD.shape[1]))
