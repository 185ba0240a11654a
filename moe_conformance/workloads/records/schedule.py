"""The schedule of a training step: operations on microbatches, in the order in which a rank executes them.

Workloads write it as pipeline schedules are written, "F0 F1 B0 B1": a letter for each operation and the number of its
microbatch. Code that executes or reads a schedule uses the names of operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

Name = Literal[
    "forward",  # in training, followed by a backward
    "dispatch",  # the first half of a forward
    "combine",  # its second half
    "backward",
    "no_grad",  # a forward under torch.no_grad(), of inputs that require no gradient
    "inference",  # the same under torch.inference_mode()
    "unasked",  # the same as in training
    "repeat",  # forward and backward of the microbatch's tokens, repeated; only the memory in use is recorded
    "finish",  # the step ends: gradients are finished, recorded, and set to None where possible
    "finish_to_zero",  # the same, and they are set to zero
]
LETTERS: dict[str, Name] = {
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
        """Return, for example, `forward:0`."""
        return self.name if self.microbatch is None else f"{self.name}:{self.microbatch}"


@lru_cache(maxsize=1024)
def operations(schedule: str) -> tuple[Operation, ...]:
    """Return the operations of a schedule that is written with letters.

    >>> [str(operation) for operation in operations("F0 B0 S")]
    ['forward:0', 'backward:0', 'finish']

    Raises:
        ValueError: a part of it is no operation.
    """
    return tuple(_parsed(schedule))


def microbatches(schedule: str) -> int:
    """Return how many microbatches a schedule has.

    >>> microbatches("F0 F1 B1 B0 S")
    2
    """
    return len({operation.microbatch for operation in operations(schedule)} - {None})


def executes(schedule: str, *names: Name) -> bool:
    """Return whether a schedule has one of these operations, of any microbatch."""
    return any(operation.name in names for operation in operations(schedule))


def most_open(
    schedule: str, begin: Collection[Name], end: Collection[Name], alone: Collection[Name] = ()
) -> frozenset[int]:
    """Return the largest set of microbatches that are open at the same time; the first one if there are several.

    A microbatch is open between an operation of `begin` and one of `end`, and during an operation of `alone`.

    >>> sorted(most_open("F0 F1 B0 B1", {"forward"}, {"backward"}))
    [0, 1]
    """
    most: frozenset[int] = frozenset()
    open_now: set[int] = set()
    for name, m in operations(schedule):
        if m is None:
            continue
        if name in begin:
            open_now.add(m)
        elif name in end:
            open_now.discard(m)
        most = max(most, frozenset(open_now | {m} if name in alone else open_now), key=len)
    return most


def _parsed(schedule: str) -> Iterator[Operation]:
    for part in schedule.split():
        name, number = LETTERS.get(part[0]), part[1:]
        if name is None or bool(number) != (name not in ("finish", "finish_to_zero")):
            raise ValueError(f"{part!r} in the schedule {schedule!r} is no operation")
        yield Operation(name, int(number) if number else None)
