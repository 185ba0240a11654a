"""Steps of two layers and several microbatches, sequential and overlapped, and exchanges in chunks.

Tokens, upstream gradients and the number of tokens differ between microbatches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, Chapter
from moe_conformance.workloads.recipes import EVEN, ONE_WITHOUT, UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.routes import dropped, one_expert
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Asynchrony, Batch, Drawn, ParameterKey, Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

CHUNKED = ExchangeStep(option="chunks")


@dataclass(frozen=True)
class OverlapStep:
    """The run of steps of several layers, sequential and as the backend overlaps them."""

    scenario: ClassVar[str] = "overlapped steps"

    def __str__(self) -> str:
        """Return `overlapped steps`."""
        return "overlapped steps"


@dataclass(frozen=True)
class StepRecipe:
    """The options of one workload of overlapped steps; rank r has entry r + m of `tokens` in microbatch m."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = UNEVEN
    microbatches: int = 3
    asynchrony: Asynchrony = "plain"
    late: float = 0.0  # seconds before every tenth operator
    profile: Profile = "quick"


_FEW = (2, 1)  # of 8 experts most are idle, before and behind busy ones
_SHARED = {"shared.ffn": (20,)}
_DEFERRED = {"overlap.deferred_weights": True}
_HALF = {"dtype": torch.bfloat16}  # the only kind of model that Megatron-Core overlaps
_GATED = {**_SHARED, "shared.gate": True}

STEPS = (
    StepRecipe("overlap-even", _SHARED, tokens=EVEN),
    StepRecipe("overlap-uneven"),
    StepRecipe("overlap-rank-without-tokens", _SHARED, tokens=ONE_WITHOUT),
    StepRecipe("overlap-one-microbatch-uneven", microbatches=1, profile="full"),
    StepRecipe("overlap-poisoned-uneven", _SHARED, asynchrony="poisoned"),
    StepRecipe("overlap-watched-uneven", {**_SHARED, **_DEFERRED}, microbatches=2, asynchrony="watched"),
    StepRecipe("overlap-delayed-uneven", {**_SHARED, **_DEFERRED}, asynchrony="poisoned", late=0.0002),
    StepRecipe(
        "overlap-deferred-one-microbatch-uneven", {**_SHARED, **_DEFERRED, "experts": 8}, tokens=_FEW, microbatches=1
    ),
    StepRecipe("overlap-deferred-uneven", {**_GATED, **_DEFERRED}, microbatches=2),
    StepRecipe("overlap-deferred-rank-without-tokens", {**_SHARED, **_DEFERRED}, tokens=ONE_WITHOUT, microbatches=4),
    StepRecipe("overlap-deferred-even-bfloat16", {**_SHARED, **_DEFERRED, **_HALF}, tokens=EVEN),
    StepRecipe("overlap-uneven-bfloat16", {**_GATED, **_HALF}),
    StepRecipe("overlap-watched-uneven-bfloat16", {**_SHARED, **_HALF}, microbatches=2, asynchrony="watched"),
    StepRecipe("overlap-delayed-uneven-bfloat16", {**_SHARED, **_HALF}, asynchrony="poisoned", late=0.0002),
    StepRecipe("overlap-deferred-uneven-bfloat16", {**_GATED, **_DEFERRED, **_HALF}, microbatches=2),
    StepRecipe(
        "overlap-deferred-rank-without-tokens-bfloat16",
        {**_SHARED, **_DEFERRED, **_HALF},
        tokens=ONE_WITHOUT,
        microbatches=4,
    ),
    StepRecipe("overlap-dropped-even-bfloat16", {"capacity.factor": 0.5, **_HALF}, tokens=(22,), microbatches=2),
    StepRecipe(
        "overlap-recomputed-uneven-bfloat16", {**_GATED, **_DEFERRED, "overlap.recompute_experts": True, **_HALF}
    ),
    StepRecipe("overlap-recomputed-uneven", {**_SHARED, "overlap.recompute_experts": True}),
    StepRecipe("overlap-recomputed-deferred-uneven", {**_DEFERRED, "overlap.recompute_experts": True}, microbatches=2),
    StepRecipe("overlap-dropped-even", {"capacity.factor": 0.5}, tokens=(22,), microbatches=2),
    StepRecipe("overlap-gate-uneven", _GATED, profile="full"),
    StepRecipe("overlap-bias-even", {**_SHARED, "shared.bias": True}, tokens=EVEN, profile="full"),
    StepRecipe("overlap-padded-to-capacity-even", {"capacity.padded": True}, tokens=EVEN, profile="full"),
)
NAMES = tuple(recipe.name for recipe in STEPS)


def steps(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the overlapped steps of a variant on a layout."""
    for recipe in STEPS:
        if layout.world > USUAL_RANKS or (recipe.asynchrony != "plain" and layout.world == 1):
            continue
        if profile == "full" or recipe.profile == "quick":
            yield _drawn(recipe.name, layout).through(variant)


@lru_cache(maxsize=64)  # more than a layout has
def _drawn(name: str, layout: Layout) -> Workload:
    return step_workload(next(step for step in STEPS if step.name == name), layout)


def step_workload(recipe: StepRecipe, layout: Layout) -> Workload:
    """Return the workload of a recipe on a layout."""
    name = recipe.name
    config = Config(experts=max(4, 2 * layout.ep), hidden=16, ffn=12).changed({"overlap.layers": 2, **recipe.config})
    parameters: dict[ParameterKey, torch.Tensor] = {}
    for layer in range(config.overlap.layers):
        drawn = shared_experts.layer_parameters(config, draw.generator(name, layout.name, "layer", layer))
        parameters |= {(f"layer{layer}/{key}", expert): value for (key, expert), value in drawn.items()}
    sizes = recipe.tokens
    tokens = tuple(
        tuple(sizes[(rank + m) % len(sizes)] for rank in range(layout.world)) for m in range(recipe.microbatches)
    )

    def batch(m: int, rank: int) -> Batch:
        generator, size = draw.generator(name, layout.name, m, rank), (tokens[m][rank], config.hidden)
        x_TD, upstream = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
        none = torch.empty(len(x_TD), 0)
        return Batch(x_TD.to(config.dtype), none.long(), none, upstream.to(config.dtype))

    late = tuple(recipe.late * (1 + rank) for rank in range(layout.world)) if recipe.late else ()
    return Workload(
        name,
        OverlapStep(),
        config,
        layout,
        Drawn(tokens, batch),
        "",
        parameters,
        asynchrony=recipe.asynchrony,
        twist=Twist(deterministic=True, late=late),
    )


_TWO, _THREE, _FOUR = ({"overlap.chunks": chunks} for chunks in (2, 3, 4))

CHUNKS = (
    Recipe("chunks-1-even"),
    Recipe("chunks-2-uneven", tokens=UNEVEN, config=_TWO),
    Recipe("chunks-3-rank-without-tokens", tokens=ONE_WITHOUT, config=_THREE),
    Recipe("chunks-4-one-token-even", tokens=(1,), config=_FOUR),
    Recipe("chunks-4-dropped-even", dropped, config=_FOUR),
    Recipe("chunks-2-one-expert-uneven", one_expert, tokens=UNEVEN, config={**_TWO, "top_k": 1}, profile="full"),
    Recipe("chunks-3-poisoned-even", config=_THREE, schedule="F0 F1 B1 B0", asynchrony="poisoned"),
)


def chunked(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the exchanges in chunks of a variant on a layout."""
    for recipe in CHUNKS:
        if layout.world > USUAL_RANKS or (recipe.asynchrony != "plain" and layout.world == 1):
            continue
        if profile == "full" or recipe.profile == "quick":
            yield replace(exchange_workload(recipe, ExchangeStep(), variant, layout), run=CHUNKED)


CHAPTERS = (
    Chapter((OverlapStep(),), NAMES, steps, quick=(SINGLE, EP2, EP2_EDP2)),
    Chapter((CHUNKED,), tuple(recipe.name for recipe in CHUNKS), chunked, quick=(EP2, EP2_ETP2)),
)
