"""The schedule of a training step: operations on microbatches, in the order in which a rank executes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

Name = Literal[
    "forward",  # in training, followed by a backward
    "dispatch",  # the first half of a forward
    "combine",  # its second half
    "backward",
    "no_grad",  # a forward under torch.no_grad(), of inputs that ask for no gradients
    "inference",  # the same under torch.inference_mode()
    "unasked",  # the same as in training
    "repeat",  # forward and backward of the microbatch's tokens many times over, of which the memory in use is kept
    "finish",  # the step ends: gradients are finished, kept, and set to None where they can be
    "finish_to_zero",  # the same, and they are set to zero
]
_LETTERS: dict[str, Name] = {
    "F": "forward",
    "D": "dispatch",
    "C": "combine",
    "B": "backward",
    "N": "no_grad",
    "I": "inference",
    "U": "unasked",
    "R": "repeat",
    "S": "finish",
    "Z": "finish_to_zero",
}

BEGIN_TRAINING: frozenset[Name] = frozenset({"forward", "dispatch"})
FORWARD_ALONE: frozenset[Name] = frozenset({"no_grad", "inference", "unasked"})  # no backward follows


class Operation(NamedTuple):
    """One operation of a schedule."""

    name: Name
    microbatch: int | None  # None: of the whole step

    def __str__(self) -> str:
        """For example `forward:0`."""
        return self.name if self.microbatch is None else f"{self.name}:{self.microbatch}"


@lru_cache(maxsize=1024)
def operations(schedule: str) -> tuple[Operation, ...]:
    """Return the operations of a schedule as workloads write it.

    >>> [str(each) for each in operations("F0 B0 S")]
    ['forward:0', 'backward:0', 'finish']

    Raises:
        ValueError: a part of it is no operation.
    """
    return tuple(_parsed(schedule))


def _parsed(schedule: str) -> Iterator[Operation]:
    for part in schedule.split():
        name, number = _LETTERS.get(part[0]), part[1:]
        if name is None or bool(number) != (name not in ("finish", "finish_to_zero")):
            raise ValueError(f"{part!r} in the schedule {schedule!r} is no operation")
        yield Operation(name, int(number) if number else None)
