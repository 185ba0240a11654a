"""Selects the device of each rank and the process-group backend of a world."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from .gpu.slices import visible
from .hosts import Placement
from .records import EngineError


def device_of(number: int, device: str, devices: int) -> torch.device:
    """Returns the device of the rank with that number on its machine; ranks share GPUs if there are fewer."""
    return torch.device("cpu") if device == "cpu" else torch.device(device, number % devices)


def assign(device: str, placements: Sequence[Placement]) -> tuple[list[str], str]:
    """Returns the device of each rank, from its placement, and the backend string of their process group.

    Ranks of a machine take the GPUs that they see in turn; with fewer GPUs than ranks, several ranks share one.
    NCCL refuses two ranks on one GPU (before 2.30), so that a world in which any two share one uses gloo, which copies
    CUDA tensors through host memory. A world that uses NCCL has gloo for its CPU tensors.

    Raises:
        EngineError: a rank would see no GPU.
    """
    if device == "cpu":
        return ["cpu"] * len(placements), "gloo"
    if blind := [rank for rank, placement in enumerate(placements) if not placement.gpus]:
        raise EngineError(f"device is {device!r}, but rank {blind[0]} would see no GPU where it runs")
    devices = [device_of(placement.local_rank, device, len(placement.gpus)) for placement in placements]
    taken = {placement.gpus[one.index] for placement, one in zip(placements, devices, strict=True)}
    alone = len(taken) == len(placements)
    return [str(one) for one in devices], "cpu:gloo,cuda:nccl" if alone else "gloo"


def visible_gpus(variable: str | None) -> tuple[str, ...]:
    """Returns the names of the GPUs that a process of this machine sees; names differ between machines.

    CUDA is not initialised. Two GPUs of one machine to which a container or a batch system gave the same number have
    the same name, as if they were one.

    Args:
        variable: CUDA_VISIBLE_DEVICES of that process, if it is not this process's.
    """
    if variable is not None:
        names = visible(variable, 0)
    else:
        count = torch.cuda.device_count()
        names = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), count)[:count]
    return tuple(f"{socket.gethostname()}/{name}" for name in names)
