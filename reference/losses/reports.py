"""Reports of losses: what trains the model, what is shown of it, and which forwards count.

Sources: Switch Transformer section 2.2 (the loss is per layer); arithmetic: a metric is the value on the
concatenated batch, and a forward that runs twice is one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

ForwardKind = Literal["training", "recomputed", "evaluation", "no_grad"]


def model_loss(losses_by_layer: Sequence[Tensor | None]) -> Tensor:
    """Sum the losses of the layers, each () or None for a layer without router, -> ().

    Rule (LOSS-18): every layer is charged for its own tokens, and the charges add; f and P meet within a layer.

    Decides: LOSS-18. Source: Switch Transformer section 2.2.

    >>> model_loss([torch.tensor(1.5), None, torch.tensor(2.0)]).item()
    3.5
    """
    return sum((loss.double() for loss in losses_by_layer if loss is not None), torch.zeros((), dtype=torch.float64))


def reported(losses_by_layer: Sequence[Tensor | None], *, coefficient: float | None = None) -> Tensor:
    """Average the losses of a step for a report, each layer (M, dp) or None for one without router, -> ().

    Rule (LOSS-19): (1 / (M dp Y)) sum over m, d and y, Y the layers that have a router; divided by the
    `coefficient` if one is given. The value of one layer is that of a list of this layer alone. A global loss
    is one for all groups: (M, 1).

    Degenerate: M = 0, straight after another report, gives 0. No layer with a router leaves nothing to report,
    and a coefficient of 0 cannot be divided out: both are errors.

    Decides: LOSS-19. Source: arithmetic.

    >>> layers = [torch.tensor([[1.0, 3.0]]), None, torch.tensor([[5.0, 7.0]])]
    >>> reported(layers).item(), reported(layers, coefficient=0.5).item(), reported(layers[:1]).item()
    (4.0, 8.0, 2.0)
    """
    values = [loss.double() for loss in losses_by_layer if loss is not None]
    shapes = {tuple(loss.shape) for loss in values}
    if len(shapes) != 1 or any(len(shape) != 2 or shape[1] == 0 for shape in shapes):
        raise ValueError(f"losses of layers with a router have shapes {sorted(shapes)}; give (M, dp), one for all")
    if coefficient == 0:
        raise ValueError("a coefficient of 0 cannot be divided out; report the loss with it")
    stacked_YMd = torch.stack(values)  # (Y, M, dp)
    mean = stacked_YMd.sum() / max(stacked_YMd.numel(), 1)
    return mean if coefficient is None else mean / coefficient


def training_forwards(kinds: Sequence[ForwardKind]) -> tuple[int, ...]:
    """Return which forwards, in order of time, losses and counters take in, as places in that order.

    Rule (LOSS-15, LOSS-16): those of training, each once. A "recomputed" forward is a second run of one
    of them; "evaluation" and "no_grad" leave no trace.

    Decides: LOSS-15, LOSS-16. Source: arithmetic: a forward that runs twice is one forward.

    >>> training_forwards(["evaluation", "training", "recomputed", "no_grad", "training"])
    (1, 4)
    """
    counting: list[int] = []
    for place, kind in enumerate(kinds):
        if kind not in ("training", "recomputed", "evaluation", "no_grad"):
            raise ValueError(f"forward {place} is of kind {kind!r}, which is none of {ForwardKind}")
        if kind == "recomputed" and not counting:
            raise ValueError(f"forward {place} recomputes, but no training forward came before it")
        if kind == "training":
            counting.append(place)
    return tuple(counting)
