"""Which device a rank gets and which transport its world uses."""

from __future__ import annotations

import torch


def device_of(rank: int, device: str, devices: int) -> torch.device:
    """Returns the rank's device; with fewer GPUs (`devices`) than ranks, several ranks share one."""
    return torch.device("cpu") if device == "cpu" else torch.device(device, rank % devices)


def transport_of(world: int, device: str, devices: int) -> str:
    """Returns the backend string of a world's process group.

    NCCL refuses two ranks on one GPU (before 2.30), so that a world larger than the number of GPUs
    (`devices`) goes over gloo, which stages CUDA tensors through host memory. A world over NCCL keeps gloo
    for its CPU tensors.
    """
    if device == "cuda" and world <= devices:
        return "cpu:gloo,cuda:nccl"
    return "gloo"
