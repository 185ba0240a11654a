"""The layer that several chapters hand rows to: four SwiGLU experts, of which the last gets nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import given, named
from moe_conformance.goldens.gradients import leaf
from moe_conformance.reference.experts import Expert, swiglu_experts

K, E, D, F = 2, 4, 3, 5
NAMES = ("gate", "up", "down")


def draw_experts(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the parameters as inputs of the case `experts`."""
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    return named("experts", "in", {name: rng.standard_normal(shape) for name, shape in zip(NAMES, shapes, strict=True)})


def draw_tokens(rng: np.random.Generator, case: str, T: int) -> dict[str, Tensor]:
    """Return the inputs of a case: T tokens, slots that are empty or name an expert twice, an upstream gradient."""
    values = {"ids_TK": rng.integers(-1, E - 1, size=(T, K)), "x_TD": rng.standard_normal((T, D))}
    values |= {"weights_TK": rng.standard_normal((T, K)), "dy_TD": rng.standard_normal((T, D))}
    return named(case, "in", values)


def expert_leaves(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters by name, to be differentiated by."""
    return {name: leaf(value) for name, value in given(inputs, "experts").items()}


def experts_of(leaves: Mapping[str, Tensor]) -> Expert:
    """Return the experts that have these parameters."""
    return swiglu_experts({(name, e): leaves[name][e] for name in NAMES for e in range(E)})
