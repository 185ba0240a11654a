"""Scripts of a few training steps of a small model: AdamW with clipping, SGD, accumulation, a gradient not finite.

Numbers of counted tokens differ between ranks, microbatches and steps; in step s expert s has no token in any layer.
Nothing is nearly a tie: a token that parameters of the next steps would send elsewhere is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, Training, TrainingBatch
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

ON_TRAINER = Script("trainer")

_E, _D, _F, _TOKENS = 8, 16, 12, 6
_FLAG, _SHY = 2.0, 12.0  # x of step s has _FLAG in column s, and the router of expert s has -_SHY / _FLAG there
QUICK = (SINGLE, EP2, EP2_EDP2, TP2_EP2)


@dataclass(frozen=True)
class Recipe:
    """The steps and options of one script."""

    name: str
    training: Training
    steps: int = 2
    microbatches: int = 2
    not_finite: int | None = None  # the step in which a target of the last rank is infinite
    seed: int = 0
    layouts: tuple[Layout, ...] = QUICK  # in the quick profile; elsewhere other scripts show the same
    options: Mapping[str, Any] = field(default_factory=dict)


_ADAMW = Training(epsilon=1e-4, decay=0.1, largest_norm=0.5)
_SGD = Training(optimiser="sgd", rate=0.05, decay=0.1)
_RECIPES = (
    Recipe("train-adamw", _ADAMW, steps=4),
    Recipe("train-sgd", _SGD, layouts=(EP2, TP2_EP2)),
    Recipe("train-sgd-clipped", Training(optimiser="sgd", rate=0.05, largest_norm=0.5), layouts=(EP2, EP2_EDP2)),
    Recipe("train-sgd-four-microbatches", _SGD, steps=1, microbatches=4, layouts=(SINGLE, EP2)),
    Recipe("train-not-finite", Training(decay=0.1, largest_norm=0.5), steps=3, not_finite=1, layouts=(SINGLE, EP2)),
)
NAMES = tuple(recipe.name for recipe in _RECIPES)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on layouts with one pipeline stage, whose dense parameters divide over tp."""
    if layout.pp > 1 or _F % layout.tp or _E % layout.ep or _F % layout.etp:
        return
    for recipe in _RECIPES:
        if profile == "full" or layout in recipe.layouts:
            yield script(recipe.name, layout).through(variant)


@lru_cache(maxsize=64)
def script(name: str, layout: Layout) -> Workload:
    """Return the script of a recipe."""
    recipe = next(each for each in _RECIPES if each.name == name)
    config = Config(experts=_E, hidden=_D, ffn=_F, training=recipe.training).changed(recipe.options)
    calls = tuple(
        Call("step", tuple({"batches": _batches(recipe, layout, step, rank)} for rank in range(layout.world)))
        for step in range(recipe.steps)
    )
    return Workload(name, ON_TRAINER, config, layout, (), parameters=_parameters(recipe, config), calls=calls)


def _parameters(recipe: Recipe, config: Config) -> dict[ParameterKey, Tensor]:
    g = draw.generator(recipe.name, "parameters", recipe.seed)
    drawn: dict[ParameterKey, Tensor] = {}
    for number in range(config.training.dense_layers + config.training.layers):
        dense = number < config.training.dense_layers
        for e in (None,) if dense else range(config.experts):
            for name, size in (("gate", (_F, _D)), ("up", (_F, _D)), ("down", (_D, _F))):
                drawn[f"layer{number}/{name}", e] = torch.randn(size, generator=g) * size[1] ** -0.5 / 2
        if not dense:
            router_ED = torch.randn(config.experts, _D, generator=g) * _D**-0.5
            for step in range(recipe.steps):
                router_ED[:, step] = 0.0
                router_ED[step, step] = -_SHY / _FLAG
            drawn[f"layer{number}/router", None] = router_ED
    return drawn


def _batches(recipe: Recipe, layout: Layout, step: int, rank: int) -> tuple[TrainingBatch, ...]:
    """Return the microbatches of a rank; those of a tp group have equally many tokens."""
    group = rank // layout.tp  # of tp: all of them have equally many tokens, and data parallel groups have not
    found = []
    for m in range(recipe.microbatches):
        g = draw.generator(recipe.name, "tokens", recipe.seed, layout.name, step, m, rank)
        T = _TOKENS + (group + m) % 3
        x_TD = torch.randn(T, _D, generator=g)
        x_TD[:, : recipe.steps] = 0.0
        x_TD[:, step] = _FLAG
        target_TD = torch.randn(T, _D, generator=g)
        counted_T = torch.arange(T) % 3 != (rank + m) % 3
        counted_T[T - 2 * ((group + m + step) % 3) :] = False  # 0, 2 or 4 of the last ones
        if step == recipe.not_finite and rank == layout.world - 1 and m == 0:
            target_TD[int(counted_T.nonzero()[0]), 0] = torch.inf
        found.append(TrainingBatch(x_TD, target_TD, counted_T))
    return tuple(found)


CHAPTERS = (Chapter((ON_TRAINER,), NAMES, scripts, quick=QUICK),)
