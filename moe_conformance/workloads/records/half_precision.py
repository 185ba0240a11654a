"""What is drawn in bfloat16, in float16 as well: that has a range that overflows, and no quick profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from moe_conformance.workloads.selection.profiles import Profile


class Drawable(Protocol):
    """A recipe: a dataclass with at least these fields."""

    @property
    def name(self) -> str:
        """Its name, with its dtype."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Its options."""

    @property
    def profile(self) -> Profile:
        """The first profile that draws it."""


R = TypeVar("R", bound=Drawable)


def in_float16(recipes: Iterable[R]) -> tuple[R, ...]:
    """Return those in bfloat16 once more, in float16 and for the full profile."""
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
