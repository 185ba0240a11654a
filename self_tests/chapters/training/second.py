"""Training once more, in NumPy loops over tokens and elements, without a line of calculus.

Gradients are by complex steps, dL/dtheta = Im L(theta + i h) / h with h = 1e-100: no difference is taken, so nothing
cancels, and the result is exact to rounding (Squire and Trapp 1998). Everything up to the loss is written with
functions that continue into the complex plane; only selections look at real parts.

    silu(z) = z / (1 + exp(-z))        softmax(l)_e = exp(l_e) / sum_j exp(l_j)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = tuple[str, int | None]
Numbers = NDArray[Any]
Parameters = Mapping[Key, Numbers]
_H = 1e-100


def swiglu(h: Numbers, gate: Numbers, up: Numbers, down: Numbers) -> Numbers:
    """One expert on one token, hidden unit by hidden unit."""
    out = np.zeros_like(h)
    for f in range(len(gate)):
        z = gate[f] @ h
        out = out + down[:, f] * (z / (1 + np.exp(-z)) * (up[f] @ h))
    return out


def of_token(x: Numbers, parameters: Parameters, top_k: int) -> Numbers:
    """One token through all layers."""
    h, number = x.astype(np.complex128), 0
    while any(name.startswith(f"layer{number}/") for name, _ in parameters):
        of_layer = {
            (name.split("/")[1], e): p for (name, e), p in parameters.items() if name.startswith(f"layer{number}/")
        }
        if ("router", None) not in of_layer:
            h = h + swiglu(h, of_layer["gate", None], of_layer["up", None], of_layer["down", None])
        else:
            powers = [np.exp(row @ h) for row in of_layer["router", None]]
            best = sorted(range(len(powers)), key=lambda e: -powers[e].real)[:top_k]
            shares = {e: powers[e] / sum(powers) for e in best}
            h = h + sum(
                shares[e] * swiglu(h, of_layer["gate", e], of_layer["up", e], of_layer["down", e]) for e in best
            )
        number += 1
    return h


def loss_of(tokens: Sequence[tuple[Numbers, Numbers, bool]], parameters: Parameters, top_k: int, divisor: float) -> Any:
    """Half the squared distance of every counted token to its target, summed and divided."""
    total = 0.0 + 0.0j
    for x, target, counted in tokens:
        if counted:
            off = of_token(x, parameters, top_k) - target
            total += sum(each * each for each in off) / 2
    return total / divisor


def graded(
    tokens: Sequence[tuple[Numbers, Numbers, bool]], parameters: Parameters, top_k: int
) -> tuple[float, dict[Key, Numbers]]:
    """The loss of a step and its gradient in every element, each by a step of its own."""
    n = max(sum(counted for _, _, counted in tokens), 1)
    plain = {key: value.astype(np.complex128) for key, value in parameters.items()}
    found: dict[Key, Numbers] = {}
    for key, value in plain.items():
        found[key] = np.zeros(value.shape)
        for at in np.ndindex(value.shape):
            moved = value.copy()
            moved[at] += 1j * _H
            found[key][at] = loss_of(tokens, {**plain, key: moved}, top_k, n).imag / _H
    return float(loss_of(tokens, plain, top_k, n).real), found


@dataclass
class Element:
    """One element of a parameter, with what an optimiser has kept of it."""

    theta: float
    kept: dict[str, float] = field(default_factory=dict)


def adamw(
    element: Element, g: float, t: int, *, rate: float, betas: tuple[float, float], epsilon: float, decay: float
) -> None:
    """One update of AdamW; moments that are not there yet are 0."""
    m, v = element.kept.get("first", 0.0), element.kept.get("second", 0.0)
    m, v = m + (1 - betas[0]) * (g - m), v + (1 - betas[1]) * (g * g - v)
    element.kept = {"first": m, "second": v}
    unbiased_m, unbiased_v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    element.theta = element.theta * (1 - rate * decay) - rate * unbiased_m / (math.sqrt(unbiased_v) + epsilon)


def sgd(element: Element, g: float, t: int, *, rate: float, momentum: float, decay: float) -> None:
    """One update of SGD; in the first step the momentum is the gradient with its decay."""
    with_decay = g + decay * element.theta
    buffer = with_decay if t == 1 else momentum * element.kept["momentum"] + with_decay
    element.kept = {"momentum": buffer}
    element.theta -= rate * buffer


def length(gradients: Mapping[Key, Numbers]) -> float:
    """The norm of all elements."""
    return math.sqrt(math.fsum(float(each) ** 2 for value in gradients.values() for each in value.flat))


def clip_factor(norm: float, largest: float) -> float:
    """What all elements are multiplied by, so that their norm is at most the largest."""
    return largest / norm if norm > largest else 1.0


@dataclass
class Model:
    """All elements of a model."""

    elements: dict[Key, list[Element]]
    shapes: dict[Key, tuple[int, ...]]
    steps: int = 0

    @classmethod
    def of(cls, parameters: Parameters) -> Model:
        """Untrained."""
        made = {key: [Element(float(each)) for each in value.flat] for key, value in parameters.items()}
        return cls(made, {key: value.shape for key, value in parameters.items()})

    def parameters(self) -> dict[Key, Numbers]:
        """The parameters as they are."""
        return {
            key: np.array([each.theta for each in elements]).reshape(self.shapes[key])
            for key, elements in self.elements.items()
        }

    def kept(self, name: str) -> dict[Key, Numbers]:
        """What is kept under one name."""
        return {
            key: np.array([each.kept.get(name, 0.0) for each in elements]).reshape(self.shapes[key])
            for key, elements in self.elements.items()
        }

    def step(
        self,
        tokens: Sequence[tuple[Numbers, Numbers, bool]],
        update: Callable[[Element, float, int], None],
        *,
        top_k: int,
        largest: float,
    ) -> tuple[float, float]:
        """One step; its loss and norm. What is not finite changes nothing."""
        loss, gradients = graded(tokens, self.parameters(), top_k)
        norm = length(gradients)
        if math.isfinite(loss) and math.isfinite(norm):
            self.steps += 1
            factor = clip_factor(norm, largest)
            for key, elements in self.elements.items():
                for element, g in zip(elements, gradients[key].flat, strict=True):
                    update(element, factor * float(g), self.steps)
        return loss, norm
