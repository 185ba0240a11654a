"""Scripts for adding rows back into an output, in place and not.

Each calls both forms twice on the same values, so that runs can be compared bit for bit; with two ranks both have the
same inputs, so that two processes can. Values are not whole numbers: another order of addition gives other bits. Output
rows that no index names hold -0.0, whose sign an addition of zero would lose.
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
class _Recipe:
    """How to draw one script: N output rows, of which the last is never named, and J source rows."""

    name: str
    rows: int
    sources: int
    dtype: torch.dtype = torch.float32
    one_row: bool = False  # all indices are equal

    def index(self, generator: torch.Generator) -> Tensor:
        """Return index_J, with as many repeats as there are more sources than rows."""
        named = 1 if self.one_row else max(1, self.rows - 1)
        return torch.randint(0, named, (self.sources,), generator=generator)


_RECIPES = (
    _Recipe("scatter-repeats", 9, 200),
    _Recipe("scatter-repeats-bfloat16", 9, 200, torch.bfloat16),
    _Recipe("scatter-repeats-float16", 9, 200, torch.float16),
    _Recipe("scatter-one-row", 5, 60, one_row=True),
    _Recipe("scatter-few", 40, 11),
    _Recipe("scatter-nothing-added", 6, 0),
    _Recipe("scatter-no-rows", 0, 0),
)
NAMES = tuple(recipe.name for recipe in _RECIPES)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on one rank, and on two that have the same inputs."""
    del profile
    if layout in (SINGLE, EP2):
        for recipe in _RECIPES:
            yield _script(recipe, Config(variant=variant, hidden=_D, dtype=recipe.dtype), layout)


def _script(recipe: _Recipe, config: Config, layout: Layout) -> Workload:
    g = draw.generator(recipe.name)
    out_ND = torch.randn(recipe.rows, _D, generator=g).to(recipe.dtype)
    out_ND[-1:] = -0.0
    src_JD = torch.randn(recipe.sources, _D, generator=g).to(recipe.dtype)
    given = {"out_ND": out_ND, "index_J": recipe.index(g), "src_JD": src_JD}
    # A library may have no form in place, and refuse it: what is out of place is judged all the same.
    methods = ("add", "add_", "add", "add_")
    calls = tuple(Call(method, (given,) * layout.world, may_raise=method == "add_") for method in methods)
    return Workload(recipe.name, Script("scatter_add"), config, layout, (), calls=calls)


CHAPTERS = (Chapter((Script("scatter_add"),), NAMES, scripts, quick=(SINGLE, EP2)),)
