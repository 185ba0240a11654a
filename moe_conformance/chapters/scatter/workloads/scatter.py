"""Scripts that add rows to an output, in place and out of place.

A script calls both forms twice on the same values, to compare results bit for bit; two ranks have the same inputs, to
compare two processes. Values are not whole numbers, so that another order of addition gives other bits. Output rows
that no index names hold -0.0, whose sign an addition of zero would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import Profile

_D = 7


@dataclass(frozen=True)
class Recipe:
    """The sizes of one script: N output rows, of which no index names the last, and J source rows."""

    name: str
    rows: int
    sources: int
    dtype: torch.dtype = torch.float32
    one_row: bool = False  # all indices are equal

    def index(self, generator: torch.Generator) -> Tensor:
        """Return a random index_J, with repeats if there are more source rows than output rows."""
        named = 1 if self.one_row else max(1, self.rows - 1)
        return torch.randint(0, named, (self.sources,), generator=generator)


_RECIPES = (
    Recipe("scatter-repeats", 9, 200),
    Recipe("scatter-repeats-bfloat16", 9, 200, torch.bfloat16),
    Recipe("scatter-repeats-float16", 9, 200, torch.float16),
    Recipe("scatter-one-row", 5, 60, one_row=True),
    Recipe("scatter-few", 40, 11),
    Recipe("scatter-nothing-added", 6, 0),
    Recipe("scatter-no-rows", 0, 0),
)
NAMES = tuple(recipe.name for recipe in _RECIPES)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on one rank, and on two ranks with the same inputs."""
    del profile
    if layout in (SINGLE, EP2):
        for recipe in _RECIPES:
            yield script(recipe, Config(variant=variant, hidden=_D, dtype=recipe.dtype), layout)


def script(recipe: Recipe, config: Config, layout: Layout) -> Workload:
    """Return the script of a recipe, of rows as wide as the config says."""
    g = draw.generator(recipe.name)
    out_ND = torch.randn(recipe.rows, config.hidden, generator=g).to(recipe.dtype)
    out_ND[-1:] = -0.0
    src_JD = torch.randn(recipe.sources, config.hidden, generator=g).to(recipe.dtype)
    given = {"out_ND": out_ND, "index_J": recipe.index(g), "src_JD": src_JD}
    # A library may have no in-place form and refuse it; the other form is judged in any case.
    methods = ("add", "add_", "add", "add_")
    calls = tuple(Call(method, (given,) * layout.world, may_raise=method == "add_") for method in methods)
    return Workload(recipe.name, Script("scatter_add"), config, layout, (), calls=calls)


CHAPTERS = (Chapter((Script("scatter_add"),), NAMES, scripts, quick=(SINGLE, EP2)),)
