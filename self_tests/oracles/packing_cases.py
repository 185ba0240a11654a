"""What both oracles of packing are asked about: one rank's tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import layer
from .agreement import assert_close, floats
from .experts import SwiGLU

Floats = NDArray[np.float64]

K, E, F, D = 2, 4, 3, 5


class Rank(NamedTuple):
    """Tokens of one rank, the experts, and the gradient that comes back."""

    tokens: layer.Tokens
    experts: list[SwiGLU]
    dy_TD: Floats

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, dict[tuple[str, int], Tensor]]:
        """The same as leaves of the first oracle: x, ids, weights, parameters."""
        named = {
            (name, e): floats(matrix, leaf=True)
            for e, expert in enumerate(self.experts)
            for name, matrix in zip(("gate", "up", "down"), expert, strict=True)
        }
        x_TD, ids_TK, weights_TK = self.tokens
        return floats(x_TD, leaf=True), torch.from_numpy(ids_TK), floats(weights_TK, leaf=True), named


def rank_of(T: int, seed: int) -> Rank:
    """T tokens whose slots may be empty or name an expert twice; expert 3 gets nothing."""
    random = np.random.default_rng(seed)
    made = [SwiGLU(*(random.normal(size=size) for size in [(F, D), (F, D), (D, F)])) for _ in range(E)]
    ids_TK = random.integers(-1, E - 1, size=(T, K))
    return Rank(
        layer.Tokens(random.normal(size=(T, D)), ids_TK, random.normal(size=(T, K))), made, random.normal(size=(T, D))
    )


def assert_gradients(rank: Rank, leaves: Sequence[Tensor], back: tuple[Floats, Floats, list[SwiGLU]]) -> None:
    """What autograd left on the first oracle's leaves is what the longhand derived."""
    dx_TD, dweights_TK, d_experts = back
    expected = [dx_TD, dweights_TK, *(matrix for expert in d_experts for matrix in expert)]
    for value, leaf in zip(expected, leaves, strict=True):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert_close(value, grad.reshape(value.shape))
