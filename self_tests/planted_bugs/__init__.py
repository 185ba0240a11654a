"""Planted bugs: small, named changes to native that the suite must catch, and say why. One module per chapter.

Every `Plant` in a module of this folder is found; there is no list to add it to.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from self_tests.planted_bugs.plant import Expectation, Plant

__all__ = ["Expectation", "Plant", "find", "plants", "plants_of_many_ranks"]

_MOST_REAL_RANKS = 8  # of any layout that processes run; what shows on more is tried on virtual ranks


@cache
def _all() -> tuple[Plant, ...]:
    """Return all plants, each from the module that makes it: another one may have imported it."""
    found: list[Plant] = []
    for each in pkgutil.walk_packages(__path__, f"{__name__}."):
        if each.name.rpartition(".")[2].startswith("test_"):
            continue
        module = importlib.import_module(each.name)
        own = (value for value in vars(module).values() if isinstance(value, Plant))
        found += [plant for plant in own if plant.backend.startswith(f"{each.name}:")]
    return tuple(found)


def plants() -> tuple[Plant, ...]:
    """Return all plants that show on real ranks, module by module."""
    return tuple(plant for plant in _all() if plant.layout.world <= _MOST_REAL_RANKS)


def plants_of_many_ranks() -> tuple[Plant, ...]:
    """Return those that show on virtual ranks only."""
    return tuple(plant for plant in _all() if plant.layout.world > _MOST_REAL_RANKS)


def find(name: str) -> Plant:
    """Return the plant of that name.

    Raises:
        LookupError: there is none; lists those that there are.
    """
    for plant in _all():
        if plant.name == name:
            return plant
    raise LookupError(f"no plant {name!r}; known: {', '.join(plant.name for plant in plants())}")
