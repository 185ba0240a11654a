"""The layer that several chapters hand rows to: four SwiGLU experts, of which the last gets nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from goldens.values import leaf, real
from reference.experts import Expert, swiglu_experts

K, E, D, F = 2, 4, 3, 5
NAMES = ("gate", "up", "down")


def draw_experts(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the parameters as inputs of the case `experts`."""
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    return {f"experts/in/{name}": real(rng, *shape) for name, shape in zip(NAMES, shapes, strict=True)}


def draw_tokens(rng: np.random.Generator, case: str, T: int) -> dict[str, Tensor]:
    """Return the inputs of a case: T tokens, slots that are empty or name an expert twice, an upstream gradient."""
    return {
        f"{case}/in/ids_TK": torch.from_numpy(rng.integers(-1, E - 1, size=(T, K))),
        f"{case}/in/x_TD": real(rng, T, D),
        f"{case}/in/weights_TK": real(rng, T, K),
        f"{case}/in/dy_TD": real(rng, T, D),
    }


def expert_leaves(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters by name, to be differentiated by."""
    return {name: leaf(inputs[f"experts/in/{name}"]) for name in NAMES}


def experts_of(leaves: Mapping[str, Tensor]) -> Expert:
    """Return the experts that have these parameters."""
    return swiglu_experts({(name, e): leaves[name][e] for name in NAMES for e in range(E)})
