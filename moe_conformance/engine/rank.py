"""The main loop of a rank: joins the process group, then runs jobs until the driver closes the channel.

A rank on which a job did not return exits at once, and the driver replaces its whole world: collectives may be half
done, and a process that exits closes its connections, so that peers waiting for it get an error within milliseconds. A
rank on which all jobs returned stays, whatever it left behind, until the driver replaces it: peers may still need it.
It always exits by `os._exit`, after its answer is sent: gloo sometimes aborts in the destructors of a normal exit.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import processes, store, wire
from .faults import Fault, describe
from .gpu.job_checks import HostSyncs, MemoryBaseline, bytes_in_use, wait_for_gpu
from .job_message import Request, Task, unpack
from .ledger.ledger_file import LedgerFile
from .ledger.tap import Tap
from .leftovers import difference, process_state
from .records import Partition, RankContext

LARGEST_RESULT = 2 << 30  # bytes; the driver holds those of all ranks at once


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to join its world: its number, device, backend, and the address of the driver's store.

    If `virtual`, it describes all ranks of a world, which are threads of one process.
    """

    rank: int
    device: str
    world: int
    transport: str
    address: str
    port: int
    prefix: str
    virtual: bool = False
    local_rank: int = 0


@dataclass(frozen=True)
class Returned:
    """What a rank reports of a job that returned.

    Attributes:
        buffers: How many buffers the value has.
        seconds: The time that the job took on this rank.
        left: What the function left behind.
        host_syncs: How often it made the host wait for the GPU.
    """

    buffers: int
    seconds: float
    left: tuple[str, ...] = ()
    host_syncs: int | None = None


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a request; the buffers of the returned values follow it in the message.

    A job that did not return is the last that ran, and `outcome` and `fault` are those of this job. "unprepared" means
    that the function was not called: it or its payload could not be loaded, or a group could not be made.
    """

    number: int
    outcome: Literal["returned", "raised", "unprepared"]
    fault: Fault | None = None
    returned: tuple[Returned, ...] = ()

    @property
    def last(self) -> bool:
        """True if the rank exits after this answer."""
        return self.outcome != "returned"


def serve(channel: wire.Channel, spec: RankSpec, ledger: int) -> NoReturn:
    """Runs a rank until its process exits; its first answer, number 0, says whether it joined its world.

    `ledger` is the descriptor of the rank's ledger file.
    """
    torch.set_num_threads(1)
    os.environ.update(_as_under_torchrun(spec))
    # Otherwise new_group returns while other ranks still connect; a rank that then raises, and exits, fails these too.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    processes.become_subreaper()  # so that processes that a function leaves behind are found
    with contextlib.suppress(EOFError, OSError):  # the driver has closed its end of the channel
        _serve_jobs(channel, spec, ledger)
    os._exit(0)


def _as_under_torchrun(spec: RankSpec) -> dict[str, str]:
    """Returns the environment variables that torchrun would set; their address is the driver's store."""
    return {
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.local_rank),
        "WORLD_SIZE": str(spec.world),
        "MASTER_ADDR": spec.address,
        "MASTER_PORT": str(spec.port),
    }


def _serve_jobs(channel: wire.Channel, spec: RankSpec, ledger: int) -> None:
    """Answers requests until an answer after which the rank must exit."""
    try:
        state = RankState(spec)
        ledger_file = LedgerFile(ledger)
        tap = Tap(ledger_file.write)
    except BaseException as error:
        channel.send(wire.dumps(Answer(0, "unprepared", describe(error))))
        return
    answer = Answer(0, "returned")
    channel.send(wire.dumps(answer))
    while not answer.last:
        message = channel.receive()
        ledger_file.begin()
        answer, values = _run_jobs(state, tap, message)
        flush()
        channel.send([*wire.dumps(answer), *values])


def _run_jobs(state: RankState, tap: Tap, message: list[bytearray]) -> tuple[Answer, list[wire.Buffer]]:
    """Runs the jobs of one request; returns the answer and the buffers of all returned values."""
    request: Request = wire.loads(message[:1])
    returned: list[Returned] = []
    values: list[wire.Buffer] = []
    myself = os.getpid()
    for task, payload, rank_payload in unpack(request.tasks, message[1:]):
        ended = _run_job(state, tap, task, payload, rank_payload)
        if os.getpid() != myself:  # this is a child that the function has forked: only the rank itself answers
            flush()
            os._exit(0)
        if isinstance(ended, _Failed):
            return Answer(request.number, *ended), []
        returned.append(ended[0])
        values += ended[1]
    return Answer(request.number, "returned", returned=tuple(returned)), values


class _Failed(NamedTuple):
    """Why a job did not return."""

    outcome: Literal["raised", "unprepared"]
    fault: Fault


def _run_job(
    state: RankState, tap: Tap, task: Task, payload: list[bytearray], rank_payload: list[bytearray]
) -> tuple[Returned, list[wire.Buffer]] | _Failed:
    """Runs one job; returns what to report of it and the buffers of its value."""
    began = time.monotonic()
    try:
        function = find(task.function)
        given = wire.loads(payload)
        context = state.context(task.groups, tap, wire.loads(rank_payload) if rank_payload else None)
    except BaseException as error:
        return _Failed("unprepared", describe(error))
    held = dict(context.kept)
    try:
        with HostSyncs(context.device) as syncs, tap.recording(task.asynchrony):
            value = function(context, given)
        wait_for_gpu(context.device)
    except BaseException as error:  # SystemExit too: it is the result of the function
        return _Failed("raised", describe(error))
    if not dist.is_initialized():
        lost = RuntimeError("the function destroyed the default process group, which belongs to the engine")
        return _Failed("raised", describe(lost))
    try:
        buffers = wire.dumps(value, LARGEST_RESULT)
    except BaseException as error:
        return _Failed("raised", describe(UnsendableResultError(value, error)))
    del value  # may hold device memory
    left = state.left() if same(held, context.kept) else state.reset()
    return Returned(len(buffers), time.monotonic() - began, left, syncs.count), buffers


class UnsendableResultError(TypeError):
    """A function's result cannot be pickled, or is too large to send."""

    def __init__(self, value: object, reason: BaseException) -> None:
        super().__init__(f"the function's result, a {type(value).__qualname__}, cannot be sent: {reason}")


def flush() -> None:
    """Flushes stdout and stderr, which `os._exit` does not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


def same(held: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Returns True if a function has added nothing to `kept`."""
    return held.keys() == kept.keys() and all(kept[name] is value for name, value in held.items())


def find(function: str) -> Callable[[RankContext, Any], Any]:
    """Imports and returns the function that is named `"package.module:function"`."""
    module, _, name = function.partition(":")
    found: Callable[[RankContext, Any], Any] = getattr(importlib.import_module(module), name)
    return found


class _GroupNames:
    """Names groups that their members alone make (use_local_synchronization): alike on all members, and never twice.

    torch's name is made of the number of groups that the process is in. Here that differs between ranks, which are in
    groups of several topologies, and a name comes again once its group is destroyed, as a session does when it closes:
    members would wait for each other for ever, or at the addresses of the group before.
    """

    def __init__(self) -> None:
        self._job = 0
        self._made: Counter[tuple[int, ...]] = Counter()  # in this job

    def begin_job(self) -> None:
        """Begins the next job, of which all ranks have the same number."""
        self._job += 1
        self._made.clear()

    def __call__(self, ranks: Sequence[int]) -> str:
        """Returns the name of a new group of these ranks."""
        self._made[tuple(ranks)] += 1
        return f"job {self._job}, ranks {' '.join(map(str, ranks))}, number {self._made[tuple(ranks)]}"


class RankState:
    """What a rank keeps from job to job: its process groups, its device, and `kept`."""

    def __init__(self, spec: RankSpec) -> None:
        self._rank, self._world = spec.rank, spec.world
        self._device = torch.device(spec.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            spec.transport,
            store=store.join(spec.address, spec.port, spec.prefix),
            rank=spec.rank,
            world_size=spec.world,
            timeout=store.FOREVER,
        )
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._names = _GroupNames()
        distributed_c10d._hash_ranks_to_str = self._names
        self._kept: dict[str, Any] = {}
        self._process_state = process_state()
        self._memory = MemoryBaseline(bytes_in_use(self._device)) if self._device.type == "cuda" else None

    def left(self) -> tuple[str, ...]:
        """Returns what differs in the process from the last call of this method."""
        before, self._process_state = self._process_state, process_state(self._own_groups())
        memory = self._memory.left() if self._memory is not None else ()
        return (*difference(before, self._process_state), *memory)

    def _own_groups(self) -> int:
        # A group in which this rank is no member is a plain object.
        return sum(isinstance(group, dist.ProcessGroup) for group in self._groups.values())

    def reset(self) -> tuple[str, ...]:
        """Takes the present state of the process as the one to compare with."""
        self.left()
        return ()

    def context(self, partitions: Mapping[str, Partition], tap: Tap, rank_payload: Any) -> RankContext:
        """Returns the context of a job; makes missing groups, on all ranks in the same order."""
        self._names.begin_job()
        mine: dict[str, dist.ProcessGroup] = {}
        for name, partition in partitions.items():
            for ranks in partition:
                if ranks not in self._groups:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=store.FOREVER)
                if self._rank in ranks:
                    mine[name] = self._groups[ranks]
        return RankContext(
            self._rank, self._world, self._device, mine, self._kept, tap.calls, rank_payload, tap.in_flight
        )
