"""Jobs on their way to the ranks: a message holds one or several, pickled once but for what is sent to one rank alone.

A message to a rank is the pickled Request, then of every job the buffers of its payload, the number of buffers of
what is this rank's own, and these.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from . import wire
from .faults import one_line
from .ledger.entry import Asynchrony
from .records import EngineError, Job, Partition


@dataclass(frozen=True)
class Task:
    """A job as the ranks see it; `buffers` is the number of those of its payload."""

    function: str
    groups: Mapping[str, Partition]
    asynchrony: Asynchrony
    buffers: int


@dataclass(frozen=True)
class Request:
    """What ranks are given at a time: jobs, to be run in order until one does not return."""

    number: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class PackedJob:
    """A job in buffers; `rank_payloads` by rank, empty if there is nothing."""

    job: Job
    payload: list[wire.Buffer]
    rank_payloads: list[list[wire.Buffer]]

    @property
    def task(self) -> Task:
        """What the ranks are told of the job."""
        job = self.job
        return Task(job.function, dict(job.groups), job.asynchrony, len(self.payload))

    def buffers_for(self, rank: int) -> list[wire.Buffer]:
        """Returns the buffers for a rank."""
        rank_payload = self.rank_payloads[rank] if self.rank_payloads else []
        return [*self.payload, struct.pack("<Q", len(rank_payload)), *rank_payload]


def pack(job: Job) -> PackedJob:
    """Pickles what a job sends.

    Raises:
        EngineError: it cannot be pickled.
    """
    try:
        return PackedJob(job, wire.dumps(job.payload), [wire.dumps(each) for each in job.rank_payloads])
    except Exception as error:
        raise EngineError(f"the payload of {job.function} cannot be pickled: {one_line(error)}") from error


def unpack(
    tasks: Sequence[Task], buffers: Sequence[bytearray]
) -> Iterator[tuple[Task, list[bytearray], list[bytearray]]]:
    """Yields each task with the buffers of its payload and of the rank's own; none if there is nothing."""
    rest = iter(buffers)
    for task in tasks:
        payload = list(islice(rest, task.buffers))
        (count,) = struct.unpack("<Q", next(rest))
        yield task, payload, list(islice(rest, count))
