"""VO-02: the load balancing loss mixes the layers of a model. Exits 1 while the finding is there."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch

# The packages are entered without what they import first, models of one version of transformers.
ROOT = importlib.util.find_spec("veomni").submodule_search_locations[0]


def package(name: str) -> None:
    """Enter a package without its __init__."""
    sys.modules[name] = found = ModuleType(name)
    found.__path__ = [ROOT + name.removeprefix("veomni").replace(".", "/")]


for name in ("veomni", "veomni.ops", "veomni.ops.kernels", "veomni.ops.kernels.load_balancing_loss"):
    package(name)
T, E = 8, 2


def loss(*experts: int) -> float:
    """Return the loss of layers that each send all tokens to one expert."""
    from veomni.ops.kernels.load_balancing_loss.eager import load_balancing_loss_pytorch

    logits = tuple(torch.eye(E)[torch.full((T,), expert)] * 100 for expert in experts)
    return float(load_balancing_loss_pytorch(logits, E, 1))


found = loss(0), loss(1), loss(0, 1)
print("observed: two layers with losses of {:.2f} and {:.2f} have together a loss of {:.2f}".format(*found))
print("expected: two layers with losses of 2.00 and 2.00 have together a loss of 4.00, or of 2.00 as their mean")
sys.exit(int(abs(found[2] - found[0]) > 1e-3 and abs(found[2] - 2 * found[0]) > 1e-3))
