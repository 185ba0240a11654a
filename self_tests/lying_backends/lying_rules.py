"""Backends that accept settings and do not run what they accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native import NativeSession
from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.backends.native.layer.overlapped_step import OverlappedStep
from moe_conformance.contract import OverlappedStep as Step
from moe_conformance.contract import Settings
from self_tests.chapters.config_rules.plants.accepted import Altered, Dropping
from self_tests.lying_backends.lying import Liar


class _Nothing(Altered):
    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.zeros_like(x) for x in xs]


class _AcceptsAll(ConfigRules):
    def resolve(self, asked: Settings) -> Settings:
        return asked

    def step(self, asked: Settings) -> Step:
        return _Nothing(self.overlapped_step(self.step_config(asked)))


class RunsNothing(Liar):
    """Resolves every setting to what was asked, and its steps return zeros."""

    name = "lying-runs-nothing"
    session_class = NativeSession.building(_AcceptsAll)


class _Drops(Dropping):
    without: ClassVar = {
        "dispatcher": "alltoall",
        "recompute": "none",
        "recompute_method": None,
        "recompute_layers": None,
        "recompute_modules": (),
    }


class DropsOptions(Liar):
    """Accepts dispatchers and recomputation of all kinds, and builds the same step with each."""

    name = "lying-drops-options"
    session_class = NativeSession.building(_Drops)


class _NeverFinishes(ConfigRules):
    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        assert isinstance(step, OverlappedStep)
        for queue in step.queues:
            queue.compute = lambda: None  # type: ignore[method-assign]
        return step


class NeverFinishes(Liar):
    """Accepts deferred weight gradients, and never computes what was put off."""

    name = "lying-never-finishes"
    session_class = NativeSession.building(_NeverFinishes)


class _BothOverlaps(Dropping):
    without: ClassVar = {"overlap_shared": False}


class BothOverlaps(Liar):
    """Builds with both overlaps and says nothing, and the one between microbatches is all that there is."""

    name = "lying-both-overlaps"
    session_class = NativeSession.building(_BothOverlaps)
