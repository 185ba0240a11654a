"""Router replay on one rank: each call of a script records microbatches, or replays what was recorded.

A tuple has an entry for every layer with a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.contract import Claims, Named, Read, ReplayRouters, Routed, Trained
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.reported import claims_of
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.training import backward
from moe_conformance.workloads.records.training import Change, RouterBatch
from moe_conformance.workloads.records.workload import Workload

Place = tuple[int, int]


@dataclass(frozen=True)
class Replayed:
    """What one forward returned, and what its backward left at its inputs."""

    ids: tuple[Tensor, ...]  # (T, K)
    weights: tuple[Tensor, ...]
    dx: tuple[Tensor | None, ...]  # (S, B, D); None where no backward ran


@dataclass(frozen=True)
class Recorded:
    """What was recorded, by layer and microbatch, and what the forwards returned."""

    forwards: tuple[Replayed, ...]  # by microbatch
    places: tuple[Place, ...]
    ids: tuple[Tensor, ...]  # of these places


@dataclass(frozen=True)
class ReplayedStep:
    """What the forwards of a step returned."""

    forwards: tuple[Replayed, ...]  # by microbatch


class ReplayedRouters:
    """The routers of a model, and what was recorded of them."""

    def __init__(self, surface: ReplayRouters) -> None:
        """Keep what was built."""
        self.surface = surface
        self.kept: dict[Place, Tensor] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the routers report of themselves."""
        return self.surface.resolved

    @property
    def claims(self) -> Claims:
        """What the routers claim."""
        return claims_of(self.surface)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of the routers."""
        return self.surface.named(read)

    @torch.no_grad()
    def record(self, batches: tuple[RouterBatch, ...]) -> Recorded:
        """Record the microbatches in order, and keep copies of the records."""
        forwards = []
        for m, batch in enumerate(batches):
            x = tuple(each.clone() for each in batch.x)
            forwards.append(_seen(self.surface.record(m, x), x))
        self.kept = {place: ids_TK.clone() for place, ids_TK in self.surface.records().items()}
        places = tuple(sorted(self.kept))
        return Recorded(tuple(forwards), places, tuple(self.kept[place] for place in places))

    def replay(self, batches: tuple[RouterBatch, ...], schedule: str, change: Change = "") -> ReplayedStep:
        """Load what was recorded, changed for its last place where that is asked for, and follow a schedule."""
        self.surface.load(_changed(self.kept, change))
        made: dict[int, tuple[tuple[Routed, ...], tuple[Tensor, ...]]] = {}
        for item in schedule.split():
            m = int(item[1:])
            if item[0] == "F":
                x = tuple(each.detach().clone().requires_grad_() for each in batches[m].x)
                made[m] = (self.surface.replay(m, x), x)
            else:
                backward(batches[m], Trained(made[m][0]), 1.0)
        return ReplayedStep(tuple(_seen(*made[m]) for m in sorted(made)))


def _changed(records: Mapping[Place, Tensor], change: Change) -> dict[Place, Tensor]:
    """Return copies of the records, the last one of which lacks something."""
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
        dx=tuple(each.grad for each in x),
    )


def replayed_routers(kept: Opened, workload: Workload, context: RankContext) -> ReplayedRouters:
    """Build the routers, whose calls record or replay microbatches."""
    return ReplayedRouters(build(kept.session, "replay_routers", workload.config))


SCRIPT_SURFACES = {"replay_routers": replayed_routers}
