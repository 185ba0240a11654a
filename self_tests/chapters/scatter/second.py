"""Scatter-add by hand, and memory painted byte by byte.

N rows out, J source rows, D columns: y_i = out_i + sum of src_j over all j with idx_j = i.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.exchange.second import layer
from self_tests.chapters.exchange.second.layer import Gradients, Tokens
from self_tests.chapters.experts.second import SwiGLU

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def check(out_ND: Floats, index_J: Ints, src_JD: Floats) -> None:
    """Refuse an index that names no row, and shapes that do not fit."""
    if index_J.dtype != np.int64 or index_J.ndim != 1:
        raise ValueError("the index is not int64 (J,)")
    if src_JD.shape != (len(index_J), out_ND.shape[1]):
        raise ValueError(f"source rows {src_JD.shape} for {len(index_J)} indices and {out_ND.shape[1]} columns")
    for i in index_J.tolist():
        if not 0 <= i < out_ND.shape[0]:
            raise ValueError(f"no row {i}")


def scatter_add(out_ND: Floats, index_J: Ints, src_JD: Floats) -> Floats:
    """Add the source rows one by one, last first: any order is legal."""
    check(out_ND, index_J, src_JD)
    y_ND = np.array(out_ND, dtype=np.float64)
    for j in reversed(range(len(index_J))):
        for d in range(out_ND.shape[1]):
            y_ND[index_J[j], d] = y_ND[index_J[j], d] + src_JD[j, d]
    return y_ND


def scatter_add_backward(index_J: Ints, g_ND: Floats) -> tuple[Floats, Floats]:
    """Gradients of sum_id g_id y_id: each out_id has g_id, each src_jd has that of the one row that it went to."""
    d_src_JD = np.zeros((len(index_J), g_ND.shape[1]))
    for j in range(len(index_J)):
        for d in range(g_ND.shape[1]):
            d_src_JD[j, d] = g_ND[index_J[j], d]
    return np.array(g_ND), d_src_JD


def scatter_add_bound(out_ND: Floats, index_J: Ints, src_JD: Floats, unit_roundoff: float) -> Floats:
    """How far rounding may carry each element: nowhere where no row is added."""
    check(out_ND, index_J, src_JD)
    if not 0 < unit_roundoff < 1:
        raise ValueError(f"unit roundoff {unit_roundoff}")
    bound_ND = np.zeros(out_ND.shape)
    for i in range(out_ND.shape[0]):
        addends = [j for j in range(len(index_J)) if index_J[j] == i]
        steps = (len(addends) + 1) * unit_roundoff
        if not addends:
            continue
        if steps >= 1:
            raise ValueError(f"{len(addends)} addends are too many for {unit_roundoff}")
        for d in range(out_ND.shape[1]):
            magnitude = abs(out_ND[i, d])
            for j in addends:
                magnitude += abs(src_JD[j, d])
            bound_ND[i, d] = magnitude * steps / (1 - steps)
    return bound_ND


def add_routed(base_TD: Floats, tokens: Tokens, experts: Sequence[SwiGLU]) -> Floats:
    """What the experts answer one rank's tokens, weighed, on top of the base."""
    (routed_TD,) = layer.forward([tokens], experts, "output")
    y_TD = np.zeros(base_TD.shape)
    for t in range(base_TD.shape[0]):
        for d in range(base_TD.shape[1]):
            y_TD[t, d] = base_TD[t, d] + routed_TD[t, d]
    return y_TD


def add_routed_backward(tokens: Tokens, experts: Sequence[SwiGLU], g_TD: Floats) -> tuple[Floats, Gradients]:
    """Gradients of the base, which is added as it is, and of all that the layer is made of."""
    return np.array(g_TD), layer.backward([tokens], experts, "output", [g_TD])


class View(NamedTuple):
    """Where a tensor lies: the byte address of its first element (None: no data), sizes, strides in elements."""

    address: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def paint(view: View) -> dict[int, int]:
    """Every byte that an element lies on, and how many elements lie on it."""
    if len(view.shape) != len(view.strides) or min(view.shape, default=0) < 0 or view.itemsize < 1:
        raise ValueError(f"no tensor lies like {view}")
    painted: dict[int, int] = {}
    if view.address is None:
        return painted
    for place in itertools.product(*(range(size) for size in view.shape)):
        element = view.address
        for index, stride in zip(place, view.strides, strict=True):
            element += index * stride * view.itemsize
        for byte in range(element, element + view.itemsize):
            painted[byte] = painted.get(byte, 0) + 1
    return painted


def share_bytes(a: View, b: View) -> bool:
    """Does a write through one show through the other?"""
    other = paint(b)
    return any(byte in other for byte in paint(a))


def overlaps_itself(view: View) -> bool:
    """Do two elements lie on one byte?"""
    return any(elements > 1 for elements in paint(view).values())


def in_place_is_lawful(out: View, x: View) -> bool:
    """May rows be added to `out` where it lies, without touching x or adding twice?"""
    return not share_bytes(out, x) and not overlaps_itself(out)


def records_gradient(modes: Sequence[str], requires_grad: Sequence[bool]) -> bool:
    """Enter the modes one after another: does a call inside them all leave something to differentiate?"""
    enabled, inference = True, False
    for mode in modes:
        if mode == "inference_mode":
            inference = True
        elif mode == "enable_grad":
            enabled = True
        elif mode == "no_grad":
            enabled = False
        else:
            raise ValueError(f"unknown mode {mode}")
    return enabled and not inference and True in requires_grad
