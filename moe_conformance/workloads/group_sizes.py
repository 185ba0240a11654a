"""The sizes for which a backend's group lists are checked: all layouts of a world, and impossible sizes."""

from __future__ import annotations

from itertools import combinations, product

from moe_conformance.contract.topology import Layout, layouts

LAYOUTS, NOT_DIVIDING, BELOW_ONE = "layouts", "not-dividing", "below-one"
KINDS = (LAYOUTS, NOT_DIVIDING, BELOW_ONE)
_AXES = ("tp", "cp", "pp", "ep", "etp")


def impossible(world: int) -> tuple[Layout, ...]:
    """Return sizes that make no layout: too large, not dividing, zero and negative, in up to two axes or all of a fold.

    Values that divide the world are included, since their products may not.
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
    """Return the sizes of one of `KINDS`: layouts, sizes that do not divide the world, or sizes below 1."""
    if kind == LAYOUTS:
        return possible(world)
    below = kind == BELOW_ONE
    return tuple(layout for layout in impossible(world) if (min(getattr(layout, axis) for axis in _AXES) < 1) is below)


def possible(world: int) -> tuple[Layout, ...]:
    """Return every layout of a world."""
    return tuple(layouts(world))
