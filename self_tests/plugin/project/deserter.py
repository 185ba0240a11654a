"""A toy that ends a process of the launcher, as the loss of a machine would."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, LocalExchange
from moe_conformance.contract import Config, Delivery, Routing
from self_tests.plugin.project.backend import Toy, ToySession


def parent_of(pid: int) -> int:
    """Return the id of the process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Deserting(AllToAllExchange):
    """Kills, on the last rank, the process that started the one from which the rank was forked."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Kill it, if there are other ranks."""
        if self.topology.rank == 1:
            os.kill(parent_of(os.getppid()), signal.SIGKILL)
        if dist.get_world_size() > 1:
            dist.barrier()
        return super().dispatch(x, routing)


class DeserterSession(ToySession):
    """Builds what the variant says."""

    def exchange(self, config: Config) -> LocalExchange:
        """Build."""
        if config.variant == "deserts":
            return Deserting(replace(config, variant="alltoall"), self.topology)
        return super().exchange(config)


class Deserter(Toy):
    """A toy of which one variant takes a machine down."""

    variants = ("right", "deserts", "refuses")  # type: ignore[assignment]
    session_class = DeserterSession
