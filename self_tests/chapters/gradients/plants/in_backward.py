"""Correct: experts whose gradients are summed over replicas in backwards, as DDP does, and not afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.contract import Config, Topology


class _Reduced(Experts):
    """A gradient is summed over the replicas as soon as it is accumulated: right for one microbatch a step."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self._groups = [topology.group(name) for name in self.replicas]
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        for group in self._groups:
            dist.all_reduce(parameter.grad, group=group)


class _NothingLeft(GradientFinisher):
    """Nothing is left to be summed."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        pass


class ReducesInBackward(Native):
    """Native with these experts."""

    name = "native-reduces-in-backward"
    session_class = NativeSession.building(_Reduced, _NothingLeft)
