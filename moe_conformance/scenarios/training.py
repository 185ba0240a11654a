"""Run training steps of the routers of a model with their losses; every call of a script is one step.

T tokens, K slots, E experts, D hidden; a tuple has an entry for every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Session, Trained, TrainingRouters
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.scenarios.script_surface import ScriptSurface
from moe_conformance.workloads.records.training import Mode, RouterBatch

Layers = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Forward:
    """The results of one forward, and the gradients of its inputs after the backward."""

    ids: Layers
    weights: Layers
    logits: Layers
    loss: Tensor | None  # as it was returned; None: losses are attached, if there are any
    dx: Layers  # None where no backward ran


@dataclass(frozen=True)
class StepSeen:
    """The record of one step: its forwards in order, finished gradients of the routers, and the report after it."""

    forwards: tuple[Forward, ...]
    final: Layers  # (E, D) in the order of layers; None where nothing trained
    report: Mapping[str, Tensor] | None  # None: this backend reports nothing
    shards: tuple[tuple[int, int, int] | None, ...] = ()  # of the entries of `final`: `Named.shard`


class TrainedRouters(ScriptSurface[TrainingRouters]):
    """The routers of a model, and the trainer that runs their steps."""

    def __init__(self, surface: TrainingRouters, session: Session) -> None:
        """Keep the routers and the session."""
        super().__init__(surface)
        self.session = session

    def step(self, batches: tuple[RouterBatch, ...], scale: float, tokens: int, overlapped: bool) -> StepSeen:
        """Run one step, whose main loss is multiplied by `scale`, and return its record.

        If overlapped, all forwards precede all backwards. Without a batch in training nothing is finished.
        """
        parameters.clear([self.surface], self.session.grad_attr, to_zero=False)
        trained = sum(batch.mode == "training" for batch in batches)
        if trained:
            self.surface.begin_step(trained, scale)
        factor = scale / trained if trained and self.claims.loss_gradients == "mean" else scale
        made: list[tuple[Trained, tuple[Tensor, ...]]] = []
        for batch in batches:
            x = tuple(pair.detach().clone().requires_grad_(batch.mode == "training") for pair in batch.x)
            made.append((self._forward(batch, x), x))
            if not overlapped:
                backward(batch, made[-1][0], factor)
        if overlapped:
            for batch, (returned, _) in zip(batches, made, strict=True):
                backward(batch, returned, factor)
        if trained:
            self.surface.finish(tokens)
        final, report = self._final() if trained else (), self.surface.report()
        return StepSeen(
            tuple(_seen(*pair) for pair in made),
            tuple(grad.value for grad in final),
            None if report is None else {name: value.detach().clone() for name, value in report.items()},
            tuple(grad.shard for grad in final),
        )

    def _forward(self, batch: RouterBatch, x: tuple[Tensor, ...]) -> Trained:
        with in_mode(self.surface, batch.mode):
            return self.surface(x, batch.padding_T)

    def _final(self) -> tuple[Grad, ...]:
        found = parameters.gradients([self.surface], self.session.grad_attr)
        routers = sorted(number for name, number in found if name == "router" and number is not None)
        return tuple(found["router", number] for number in routers)


@contextmanager
def in_mode(surface: Any, mode: Mode) -> Iterator[None]:
    """Put a surface into a mode while the block runs, and into training mode afterwards."""
    surface.train(mode != "evaluation")
    try:
        with torch.no_grad() if mode == "no_grad" else nullcontext():
            yield
    finally:
        surface.train(True)


def backward(batch: RouterBatch, returned: Trained, factor: float) -> None:
    """Run the backward from the routing weights and, if losses were returned, from these."""
    if batch.mode != "training":
        return
    outputs, gradients = [], []
    for routed, upstream_TE in zip(returned.routed, batch.upstream, strict=True):
        ids_TK = routed.routing.ids_TK
        outputs.append(routed.routing.weights_TK)
        gradients.append((upstream_TE.gather(1, ids_TK.clamp_min(0)) * (ids_TK >= 0)).to(outputs[-1].dtype))
    if returned.loss is not None:
        outputs.append(returned.loss)
        gradients.append(torch.full_like(returned.loss, factor))
    torch.autograd.backward(outputs, gradients)


def _seen(returned: Trained, x: tuple[Tensor, ...]) -> Forward:
    return Forward(
        ids=tuple(routed.routing.ids_TK for routed in returned.routed),
        weights=tuple(routed.routing.weights_TK.detach() for routed in returned.routed),
        logits=tuple(None if router.logits_TE is None else router.logits_TE.detach() for router in returned.routed),
        loss=None if returned.loss is None else returned.loss.detach(),
        dx=tuple(leaf.grad for leaf in x),
    )
