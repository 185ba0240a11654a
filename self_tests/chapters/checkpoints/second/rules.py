"""Names in a checkpoint by hand: who shares one, who is written how often, who is missing (CKPT-02, -03, -08, -11)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from self_tests.chapters.checkpoints.second.parts import Bits, Index, indices

Shapes = Mapping[str, tuple[int, ...]]


def all_alike(shapes: Sequence[Shapes]) -> bool:
    """Does every layout save the same names with the same global shapes?"""
    return all(
        sorted((name, *shape) for name, shape in one.items()) == sorted((name, *shape) for name, shape in other.items())
        for one in shapes
        for other in shapes
    )


Owner = tuple[int, int, str]


def shared_addresses(addresses: Mapping[Owner, tuple[str, int | None]]) -> list[tuple[Owner, Owner]]:
    """Two parameters in one place: the same name, and not two different indices of it."""
    found = []
    for a, (name_a, index_a) in addresses.items():
        for b, (name_b, index_b) in addresses.items():
            apart = index_a is not None and index_b is not None and index_a != index_b
            if a < b and name_a == name_b and not apart:
                found.append((a, b))
    return sorted(found)


class Written(NamedTuple):
    """A box of a global tensor that one rank writes: where it starts, and its values."""

    name: str
    start: Index
    values: Bits


def times_written(parts: Sequence[Written], shapes: Shapes) -> dict[str, Bits]:
    """How often each element is written; the same box with the same content, from several ranks, counts once."""
    times = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
    seen: list[object] = []
    for part in parts:
        if part.name not in shapes or len(part.start) != len(shapes[part.name]) or part.values.ndim != len(part.start):
            raise ValueError(f"no tensor {part.name} of {part.values.ndim} dimensions")
        for first, size, whole in zip(part.start, part.values.shape, shapes[part.name], strict=True):
            if first < 0 or first + size > whole:
                raise ValueError(f"{part.name}: {first} .. {first + size} of {whole}")
        box = (part.name, part.start, part.values.shape, part.values.dtype, part.values.tolist())
        if box in seen:
            continue
        seen.append(box)
        for index in indices(part.values.shape):
            times[part.name][tuple(a + b for a, b in zip(part.start, index, strict=True))] += 1
    return times


def misfits(needed: Shapes, found: Shapes, optional: Collection[str] = ()) -> tuple[list[str], list[str], list[str]]:
    """Names that are missing, left over, and of another shape than needed."""
    missing, left_over, misshapen = [], [], []
    for name in sorted({*needed, *found}):
        if name not in found:
            if name not in optional:
                missing.append(name)
        elif name not in needed:
            if name not in optional:
                left_over.append(name)
        elif tuple(needed[name]) != tuple(found[name]):
            misshapen.append(name)
    return missing, left_over, misshapen


def conversion_faults(
    used: Sequence[str],
    present: Collection[str],
    filled: Sequence[str],
    needed: Collection[str],
    unused: Collection[str] = (),
) -> dict[str, list[str]]:
    """What a conversion did wrong, name by name: each tensor is to be used, each parameter filled, just once."""
    faults: dict[str, list[str]] = {
        kind: [] for kind in ("not_used", "used_twice", "invented", "not_filled", "filled_twice", "unknown")
    }
    for name in sorted({*used, *present}):
        times = list(used).count(name)
        if times == 0 and name not in unused:
            faults["not_used"].append(name)
        if times > 1:
            faults["used_twice"].append(name)
        if times > 0 and name not in present:
            faults["invented"].append(name)
    for name in sorted({*filled, *needed}):
        times = list(filled).count(name)
        if times == 0:
            faults["not_filled"].append(name)
        if times > 1:
            faults["filled_twice"].append(name)
        if times > 0 and name not in needed:
            faults["unknown"].append(name)
    return faults
