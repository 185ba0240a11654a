"""Sizes that backends are asked to make groups for: every layout of a world, and sizes that make none."""

from __future__ import annotations

from itertools import combinations, product

from moe_conformance.contract.topology import Layout, layouts

LAYOUTS, NOT_DIVIDING, BELOW_ONE = "layouts", "not-dividing", "below-one"
KINDS = (LAYOUTS, NOT_DIVIDING, BELOW_ONE)
_AXES = ("tp", "cp", "pp", "ep", "etp")


def impossible(world: int) -> tuple[Layout, ...]:
    """Return sizes that do not fit: too large, not dividing, zero and negative, in up to two axes or all of a fold.

    What fits by itself is among the values, so that products are tried that do not.
    """
    values = sorted({-1, 0, 2, 3, world // 2 + 1, world, 2 * world})
    tried = [
        dict(zip(axes, sizes, strict=True))
        for axes in combinations(_AXES, 2)
        for sizes in product((1, *values), repeat=2)
    ]
    tried += [dict.fromkeys(axes, size) for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")) for size in values]
    made = dict.fromkeys(Layout(world, **sizes) for sizes in tried)
    return tuple(layout for layout in made if layout.problem)


def of_kind(kind: str, world: int) -> tuple[Layout, ...]:
    """Return the sizes of one of `KINDS`: layouts; sizes of 1 or more that do not divide the world; some below 1."""
    if kind == LAYOUTS:
        return possible(world)
    below = kind == BELOW_ONE
    return tuple(each for each in impossible(world) if (min(getattr(each, axis) for axis in _AXES) < 1) is below)


def possible(world: int) -> tuple[Layout, ...]:
    """Return every layout of a world."""
    return tuple(layouts(world))
