"""The pinned workloads of routers with a capacity: too small, just large enough, or larger.

A run calls the same router with its capacity and without, which shows the selection before slots are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.half_precision import drawn_in
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import Batch, Lead, ParameterKey, Workload
from moe_conformance.workloads.routers import ONE_WITHOUT, TOKENS
from moe_conformance.workloads.selection.profiles import Profile


@dataclass(frozen=True)
class CapacityRecipe:
    """The name and options of one workload of a router with a capacity."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = TOKENS  # rank r has the entry r modulo the length
    schedule: str = "F0 B0"
    alike: int = 1  # so many consecutive tokens are the same token, with equal weights
    shift: float = 0.0  # added to all logits
    hot: bool = False  # one expert is the first choice of every token
    lead: Lead = "flat"
    same: bool = False  # even ranks have the same input in every microbatch, odd ones do not
    profile: Profile = "quick"


_SOFT = {"routing.score": "softmax_topk"}
_BIASED = {"routing.score": "sigmoid", "routing.balance_bias": True, "routing.normalise": True, "routing.scale": 2.5}
_BY_PLACE = {"capacity.drop_policy": "position"}

CAPACITIES = (
    CapacityRecipe("capacity-tight", {"capacity.factor": 0.5}),
    CapacityRecipe("capacity-tight-position", {"capacity.factor": 0.5, "top_k": 3, **_BY_PLACE}),
    CapacityRecipe("capacity-mean", {"capacity.factor": 1.0, **_SOFT}),
    CapacityRecipe("capacity-mean-position", {"capacity.factor": 1.0, **_BY_PLACE}, tokens=(40, 24, 33, 29)),
    CapacityRecipe(
        "capacity-gshard", {"capacity.factor": 1.0, "routing.normalise": True, **_BY_PLACE}, tokens=(40, 24, 32, 16)
    ),
    CapacityRecipe("capacity-switch", {"capacity.factor": 1.0, "top_k": 1, **_BY_PLACE}, tokens=(40, 24, 32, 16)),
    CapacityRecipe("capacity-fraction", {"capacity.factor": 1.3, "experts": 6, "top_k": 3, "hidden": 40}),
    CapacityRecipe("capacity-normalised", {"capacity.factor": 0.75, "routing.normalise": True, "top_k": 3}),
    CapacityRecipe("capacity-biased", {"capacity.factor": 1.0, **_BIASED}),
    CapacityRecipe("capacity-biased-position", {"capacity.factor": 1.0, **_BIASED, **_BY_PLACE}),
    CapacityRecipe("capacity-of-one", {"capacity.factor": 0.01, **_SOFT}),
    CapacityRecipe("capacity-of-none", {"capacity.factor": 0.0}),
    CapacityRecipe("capacity-minimum", {"capacity.factor": 0.5, "capacity.minimum": 4}),
    CapacityRecipe("capacity-minimum-position", {"capacity.factor": 0.25, "capacity.minimum": 3, **_BY_PLACE}),
    CapacityRecipe("capacity-minimum-beyond", {"capacity.factor": 0.5, "capacity.minimum": 64}),
    # GShard's gates of two and of more experts, which normalise.
    CapacityRecipe(
        "capacity-minimum-gshard",
        {"capacity.factor": 0.25, "capacity.minimum": 4, "routing.normalise": True, **_BY_PLACE},
    ),
    CapacityRecipe(
        "capacity-minimum-normalised",
        {"capacity.factor": 0.25, "capacity.minimum": 5, "routing.normalise": True, "top_k": 3},
    ),
    CapacityRecipe("capacity-of-all", {"capacity.factor": 4.0}),  # E / K: C = T
    CapacityRecipe("capacity-beyond", {"capacity.factor": 10.0, **_SOFT}),
    CapacityRecipe("capacity-beyond-position", {"capacity.factor": 10.0, **_BY_PLACE}),
    CapacityRecipe("capacity-ties", {"capacity.factor": 0.6, **_SOFT}, alike=3),
    CapacityRecipe("capacity-equal-weights", {"capacity.factor": 0.5, "top_k": 1, **_SOFT}),
    CapacityRecipe("capacity-negative-logits", {"capacity.factor": 1.0, **_SOFT}, shift=-24.0),
    CapacityRecipe("capacity-hot-expert", {"capacity.factor": 1.25, **_SOFT}, hot=True),
    CapacityRecipe("capacity-hot-expert-position", {"capacity.factor": 1.25, **_BY_PLACE}, hot=True),
    CapacityRecipe("capacity-one-token", {"capacity.factor": 1.0, **_SOFT}, tokens=(1,)),
    CapacityRecipe("capacity-rank-without-tokens", {"capacity.factor": 0.75, **_SOFT}, tokens=ONE_WITHOUT),
    CapacityRecipe("capacity-of-own-tokens", {"capacity.factor": 1.0, **_SOFT}, schedule="F0 B0 F1 B1", same=True),
    CapacityRecipe(
        "capacity-of-own-tokens-position",
        {"capacity.factor": 1.0, **_BY_PLACE},
        schedule="F0 B0 F1 B1",
        same=True,
    ),
    CapacityRecipe("capacity-filled-up", {"capacity.factor": 1.0, "capacity.padded": True, **_SOFT}),
    CapacityRecipe("capacity-in-flight", {"capacity.factor": 0.75, **_SOFT}, schedule="F0 F1 B0 B1"),
    CapacityRecipe("capacity-two-dims", {"capacity.factor": 0.75}, lead="two_dims"),
    CapacityRecipe("capacity-two-dims-position", {"capacity.factor": 0.75, **_BY_PLACE}, lead="two_dims"),
    CapacityRecipe("capacity-many-tokens-position", {"capacity.factor": 2.0, **_BY_PLACE}, tokens=(600,), hot=True),
    CapacityRecipe("capacity-bfloat16", {"capacity.factor": 0.75, "dtype": torch.bfloat16}),
    CapacityRecipe("capacity-float16", {"capacity.factor": 0.75, "dtype": torch.float16}, profile="full"),
    CapacityRecipe("capacity-float64", {"capacity.factor": 0.75, "dtype": torch.float64}),
)


def capacities(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of routers with a capacity; they do not depend on the variant."""
    for recipe in drawn_in(profile, CAPACITIES):
        yield capacity_workload(recipe, variant, layout)


def capacity_workload(recipe: CapacityRecipe, variant: str, layout: Layout) -> Workload:
    """Draw the workload of a recipe on a layout."""
    config = Config(variant=variant).changed(recipe.config)
    parameters = _parameters(recipe, config, layout)
    microbatches = schedule.microbatches(recipe.schedule)
    batches = tuple(
        tuple(_batch(recipe, config, layout, microbatch, rank, parameters) for rank in range(layout.world))
        for microbatch in range(microbatches)
    )
    run = RouterStep(capacity=True)
    return Workload(recipe.name, run, config, layout, batches, recipe.schedule, parameters, recipe.lead)


def _parameters(recipe: CapacityRecipe, config: Config, layout: Layout) -> dict[ParameterKey, torch.Tensor]:
    """Return the router; if logits are shifted, the first column is 1 for every expert."""
    generator = draw.generator(recipe.name, layout.name, "router")
    parameters = draw.router_parameters(config, generator, bias=0.0, twins=False)
    if recipe.shift:
        parameters["router", None][:, 0] = 1.0
    return parameters


def _batch(
    recipe: CapacityRecipe,
    config: Config,
    layout: Layout,
    microbatch: int,
    rank: int,
    parameters: dict[ParameterKey, torch.Tensor],
) -> Batch:
    turn = 0 if recipe.same and rank % 2 == 0 else microbatch
    tokens = recipe.tokens[(rank + turn) % len(recipe.tokens)]
    batch = draw.route_batch(tokens, config, draw.generator(recipe.name, layout.name, turn, rank), 1.0)
    x_TD = batch.x_TD
    if recipe.alike > 1:
        x_TD = x_TD[torch.arange(tokens) // recipe.alike * recipe.alike]
    if recipe.shift:
        x_TD[:, 0] = recipe.shift
    if recipe.hot:
        hot_D = parameters["router", None][config.experts - 2]
        x_TD += 12.0 * hot_D / (hot_D @ hot_D)
    return replace(batch, x_TD=x_TD)


def fits_all(workload: Workload) -> bool:
    """Return whether the capacity of every rank is at least its number of tokens."""
    config = workload.config
    assert config.capacity.factor is not None
    return config.capacity.factor * config.top_k >= config.experts or config.capacity.minimum >= max(TOKENS)


def others_change(workload: Workload) -> bool:
    """Return whether some rank has the same input in several microbatches while another has not."""
    first, *later = workload.batches
    return any(
        len({torch.equal(one.x_TD, other.x_TD) for one, other in zip(first, ranks, strict=True)}) == 2
        for ranks in later
    )


CHAPTERS = (
    Chapter(
        (RouterStep(capacity=True),),
        tuple(recipe.name for recipe in CAPACITIES),
        capacities,
        quick=(SINGLE, EP2, TP2_EP2),
    ),
)
