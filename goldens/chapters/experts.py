"""Golden of the layer with SwiGLU experts: output and every gradient, with weights at the output and at the input.

Runs on ranks are judged by them too (workloads/corpus/exchange/golden.py): the sizes are those of the corpus, the
tokens divide among 1, 2, 3, 4, 6 or 8 ranks, and every input is a float32 number, so that it is the same to a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, named
from moe_conformance.reference import experts
from moe_conformance.reference.exchange import layer

_T, _K, _E, _D, _F = 24, 3, 8, 32, 16
_PLACES: tuple[Literal["output", "input"], ...] = ("output", "input")
_NAMES = ("gate", "up", "down")


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return tokens, a routing that leaves slots and one expert empty, upstream gradients and parameters."""
    ids_TK = np.stack([rng.permutation(_E - 1)[:_K] for _ in range(_T)])  # the last expert gets nothing
    ids_TK[rng.random((_T, _K)) < 0.2] = -1
    found = {
        "layer/in/ids_TK": torch.from_numpy(ids_TK),
        "layer/in/x_TD": _single(rng.standard_normal((_T, _D))),
        "layer/in/weights_TK": _single(1 / 16 + 15 / 16 * rng.random((_T, _K))),
        "layer/in/dy_TD": _single(rng.standard_normal((_T, _D))),
    }
    for name, shape in zip(_NAMES, ((_E, _F, _D), (_E, _F, _D), (_E, _D, _F)), strict=True):
        found[f"layer/in/{name}"] = _single(rng.standard_normal(shape) / shape[2] ** 0.5)
    return found


def _single(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Tensor:
    return torch.from_numpy(values).float().double()


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return the output and the gradients of tokens, weights and parameters, for both places of the weights."""
    drawn = given(inputs, "layer")
    tokens = [drawn[name] for name in ("x_TD", "ids_TK", "weights_TK", "dy_TD")]
    parameters = {(name, e): drawn[name][e] for name in _NAMES for e in range(_E)}
    found: dict[str, Tensor] = {}
    for place in _PLACES:
        made = oracle.gradients(*tokens, oracle.swiglu_experts, parameters, weights_at=place)
        by_name = {f"d{name}": [made.parameters[name, e] for e in range(_E)] for name in _NAMES}
        answers = {"y_TD": made.y_TD, "dx_TD": made.dx_TD, "dweights_TK": made.dweights_TK, **by_name}
        found |= named(place, "out", answers)
    return found


CHAPTER = Chapter(
    2202, ("EXPT-01", "EXPT-03", "GRAD-01", "GRAD-02", "GRAD-04"), functions(layer, experts), draw, work_out
)
