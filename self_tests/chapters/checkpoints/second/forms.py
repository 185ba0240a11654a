"""Forms of stored experts by hand: in which tensor of a file, and where in it, each element lies (CKPT-10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from self_tests.chapters.checkpoints.second.parts import Bits, Index, Key, Parameters, indices


class Form(NamedTuple):
    """How a file stores experts: one stacked tensor; gate and up in one, `halves` or `interleaved`; transposed."""

    stacked: bool
    fused: str | None
    transposed: bool


def address(key: Key, index: Index, F: int, form: Form) -> tuple[str, Index]:
    """Tensor of the file, and index in it, where one element of gate, up or down lies."""
    name, expert = key
    i, j = index
    if form.fused is not None and name != "down":
        second = name == "up"
        i = {"halves": i + F * second, "interleaved": 2 * i + second}[form.fused]
        name = "gate_up"
    if form.transposed:
        i, j = j, i
    return (name, (expert, i, j)) if form.stacked else (f"{expert}.{name}", (i, j))


def stored(parameters: Parameters, form: Form) -> dict[str, Bits]:
    """The tensors of a file in this form."""
    placed: dict[str, dict[Index, int]] = {}
    for key, whole in parameters.items():
        for index in indices(whole.shape):
            name, place = address(key, index, len(parameters["gate", 0]), form)
            places = placed.setdefault(name, {})
            if place in places:
                raise ValueError(f"two elements at {name} {place}")
            places[place] = int(whole[index])
    return {name: from_places(places) for name, places in placed.items()}


def from_places(places: Mapping[Index, int]) -> Bits:
    """The tensor that has these elements, no more and no fewer."""
    shape = [1 + max(place[axis] for place in places) for axis in range(len(next(iter(places))))]
    tensor = np.zeros(shape, dtype=np.int64)
    if len(places) != tensor.size:
        raise ValueError(f"{len(places)} elements for {shape}")
    for place, value in places.items():
        tensor[place] = value
    return tensor


def read(tensors: Mapping[str, Bits], form: Form, experts: int, F: int, D: int) -> dict[Key, Bits]:
    """The parameters in a file of this form, each element looked up where the form puts it."""
    whole = {}
    for expert in range(experts):
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            made = np.zeros(shape, dtype=np.int64)
            for index in indices(shape):
                tensor, place = address((name, expert), index, F, form)
                made[index] = tensors[tensor][place]
            whole[name, expert] = made
    return whole


def fused_part(gate_FD: Bits, up_FD: Bits, fused: str, part: int, parts: int) -> Bits:
    """One etp rank's share of a fused matrix: its hidden units of gate and of up, fused again."""
    F, D = gate_FD.shape
    if F % parts != 0 or not 0 <= part < parts:
        raise ValueError(f"part {part} of {parts} of {F} hidden units")
    units = range(part * (F // parts), (part + 1) * (F // parts))
    made = np.zeros((2 * len(units), D), dtype=np.int64)
    for place, f in enumerate(units):
        for name, matrix in (("gate", gate_FD), ("up", up_FD)):
            for d in range(D):
                _, (row, column) = address((name, 0), (place, d), len(units), Form(False, fused, False))
                made[row, column] = matrix[f, d]
    return made
