"""Activations in measured numbers: values and slopes, with what rounding may do to them.

A function inherits its slope times the error of its argument (`Rounding.function`), and has roundings of its own, which
are relative to more than the result where steps on the way cancel: 1 + erf(z) of a negative z, say. The bounds of SiLU
with slope 1 are those of `Rounding.silu`.

Source: derivatives by calculus; GELU and its approximation: Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_conformance.reference.rounding.errors import Measured, Rounding

_C, _CUBE = math.sqrt(2 / math.pi), 0.044715  # of the approximation by tanh


def value_and_slope(r: Rounding, z: Measured, activation: str, slope: float) -> tuple[Measured, Measured]:
    """Apply an activation and its derivative.

    >>> from moe_conformance.reference.experts import activated
    >>> from moe_conformance.reference.rounding.errors import exact
    >>> z = torch.linspace(-5, 4, 37, dtype=torch.float64, requires_grad=True)
    >>> for name, slope in (
    ...     ("silu", 1.0), ("silu", 1.7), ("gelu", 1.0), ("gelu_tanh", 1.0), ("relu", 1.0), ("squared_relu", 1.0)
    ... ):  # fmt: skip
    ...     expected = activated(z, name, slope)
    ...     (by_autograd,) = torch.autograd.grad(expected.sum(), z)
    ...     value, derivative = value_and_slope(Rounding(1.0, 1.0), exact(z.detach()), name, slope)
    ...     assert torch.allclose(expected, value.value) and torch.allclose(by_autograd, derivative.value)
    """
    if activation == "silu" and slope == 1.0:
        return r.silu(z), r.silu_slope(z)
    if activation == "silu":
        return _silu(r, z, slope)
    if activation == "gelu":
        return _gelu(r, z)
    if activation == "gelu_tanh":
        return _gelu_tanh(r, z)
    return _rectified(r, z, squared=activation == "squared_relu")


def cut(a: Measured, kept: Tensor) -> Measured:
    """Set elements to zero, exactly, where they are not kept.

    >>> from moe_conformance.reference.rounding.errors import exact
    >>> cut(exact(torch.tensor([3.0, 4.0])), torch.tensor([True, False])).value.tolist()
    [3.0, 0.0]
    """
    return a.map(lambda each: torch.where(kept, each, 0.0))


def limited(a: Measured, low: float, high: float) -> tuple[Measured, Tensor]:
    """Cut a number to an interval; return too where it lies inside, and is as far off as before.

    >>> from moe_conformance.reference.rounding.errors import exact
    >>> number, inside = limited(exact(torch.tensor([-9.0, 2.0])), -7.0, 7.0)
    >>> number.value.tolist(), inside.tolist()
    ([-7.0, 2.0], [False, True])
    """
    inside = (a.value > low) & (a.value < high)
    off = cut(a, inside)
    return Measured(a.value.clamp(low, high), off.worst, off.spread), inside


def _silu(r: Rounding, z: Measured, slope: float) -> tuple[Measured, Measured]:
    """Z s with s = sigmoid(b z): s + b z s (1 - s), and of that b s (1 - s) (2 + b z (1 - 2 s))."""
    s, bz = (slope * z.value).sigmoid(), slope * z.value
    second = s * (1 - s)
    value, derivative = z.value * s, s + bz * second
    return (
        r.stored(r.function(value, derivative, z, value.abs() + z.value.abs())),
        r.function(derivative, slope * second * (2 + bz * (1 - 2 * s)), z, 2 * (1 + bz.abs())),
    )


def _gelu(r: Rounding, z: Measured) -> tuple[Measured, Measured]:
    """Z Phi: Phi + z phi, and of that phi (2 - z^2)."""
    below = torch.special.ndtr(z.value)
    density = torch.exp(-(z.value**2) / 2) / math.sqrt(2 * math.pi)
    value, derivative = z.value * below, below + z.value * density
    return (
        r.stored(r.function(value, derivative, z, value.abs() + 2 * z.value.abs())),
        r.function(derivative, density * (2 - z.value**2), z, 2 * (1 + z.value.abs())),
    )


def _gelu_tanh(r: Rounding, z: Measured) -> tuple[Measured, Measured]:
    """Z (1 + t) / 2 with t = tanh(g), g = c (z + k z^3); by the product rule, 1 - t^2 times the slopes of g."""
    x = z.value
    t = (_C * (x + _CUBE * x**3)).tanh()
    inner, inner_slope, rest = _C * (1 + 3 * _CUBE * x**2), 6 * _C * _CUBE * x, 1 - t**2
    value, derivative = x * (1 + t) / 2, (1 + t) / 2 + x * rest * inner / 2
    second = rest * inner + x * (rest * inner_slope - 2 * t * rest * inner**2) / 2
    return (
        r.stored(r.function(value, derivative, z, value.abs() + 2 * x.abs())),
        r.function(derivative, second, z, 2 * (1 + x.abs() * inner)),
    )


def _rectified(r: Rounding, z: Measured, *, squared: bool) -> tuple[Measured, Measured]:
    """max(z, 0), which has no rounding of its own, or its square. At 0 the slope is 0."""
    positive = z.value > 0
    value = cut(z, positive)
    one = torch.where(positive, torch.ones_like(z.value), 0.0)
    if not squared:
        nothing = torch.zeros_like(one)
        return value, Measured(one, nothing, nothing, exact=True)
    return r.function(value.value**2, 2 * value.value, value), r.function(2 * value.value, 2 * one, value)
