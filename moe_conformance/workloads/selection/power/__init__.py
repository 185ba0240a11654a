"""The stored order of power: cases that detect most planted bugs for their seconds come first.

`native.toml` lists them, `python -m tools.power` writes it. The profile smoke runs the first `smoke` of them, which
take ten seconds on two processors that have nothing else to do; `detected` of the `plants` that the quick profile
detects are detected there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "native.toml"

Place = tuple[str, str, str]  # variant, layout, workload


@dataclass(frozen=True)
class Power:
    """What is stored."""

    order: tuple[Place, ...]
    smoke: int  # how many of them the profile smoke runs
    detected: int  # planted bugs that those detect
    plants: int  # planted bugs that the quick profile detects

    @property
    def share(self) -> float:
        """The part of the planted bugs that the profile smoke detects."""
        return self.detected / self.plants


@cache
def read() -> Power:
    """Return what is stored of native, which every planted bug is a change of."""
    stored = tomllib.loads(FILE.read_text(encoding="utf-8"))
    order = tuple((variant, layout, name) for variant, layout, name in map(str.split, stored["order"]))
    return Power(order, stored["smoke"], stored["detected"], stored["plants"])


def numbers(variants: Sequence[str]) -> Mapping[Place, int]:
    """Return which place is the how-manieth of the order, given the variants of a backend.

    Where a backend lacks a variant of native, its first takes that one's place.
    """
    return _numbered(read().order, variants)


def smoke(variants: Sequence[str]) -> frozenset[Place]:
    """Return what the profile smoke runs of a backend with these variants."""
    return frozenset(_numbered(read().order[: read().smoke], variants))


def _numbered(order: Sequence[Place], variants: Sequence[str]) -> Mapping[Place, int]:
    found: dict[Place, int] = {}
    for number, (variant, layout, name) in enumerate(order):
        found.setdefault((variant if variant in variants else variants[0], layout, name), number)
    return found
