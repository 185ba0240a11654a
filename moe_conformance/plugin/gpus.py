"""Which GPUs the ranks of an xdist worker see."""

from __future__ import annotations

import os

from moe_conformance.engine.gpu.slices import Slice, share, visible


def environment() -> dict[str, str]:
    """Return what to set for the ranks of this process: outside of a worker, or without any GPU, nothing."""
    name, workers = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    number = name.removeprefix("gw")
    if not (number.isdecimal() and workers.isdecimal()):
        return {}
    mine = _slices(int(workers), int(number))
    return {"CUDA_VISIBLE_DEVICES": mine.variable} if mine.devices else {}


def sentences(workers: int) -> list[str]:
    """Return which GPUs each worker has, in words."""
    return [_slices(workers, number).words for number in range(workers)]


def _slices(workers: int, number: int) -> Slice:
    import torch  # heavy

    return share(visible(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()), number, workers)
