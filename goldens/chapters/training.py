"""Golden of training: twenty steps of AdamW with decay and clipping, on a dense and two MoE layers.

Every step has other tokens, of which some do not count. Names: layers are numbered in their order; S steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, named
from moe_conformance.reference.training import model, optimisers, steps

_STEPS, _T, _D, _F, _E = 20, 8, 4, 2, 4
# Small steps and a large epsilon: what rounding may do grows with every step, and is then 1e-5 of the last loss.
_OPTIONS = {"rate": 0.003, "beta1": 0.9, "beta2": 0.95, "epsilon": 0.01, "decay": 0.1, "largest_norm": 0.5, "top_k": 2}
_SIZES = {"gate": (_F, _D), "up": (_F, _D), "down": (_D, _F)}
KEPT = ("first", "second")


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return the model before the first step, the tokens of all steps, and the options; exact in float32."""
    drawn: dict[str, object] = {}
    for layer in range(3):
        experts = (_E,) if layer else ()
        for name, size in _SIZES.items():
            drawn[f"{name}-{layer}"] = rng.standard_normal((*experts, *size)) / 3
        if layer:
            drawn[f"router-{layer}"] = rng.standard_normal((_E, _D))
    drawn |= {name: rng.standard_normal((_STEPS, _T, _D)) for name in ("x_STD", "target_STD")}
    exact = {name: torch.tensor(value, dtype=torch.float32) for name, value in drawn.items()}
    return named("trajectory", "in", {**exact, "counted_ST": rng.random((_STEPS, _T)) < 0.75, **_OPTIONS})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return loss and norm of every step, and parameters and moments after it."""
    own = given(inputs, "trajectory")
    before = keyed(own)
    rate, beta1, beta2, epsilon, decay, largest_norm, top_k = (own[name].item() for name in _OPTIONS)
    tokens = zip(own["x_STD"], own["target_STD"], own["counted_ST"].bool(), strict=True)
    found = oracle.train(
        before,
        [oracle.Tokens(*each) for each in tokens],
        oracle.AdamW(rate, (beta1, beta2), epsilon, decay),
        top_k=int(top_k),
        largest_norm=largest_norm,
    )
    values = {"loss_S": [each.loss for each in found], "norm_S": [each.norm for each in found]}
    for key in before:
        values[written(key)] = [each.after.parameters[key] for each in found]
        values |= {f"{written(key)}.{what}": [each.after.kept[key][what] for each in found] for what in KEPT}
    return named("trajectory", "out", values)


def keyed(own: Mapping[str, Tensor]) -> dict[model.Key, Tensor]:
    """Return the parameters by the names that the oracle has for them."""
    found: dict[model.Key, Tensor] = {}
    for name, value in own.items():
        kind, dash, layer = name.partition("-")
        if dash and (kind == "router" or layer == "0"):
            found[f"layer{layer}/{kind}", None] = value
        elif dash:
            found |= {(f"layer{layer}/{kind}", expert): value[expert] for expert in range(len(value))}
    return found


def written(key: model.Key) -> str:
    """Return the name of a parameter in the file, such as `layer1.gate.3`."""
    name, expert = key
    return name.replace("/", ".") + ("" if expert is None else f".{expert}")


CHAPTER = Chapter(
    3107,
    ("TRAIN-01", "TRAIN-04", "GRAD-12", "GRAD-13", "GRAD-14"),
    functions(model, optimisers, steps),
    draw,
    work_out,
)
