"""Repeat recipes that are in bfloat16 in float16, whose small range overflows, for the full profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from moe_conformance.workloads.selection.profiles import Profile


class Drawable(Protocol):
    """The fields that a recipe, a dataclass, has at least."""

    @property
    def name(self) -> str:
        """Name of the recipe, which includes the dtype."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Options of `Config` by name."""

    @property
    def profile(self) -> Profile:
        """The smallest profile that draws it."""


R = TypeVar("R", bound=Drawable)


def in_float16(recipes: Iterable[R]) -> tuple[R, ...]:
    """Return copies of the recipes in bfloat16 that are in float16 and in the full profile."""
    found = []
    for recipe in recipes:
        if recipe.config.get("dtype") == torch.bfloat16:
            config = {**recipe.config, "dtype": torch.float16}
            name = recipe.name.replace("bfloat16", "float16")
            found.append(replace(recipe, name=name, config=config, profile="full"))  # type: ignore[type-var]
    return tuple(found)


def drawn_in(profile: Profile, recipes: Iterable[R]) -> list[R]:
    """Return the recipes of a profile."""
    return [recipe for recipe in recipes if profile == "full" or recipe.profile == "quick"]
