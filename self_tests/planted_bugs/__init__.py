"""Planted bugs: small, named changes to native that the suite must detect, and say why.

Those of a chapter are in `self_tests/chapters/<chapter>/plants`, those of many ranks here. Every `Plant` is found.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache

from self_tests import chapters
from self_tests.planted_bugs.plant import Expectation, Plant

__all__ = ["Expectation", "Plant", "find", "plants", "plants_of_many_ranks"]

_MOST_REAL_RANKS = 8  # of any layout that processes run; what shows on more is tried on virtual ranks


@cache
def _all() -> tuple[Plant, ...]:
    """Return all plants, each from the module that makes it: another one may have imported it."""
    found: list[Plant] = []
    for name in ("self_tests.planted_bugs.many_ranks", *_modules_of_chapters()):
        own = (value for value in vars(importlib.import_module(name)).values() if isinstance(value, Plant))
        found += [plant for plant in own if plant.backend.startswith(f"{name}:")]
    return tuple(found)


def _modules_of_chapters() -> Iterator[str]:
    """Yield the modules of planted bugs, chapter by chapter."""
    for each in pkgutil.walk_packages(chapters.__path__, f"{chapters.__name__}."):
        parts = each.name.split(".")
        if len(parts) > 3 and parts[3] == "plants":
            yield each.name


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
