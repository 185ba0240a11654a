"""Scripts for router replay: record microbatches, replay them in other orders, with other logits, and incomplete.

There are layers without a router before and between those that have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, Replay
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ON_REPLAY_ROUTERS
from moe_conformance.workloads.records.training import Change, RouterBatch
from moe_conformance.workloads.records.workload import Call, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

_B, _M, _POSITIONS = 2, 3, (5, 4)  # sequences, microbatches, and positions by rank, alternating
CHANGES: tuple[Change, ...] = (
    "a layer is missing",
    "a microbatch is missing",
    "a token is missing",
    "a slot is missing",
)


_THREE = Replay((1, 3, 4))


@dataclass(frozen=True)
class _Recipe:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    replay: Replay = _THREE
    schedules: tuple[str, ...] = ("F0 B0 F1 B1 F2 B2", "F0 F1 F2 B0 B1 B2", "F1 F2 F0 B2 B0 B1")


_RECIPES = (
    _Recipe("replay", {"routing.score": "sigmoid", "routing.normalise": True, "routing.balance_bias": True}),
    _Recipe("replay-softmax", {"top_k": 3}, Replay((1, 3))),
    _Recipe("replay-softmax-topk", {"routing.score": "softmax_topk"}, Replay((0, 2))),
    _Recipe("replay-recomputed", {}, Replay((1, 3), recompute=True)),
)
NAMES = (*(recipe.name for recipe in _RECIPES), "replay-lacking")


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts; in the quick profile most of them on one rank only, as nothing is exchanged."""
    if layout.world > USUAL_RANKS or layout.pp > 1:
        return
    for recipe in _RECIPES:
        if profile == "quick" and layout.world > 1 and recipe != _RECIPES[0]:
            continue
        yield _script(recipe, variant, layout)
    if layout.world == 1 or profile == "full":
        yield _lacking(variant, layout)


def _script(recipe: _Recipe, variant: str, layout: Layout) -> Workload:
    """Return the script that records, replays the same tokens, then other tokens in every schedule."""
    config, parameters = _model(recipe, variant)
    recorded = _batches(recipe.name, config, layout, 0)
    calls = [Call("record", tuple({"batches": of_rank} for of_rank in recorded))]
    for number, schedule in enumerate(recipe.schedules):
        batches = _batches(recipe.name, config, layout, number)
        calls.append(Call("replay", tuple({"batches": of_rank, "schedule": schedule} for of_rank in batches)))
    return Workload(recipe.name, ON_REPLAY_ROUTERS, config, layout, (), parameters=parameters, calls=tuple(calls))


def _lacking(variant: str, layout: Layout) -> Workload:
    """Return the script that records, and replays with part of the last record missing."""
    recipe = _Recipe("replay-lacking", {"top_k": 3}, Replay((1, 3)))
    config, parameters = _model(recipe, variant)
    batches = _batches(recipe.name, config, layout, 0)
    calls = [Call("record", tuple({"batches": of_rank} for of_rank in batches))]
    for change in CHANGES:
        given = tuple({"batches": of_rank, "schedule": "F0 F1 F2", "change": change} for of_rank in batches)
        calls.append(Call("replay", given, may_raise=True))
    return Workload(recipe.name, ON_REPLAY_ROUTERS, config, layout, (), parameters=parameters, calls=tuple(calls))


def _model(recipe: _Recipe, variant: str) -> tuple[Config, dict[ParameterKey, Tensor]]:
    config = Config(variant, hidden=16, replay=recipe.replay).changed(recipe.options)
    parameters: dict[ParameterKey, Tensor] = {}
    for layer in recipe.replay.layers:
        generator = draw.generator(recipe.name, layer)
        made = draw.router_parameters(config, generator, bias=0.0, twins=False)
        parameters |= {(name, layer): value for (name, _), value in made.items()}
    return config, parameters


def _batches(name: str, config: Config, layout: Layout, number: int) -> list[tuple[RouterBatch, ...]]:
    """Return the microbatches of every rank; another `number` gives as many other tokens."""

    def one(rank: int, m: int) -> RouterBatch:
        g = draw.generator(name, "tokens", number, rank, m)
        S, layers = _POSITIONS[rank % len(_POSITIONS)], config.replay.layers
        x = tuple(torch.randn(S, _B, config.hidden, generator=g) for _ in layers)
        upstream = tuple(torch.randn(S * _B, config.experts, generator=g) for _ in layers)
        return RouterBatch(x, upstream, None)

    return [tuple(one(rank, m) for m in range(_M)) for rank in range(layout.world)]


CHAPTERS = (Chapter((ON_REPLAY_ROUTERS,), NAMES, scripts, quick=(SINGLE, EP2)),)
