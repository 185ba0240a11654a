"""Checkpoint rules: names that tell everything apart, elements written once, nothing missing or left over.

Judged on names, shapes and boxes alone, so for any file format. What the values have to be is in
`checkpoints.py`.

Source: arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.checkpoints.parts import same_bits

Shape = tuple[int, ...]
Key = tuple[int, int, str]
"""(layer, global expert id, parameter)."""


@dataclass(frozen=True)
class Part:
    """What one rank writes: the box of the tensor `name` from `start` on, as large as `values`."""

    name: str
    start: Shape
    values: Tensor


class Misfits(NamedTuple):
    """What does not fit between what is needed and what is found, as sorted names."""

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[str, ...]


class ConversionFaults(NamedTuple):
    """What a conversion did wrong, as sorted names: first of the file, then of the model."""

    not_used: tuple[str, ...]
    used_twice: tuple[str, ...]
    invented: tuple[str, ...]
    not_filled: tuple[str, ...]
    filled_twice: tuple[str, ...]
    unknown: tuple[str, ...]


def same_names(shapes_by_layout: Sequence[Mapping[str, Shape]]) -> bool:
    """Return whether the checkpoints of several layouts have the same names and global shapes.

    Degenerate: one layout agrees with itself.

    Decides: CKPT-02. Source: a checkpoint is about a model, not about ranks.

    >>> same_names([{"0.down": (2, 3)}, {"0.down": (2, 3)}]), same_names([{"0.down": (2, 3)}, {"0.down": (2, 1)}])
    (True, False)
    """
    return all(dict(shapes) == dict(shapes_by_layout[0]) for shapes in shapes_by_layout)


def collisions(addresses: Mapping[Key, tuple[str, int | None]]) -> tuple[tuple[Key, Key], ...]:
    """List the pairs of parameters that share a place in the checkpoint, each pair and all pairs ascending.

    Args:
        addresses: of every (layer, expert, parameter), its tensor's name, and its index in the stacked dimension,
            or None if the tensor is its own. Both together name a place; a whole tensor meets all its indices.

    Degenerate: E = 1 meets nothing within its layer.

    Decides: CKPT-02. Source: local numbers of different ranks collide.

    >>> collisions({(0, 0, "up"): ("0.up", None), (0, 2, "up"): ("0.up", None), (0, 1, "up"): ("1.up", None)})
    (((0, 0, 'up'), (0, 2, 'up')),)
    """
    found = []
    for a, (name_a, index_a) in addresses.items():
        for b, (name_b, index_b) in addresses.items():
            one_place = index_a is None or index_b is None or index_a == index_b
            if a < b and name_a == name_b and one_place:
                found.append((a, b))
    return tuple(sorted(found))


def times_written(parts: Sequence[Part], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Count how often each element of each tensor is written, int64 in the tensor's shape.

    Rule: one for every part whose box holds the element; parts of the same box with the same bytes are copies
    of one thing and count once. A checkpoint is allowed if every count is 1: 0 is lost, 2 is contradicted.

    Degenerate: a part without elements, and a tensor without elements, count nothing.

    Raises:
        ValueError: a name without a shape, or a box of other dimensions or beyond its tensor.

    Decides: CKPT-03. Source: arithmetic.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> parts = [Part("bias", (0,), one), Part("bias", (0,), one), Part("bias", (1,), one), Part("bias", (1,), two)]
    >>> times_written(parts, {"bias": (3,)})["bias"].tolist()
    [1, 2, 0]
    """
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    distinct: list[Part] = []
    for part in parts:
        if part.name not in shapes:
            raise ValueError(f"{part.name} is written, but has no global shape")
        shape, size = shapes[part.name], tuple(part.values.shape)
        if not len(part.start) == len(size) == len(shape) or any(
            not 0 <= first <= first + length <= total
            for first, length, total in zip(part.start, size, shape, strict=True)
        ):
            raise ValueError(f"{part.name}: a box of {size} from {part.start} is not within {shape}")
        if any(_copies(part, other) for other in distinct):
            continue
        distinct.append(part)
        box = tuple(slice(first, first + length) for first, length in zip(part.start, size, strict=True))
        counts[part.name][box] += 1
    return counts


def misfits(needed: Mapping[str, Shape], found: Mapping[str, Shape], *, optional: Collection[str] = ()) -> Misfits:
    """Compare what a model needs with what a checkpoint holds, by name and global shape.

    Loading must refuse unless all three lists are empty, and name what is in them.

    Args:
        needed: every name that the model has, with its shape.
        found: every name in the checkpoint, with its shape.
        optional: names that may be missing, needed or not. One that is there is not left over, and if the
            model needs it, its shape has to fit.

    Degenerate: nothing needed and nothing found fit.

    Decides: CKPT-08. Source: a parameter that was not loaded keeps its random start and trains on.

    >>> misfits({"a": (2,), "b": (3,), "extra": (1,)}, {"b": (5,), "c": (7,)}, optional=["extra"])
    Misfits(missing=('a',), left_over=('c',), misshapen=('b',))
    """
    both = needed.keys() & found.keys()
    return Misfits(
        missing=tuple(sorted(needed.keys() - found.keys() - set(optional))),
        left_over=tuple(sorted(found.keys() - needed.keys() - set(optional))),
        misshapen=tuple(sorted(name for name in both if tuple(needed[name]) != tuple(found[name]))),
    )


def conversion_faults(
    used: Sequence[str],
    present: Collection[str],
    filled: Sequence[str],
    needed: Collection[str],
    *,
    unused: Collection[str] = (),
) -> ConversionFaults:
    """Compare what a conversion read and filled with what there was to read and to fill.

    Args:
        used: names of the file's tensors, once for every use as a whole.
        present: names of all the file's tensors.
        filled: names of the model's parameters, once for every time that they were filled.
        needed: names of all the model's parameters.
        unused: names that the format documents as unused; it is no fault to use one.

    Degenerate: an empty file for an empty model has no fault.

    Decides: CKPT-11. Source: arithmetic.

    >>> faults = conversion_faults(["a", "a", "z"], ["a", "b", "c"], ["p", "q", "q"], ["p", "r"], unused=["c"])
    >>> faults[:3], faults[3:]
    ((('b',), ('a',), ('z',)), (('r',), ('q',), ('q',)))
    """
    return ConversionFaults(
        not_used=tuple(sorted(set(present) - set(used) - set(unused))),
        used_twice=_repeated(used),
        invented=tuple(sorted(set(used) - set(present))),
        not_filled=tuple(sorted(set(needed) - set(filled))),
        filled_twice=_repeated(filled),
        unknown=tuple(sorted(set(filled) - set(needed))),
    )


def _copies(one: Part, other: Part) -> bool:
    """Return whether two parts write the same bytes to the same box."""
    return (one.name, one.start) == (other.name, other.start) and same_bits(one.values, other.values)


def _repeated(names: Sequence[str]) -> tuple[str, ...]:
    """List the names that stand there more than once, sorted."""
    return tuple(sorted(name for name, times in Counter(names).items() if times > 1))
