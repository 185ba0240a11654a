"""Build a trainer for scripts, in which every call is a training step, and bring back what is there after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Trainer, TrainingBatch
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.script_surface import ScriptSurface
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.workloads.records.workload import ParameterKey, Workload


@dataclass(frozen=True)
class StepSeen:
    """The record of one step: its report, and parameters and what the optimiser keeps of them after it.

    `kept` has by name ("first", ...) what is kept of every parameter of this rank of which it is kept.
    """

    loss: Tensor
    norm: Tensor | None
    updated: bool
    parameters: Mapping[ParameterKey, Tensor]
    kept: Mapping[str, Mapping[ParameterKey, Tensor]]
    shards: Mapping[ParameterKey, tuple[int, int, int] | None]  # `Named.shard` of every parameter


class TrainedModel(ScriptSurface[Trainer]):
    """A trainer, and the record of its steps."""

    def __init__(self, surface: Trainer) -> None:
        """Keep the trainer."""
        super().__init__(surface)
        self.begun = False

    def step(self, batches: tuple[TrainingBatch, ...]) -> StepSeen:
        """Run one step and return its record."""
        if not self.begun:
            self.surface.begin()
            self.begun = True
        report = self.surface.step(batches)
        windows = list(self.surface.named(lambda parameter: parameter.detach()))
        return StepSeen(
            loss=report.loss.detach().reshape(()),
            norm=None if report.norm is None else report.norm.detach().reshape(()),
            updated=report.updated,
            parameters={(each.name, each.expert): each.view.clone() for each in windows},
            kept=self._kept(),
            shards={(each.name, each.expert): each.shard for each in windows},
        )

    def _kept(self) -> dict[str, dict[ParameterKey, Tensor]]:
        """Read what is kept through the windows, name by name; a parameter of which it is not kept is left out."""
        names: set[str] = set()

        def note(parameter: Tensor) -> Tensor:
            names.update(self.surface.kept(parameter))
            return parameter.detach()

        for _ in self.surface.named(note):
            pass
        return {name: self._kept_as(name) for name in sorted(names)}

    def _kept_as(self, name: str) -> dict[ParameterKey, Tensor]:
        absent: list[Tensor] = []

        def read(parameter: Tensor) -> Tensor:
            value = self.surface.kept(parameter).get(name)
            if value is None:
                value = torch.zeros_like(parameter)
                absent.append(value)
            return value.detach()

        found = {(each.name, each.expert): each.view for each in self.surface.named(read)}
        storages = {value.untyped_storage().data_ptr() for value in absent}
        return {key: view.clone() for key, view in found.items() if view.untyped_storage().data_ptr() not in storages}


def trained_model(kept: Opened, workload: Workload, context: RankContext) -> TrainedModel:
    """Build the trainer, and what records its steps."""
    return TrainedModel(build(kept.session, "trainer", workload.config))


SCRIPT_SURFACES: Mapping[str, Any] = {"trainer": trained_model}
