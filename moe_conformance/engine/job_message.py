"""Packs jobs into the message that is sent to a rank, and unpacks them there.

A message to a rank is the pickled Request, then for every job the buffers of its payload, the number of buffers of the
rank's payload, and these buffers. Everything but the rank payloads is pickled once for all ranks.
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
    """A job without its payloads; `buffers` is how many buffers the payload has."""

    function: str
    groups: Mapping[str, Partition]
    asynchrony: Asynchrony
    buffers: int


@dataclass(frozen=True)
class Request:
    """The head of a message to a rank: the jobs to run, in order, until one does not return."""

    number: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class PackedJob:
    """A job with its payloads pickled into buffers; `rank_payloads` is empty if the job has none."""

    job: Job
    payload: list[wire.Buffer]
    rank_payloads: list[list[wire.Buffer]]

    @property
    def task(self) -> Task:
        """The job without its payloads."""
        job = self.job
        return Task(job.function, dict(job.groups), job.asynchrony, len(self.payload))

    def buffers_for(self, rank: int) -> list[wire.Buffer]:
        """Returns the buffers that are sent to one rank."""
        rank_payload = self.rank_payloads[rank] if self.rank_payloads else []
        return [*self.payload, struct.pack("<Q", len(rank_payload)), *rank_payload]


def pack(job: Job) -> PackedJob:
    """Pickles the payloads of a job.

    Raises:
        EngineError: it cannot be pickled.
    """
    try:
        return PackedJob(job, wire.dumps(job.payload), [wire.dumps(value) for value in job.rank_payloads])
    except Exception as error:
        raise EngineError(f"the payload of {job.function} cannot be pickled: {one_line(error)}") from error


def unpack(
    tasks: Sequence[Task], buffers: Sequence[bytearray]
) -> Iterator[tuple[Task, list[bytearray], list[bytearray]]]:
    """Yields each task with the buffers of its payload and of the rank payload."""
    rest = iter(buffers)
    for task in tasks:
        payload = list(islice(rest, task.buffers))
        (count,) = struct.unpack("<Q", next(rest))
        yield task, payload, list(islice(rest, count))
