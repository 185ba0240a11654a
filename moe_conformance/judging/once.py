"""Keeping what is computed from a reading with the reading, for judges whose oracles it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from moe_conformance.judging.reading import Reading

T = TypeVar("T")


def once(reading: Reading, make: Callable[[Reading], T]) -> T:
    """Return `make(reading)`, computed at the first call and kept where the reading's cached properties are kept."""
    kept, name = vars(reading), f"{make.__module__}.{make.__qualname__}"
    if name not in kept:
        kept[name] = make(reading)
    return cast(T, kept[name])
