"""Which of the visible GPUs each of several test processes takes, so that their ranks do not crowd on the first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """The GPUs of one of several processes.

    Attributes:
        devices: Their names, as CUDA_VISIBLE_DEVICES wants them.
        words: Which they are and how many processes share them, in one sentence.
    """

    devices: tuple[str, ...]
    words: str

    @property
    def variable(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES."""
        return ",".join(self.devices)


def visible(text: str | None, count: int) -> tuple[str, ...]:
    """Returns the names of the GPUs that a process sees, in its order.

    Like CUDA, it reads `text` up to the first entry that names no device, and sees none if one is named twice. Names
    stay as they are: indices, UUIDs ("GPU-..."), MIG devices ("MIG-...").

    Args:
        text: CUDA_VISIBLE_DEVICES; None where it is not set.
        count: How many GPUs the machine has; decides only where there is no text.
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
    """Returns the slice of one process.

    Neighbours stay together, since they are the likeliest to have a fast link, and slices differ by at most one
    device. With fewer GPUs than processes each process takes one, in turn. A process that was started in place of a
    lost one has a number of `workers` or more and takes the slice of that number modulo `workers`.

    Args:
        devices: What all processes see together (see `visible`); without any, the slice is empty.
        worker: The number of this process, from 0.
        workers: How many processes there are, at least 1.
    """
    place = worker % workers
    if len(devices) >= workers:
        mine = devices[place * len(devices) // workers : (place + 1) * len(devices) // workers]
        return Slice(mine, f"process {worker} has {_gpus(mine)} of {len(devices)} to itself")
    if not devices:
        return Slice((), f"process {worker} has no GPU")
    at = place % len(devices)
    sharers = len(range(at, workers, len(devices)))
    return Slice(devices[at : at + 1], f"process {worker} shares GPU {devices[at]} with {sharers - 1} more")


def _gpus(names: tuple[str, ...]) -> str:
    return f"GPU{'s' * (len(names) > 1)} {', '.join(names)}"
