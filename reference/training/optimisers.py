"""Optimisers, element by element: AdamW and SGD with momentum.

Sources: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2; Kingma and Ba 2015; PyTorch
documentation of torch.optim.AdamW and torch.optim.SGD (where momentum and epsilon enter).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Kept = Mapping[str, Tensor]
"""What an optimiser keeps of a parameter between steps: "first" and "second" moment, or "momentum"; at first zeros."""


@dataclass(frozen=True)
class AdamW:
    """AdamW with the decay decoupled from the gradient.

    Rule, in step t = 1, 2, ...:

        theta <- theta - rate decay theta
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        theta <- theta - rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

    Degenerate: a gradient of 0 still decays theta and both moments, and moves theta by what m has kept; with moments of
    0 theta decays only.
    """

    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    decay: float = 0.0

    def update(self, theta: Tensor, g: Tensor, kept: Kept, t: int) -> tuple[Tensor, Kept]:
        """Return theta and what is kept after step t, from those before it.

        Source: Loshchilov and Hutter 2019, algorithm 2.

        >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        >>> before = {"first": zero, "second": zero}
        >>> theta, kept = AdamW(0.5, (0.0, 0.75), 0.0, 0.5).update(4 * one, -3 * one, before, 1)
        >>> theta.item(), kept["first"].item(), kept["second"].item()  # 4 (1 - 0.25) + 0.5 sign(3)
        (3.5, -3.0, 2.25)
        """
        beta1, beta2 = self.betas
        m = beta1 * kept["first"] + (1 - beta1) * g
        v = beta2 * kept["second"] + (1 - beta2) * g.square()
        direction = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + self.epsilon)
        return theta - self.rate * self.decay * theta - self.rate * direction, {"first": m, "second": v}

    def nothing_kept(self, theta: Tensor) -> Kept:
        """Return what is kept before the first step."""
        zeros = torch.zeros_like(theta, dtype=torch.float64)
        return {"first": zeros, "second": zeros}


@dataclass(frozen=True)
class SGD:
    """SGD with momentum, the decay added to the gradient (L2 regularisation), as torch.optim.SGD has it.

    Rule: b <- momentum b + (g + decay theta); theta <- theta - rate b.

    Degenerate: b is 0 at first, so that after the first step it is g + decay theta. A gradient of 0: b keeps on moving
    theta.
    """

    rate: float
    momentum: float = 0.0
    decay: float = 0.0

    def update(self, theta: Tensor, g: Tensor, kept: Kept, t: int) -> tuple[Tensor, Kept]:
        """Return theta and what is kept after a step, from those before it.

        Source: PyTorch documentation of torch.optim.SGD.

        >>> one = torch.ones(1, dtype=torch.float64)
        >>> theta, kept = SGD(0.5, 0.25, 2.0).update(one, 3 * one, {"momentum": 4 * one}, 2)
        >>> theta.item(), kept["momentum"].item()
        (-2.0, 6.0)
        """
        b = self.momentum * kept["momentum"] + g + self.decay * theta
        return theta - self.rate * b, {"momentum": b}

    def nothing_kept(self, theta: Tensor) -> Kept:
        """Return what is kept before the first step."""
        return {"momentum": torch.zeros_like(theta, dtype=torch.float64)}


Optimiser = AdamW | SGD
