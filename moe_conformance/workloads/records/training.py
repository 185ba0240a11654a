"""The inputs of one step of the routers of a model, on one rank: records of CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Mode = Literal["training", "evaluation", "no_grad"]
# A change of the last record before a replay; "" for none.
Change = Literal["", "a layer is missing", "a microbatch is missing", "a token is missing", "a slot is missing"]


@dataclass(frozen=True)
class RouterBatch:
    """One microbatch of all routers, by layer: S positions of B sequences, upstream gradients, and the padding."""

    x: tuple[Tensor, ...]  # (S, B, D)
    upstream: tuple[Tensor, ...]  # of the routing weights of all experts, (S * B, E)
    padding_T: Tensor | None  # bool, True = padding; T = S * B, position-major
    mode: Mode = "training"  # no_grad: in training, but no gradient is recorded
