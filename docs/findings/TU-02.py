"""TU-02: a rank without tokens raises, and the other ranks wait. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from tutel import moe


def made(loss: bool, factor: float) -> str:
    """Route no tokens, as a layer does, with its loss or without one."""
    scores_TE = torch.ones(0, 4)
    try:
        moe.top_k_routing(scores_TE, 2, capacity_factor=factor, **({} if loss else {"loss_fn": None}))
    except (IndexError, ZeroDivisionError) as error:
        return f"raises {type(error).__name__}"
    return "returns"


found = [made(loss=True, factor=0.0), made(loss=False, factor=0.0)]
print(f"observed: the routing of no tokens {found[0]} with the loss, {found[1]} without it")
print("expected: the routing of no tokens returns with the loss, returns without it")
sys.exit(int(found != ["returns", "returns"]))
