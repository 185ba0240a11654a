"""Divides the visible GPUs among several test processes, so that their ranks do not all use the first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """The GPUs of one of several test processes.

    Attributes:
        devices: Their names, as in CUDA_VISIBLE_DEVICES.
        words: A sentence that says which they are and how many processes share them.
    """

    devices: tuple[str, ...]
    words: str

    @property
    def variable(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES."""
        return ",".join(self.devices)


def visible(text: str | None, count: int) -> tuple[str, ...]:
    """Returns the names of the GPUs that a process sees, in its order.

    As in CUDA, `text` counts up to the first entry that names no device, and none is visible if one is named twice.
    Names are not changed: indices, UUIDs ("GPU-..."), MIG devices ("MIG-...").

    Args:
        text: CUDA_VISIBLE_DEVICES; None if it is not set.
        count: How many GPUs the machine has; used only if `text` is None.
    """
    if text is None:
        return tuple(str(index) for index in range(count))
    names: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        if entry in names:
            return ()
        names.append(entry)
    return tuple(names)


def share(devices: tuple[str, ...], worker: int, workers: int) -> Slice:
    """Returns the GPUs of one process.

    A slice is contiguous, since neighbours are the likeliest to have a fast link, and slices differ by at most one
    device. With fewer GPUs than processes every process gets one, round-robin. A process that replaces a lost one has a
    number of `workers` or more, and gets the slice of that number modulo `workers`.

    Args:
        devices: The GPUs that all processes see together (see `visible`); without any, the slice is empty.
        worker: The number of this process, from 0.
        workers: How many processes there are, at least 1.
    """
    position = worker % workers
    if len(devices) >= workers:
        mine = devices[position * len(devices) // workers : (position + 1) * len(devices) // workers]
        return Slice(mine, f"process {worker} has {_gpus(mine)} of {len(devices)} to itself")
    if not devices:
        return Slice((), f"process {worker} has no GPU")
    at = position % len(devices)
    sharers = len(range(at, workers, len(devices)))
    return Slice(devices[at : at + 1], f"process {worker} shares GPU {devices[at]} with {sharers - 1} more")


def _gpus(names: tuple[str, ...]) -> str:
    return f"GPU{'s' * (len(names) > 1)} {', '.join(names)}"
