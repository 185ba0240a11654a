"""Build the routers of scripts: those that record and replay microbatches, and those of a new model.

Every call of a script of router replay records microbatches or replays the records.

A tuple has an entry for every layer with a router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.contract import ReplayRouters, Routed, Trained
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.initial import InitialSurface, built_new
from moe_conformance.scenarios.script_surface import ScriptSurface
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.training import backward
from moe_conformance.workloads.records.training import Change, RouterBatch
from moe_conformance.workloads.records.workload import Workload

Place = tuple[int, int]


@dataclass(frozen=True)
class Replayed:
    """The results of one forward, and the gradients of its inputs after the backward."""

    ids: tuple[Tensor, ...]  # (T, K)
    weights: tuple[Tensor, ...]
    dx: tuple[Tensor | None, ...]  # (S, B, D); None where no backward ran


@dataclass(frozen=True)
class Recorded:
    """The recorded ids by layer and microbatch, and the results of the forwards."""

    forwards: tuple[Replayed, ...]  # by microbatch
    places: tuple[Place, ...]
    ids: tuple[Tensor, ...]  # of these places


@dataclass(frozen=True)
class ReplayedStep:
    """The results of the forwards of a step."""

    forwards: tuple[Replayed, ...]  # by microbatch


class ReplayedRouters(ScriptSurface[ReplayRouters]):
    """The surface of scripts about router replay: the routers of a model, and copies of their records."""

    def __init__(self, surface: ReplayRouters) -> None:
        """Keep the routers."""
        super().__init__(surface)
        self.kept: dict[Place, Tensor] = {}

    @torch.no_grad()
    def record(self, batches: tuple[RouterBatch, ...]) -> Recorded:
        """Record the microbatches in order, and keep copies of the records."""
        forwards = []
        for m, batch in enumerate(batches):
            x = tuple(x_of_layer.clone() for x_of_layer in batch.x)
            forwards.append(_seen(self.surface.record(m, x), x))
        self.kept = {place: ids_TK.clone() for place, ids_TK in self.surface.records().items()}
        places = tuple(sorted(self.kept))
        return Recorded(tuple(forwards), places, tuple(self.kept[place] for place in places))

    def replay(self, batches: tuple[RouterBatch, ...], schedule: str, change: Change = "") -> ReplayedStep:
        """Load the records, the last of which may be changed, and replay microbatches in a schedule."""
        self.surface.load(_changed(self.kept, change))
        made: dict[int, tuple[tuple[Routed, ...], tuple[Tensor, ...]]] = {}
        for item in schedule.split():
            m = int(item[1:])
            if item[0] == "F":
                x = tuple(x_of_layer.detach().clone().requires_grad_() for x_of_layer in batches[m].x)
                made[m] = (self.surface.replay(m, x), x)
            else:
                backward(batches[m], Trained(made[m][0]), 1.0)
        return ReplayedStep(tuple(_seen(*made[m]) for m in sorted(made)))


def _changed(records: Mapping[Place, Tensor], change: Change) -> dict[Place, Tensor]:
    """Return copies of the records; with a change the last record lacks something."""
    made = {place: ids_TK.clone() for place, ids_TK in records.items()}
    if not change:
        return made
    last = max(made, key=lambda place: (place[1], place[0]))
    if change == "a token is missing":
        made[last] = made[last][:-1].clone()
    elif change == "a slot is missing":
        made[last] = made[last][:, :-1].clone()
    else:
        lost = [last] if change == "a layer is missing" else [place for place in made if place[1] == last[1]]
        for place in lost:
            del made[place]
    return made


def _seen(returned: tuple[Routed, ...], x: tuple[Tensor, ...]) -> Replayed:
    return Replayed(
        ids=tuple(routed.routing.ids_TK for routed in returned),
        weights=tuple(routed.routing.weights_TK.detach() for routed in returned),
        dx=tuple(leaf.grad for leaf in x),
    )


def replayed_routers(kept: Opened, workload: Workload, context: RankContext) -> ReplayedRouters:
    """Build the routers for a script that records and replays microbatches."""
    return ReplayedRouters(build(kept.session, "replay_routers", workload.config))


def initial_router(kept: Opened, workload: Workload, context: RankContext) -> InitialSurface:
    """Build the router of a new model."""
    return built_new(kept, "initial_router", workload.config, context)


SCRIPT_SURFACES = {"replay_routers": replayed_routers, "initial_router": initial_router}
