"""The process of a virtual world: one thread per rank, each of which runs every job.

Virtual ranks share what real ranks do not: modules with their globals, the environment, the payload (which no rank may
modify), and the process: a rank that ends it ends all ranks. One rank runs at a time: a rank that waits for another one
in any way but through `torch.distributed` waits for ever. `rank_state.py` lists the state that every rank has for
itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from .. import processes, wire
from ..faults import describe
from ..job_message import Task
from ..ledger.entry import Entry
from ..ledger.ledger_file import LedgerFile
from ..leftovers import difference, process_state
from ..rank import LARGEST_RESULT, Answer, RankSpec, Returned, UnsendableResultError, find, flush, same
from ..records import NO_ANSWER, Partition, RankContext
from ..transport import device_of
from . import group
from .matching import WorldState
from .rank_state import PerRankState
from .scheduler import Scheduler

_M_ARENA_MAX = -8  # of mallopt(3)


@dataclass(frozen=True)
class Order:
    """The request to a virtual world: a job, and its deadline.

    The buffers of the payload follow, then those of the rank payloads. `rank_buffers` holds how many of the latter each
    rank has; it is empty if the job has no rank payloads.
    """

    number: int
    task: Task
    deadline_s: float
    rank_buffers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stuck:
    """Why a rank gave no answer: what it waits for, or where it runs, and its stack."""

    error: str
    stack: str
    waits: bool


@dataclass(frozen=True)
class End:
    """How a job ended on one rank, with its ledger: an answer, or why there is none."""

    answer: Answer | None = None
    stuck: Stuck | None = None
    ledger: tuple[Entry, ...] = ()


def serve(channel: wire.Channel, spec: RankSpec, ledger: int) -> NoReturn:
    """Runs a virtual world until its process exits; its first answer, number 0, says whether all ranks joined.

    `ledger` is the descriptor of a file. Its last line is the rank that runs, which the driver reads if the process
    exits or does not answer.
    """
    torch.set_num_threads(1)
    processes.become_subreaper()  # so that processes that a function leaves behind are found
    _use_one_heap()
    with contextlib.suppress(EOFError, OSError):  # the driver has closed its end of the channel
        try:
            ranks = _Ranks(spec, ledger)
        except BaseException as error:
            channel.send(wire.dumps(Answer(0, "unprepared", describe(error))))
            os._exit(0)
        channel.send(wire.dumps(Answer(0, "returned")))
        while ranks.usable:
            channel.send(ranks.run(channel.receive()))
    os._exit(0)


def _use_one_heap() -> None:
    """Makes all threads share one malloc arena, since only one runs at a time."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@dataclass
class _Work:
    """The job that runs, and the answers of its ranks."""

    order: Order
    function: Callable[[RankContext, Any], Any]
    payload: Any
    rank_payloads: Sequence[Any]  # by rank
    answers: dict[int, tuple[Answer, list[wire.Buffer]]] = field(default_factory=dict)


class _Ranks:
    """The threads of the ranks, kept for the next job as long as all return and leave nothing behind."""

    def __init__(self, spec: RankSpec, ledger: int) -> None:
        self._size = spec.world
        self._device = spec.device
        self._ledger = LedgerFile(ledger)
        self._per_rank_state = PerRankState(spec.world, gpu=spec.device != "cpu")
        self._scheduler = Scheduler(spec.world, self._per_rank_state.save, self._on_acquire)
        self._world_state = WorldState(spec.world, self._scheduler)
        self._running_rank = 0
        self._work: _Work | None = None
        self._failure: BaseException | None = None  # while joining
        self.usable = True
        group.install(self._world_state)
        store = HashStore()
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank, store), name=f"rank {rank}", daemon=True)
            for rank in range(spec.world)
        ]
        for thread in self._threads:
            thread.start()
        self._scheduler.start()
        self._scheduler.wait_until_idle()
        if self._failure is not None:
            raise self._failure

    def run(self, message: list[bytearray]) -> list[wire.Buffer]:
        """Runs a job on all ranks and returns the message with how it ended on each."""
        began = time.monotonic()
        order: Order = wire.loads(message[:1])
        rest = iter(message[1:])
        self._ledger.begin()
        try:
            function = find(order.task.function)
            payload = wire.loads(list(islice(rest, order.task.buffers)))
            rank_payloads = [wire.loads(list(islice(rest, count))) for count in order.rank_buffers]
        except BaseException as error:
            self.usable = False
            unprepared = Answer(order.number, "unprepared", describe(error))
            return wire.dumps([End(unprepared) for _ in range(self._size)])
        self._work = _Work(order, function, payload, rank_payloads or [None] * self._size)
        for recorders in self._world_state.recorders:
            recorders.clear()
        self._scheduler.start()
        in_time = self._scheduler.wait_until_idle(began + order.deadline_s - time.monotonic())
        answers = dict(self._work.answers)
        ends, buffers = [], []
        for rank in range(self._size):
            ledger = self._world_state.recorders[rank].entries()
            if rank in answers:
                answer, value = answers[rank]
                ends.append(End(answer, ledger=ledger))
                buffers += value
            else:
                ends.append(End(stuck=self._stuck(rank, None if in_time else order.deadline_s), ledger=ledger))
        self._work = None
        flush()
        self.usable = all(end.answer is not None and not end.answer.last for end in ends)
        return [*wire.dumps(ends), *buffers]

    def _on_acquire(self, rank: int) -> None:
        self._running_rank = rank
        self._ledger.write(b"%d\n" % rank)
        self._per_rank_state.restore(rank)

    def _run_rank(self, rank: int, store: HashStore) -> None:
        """Runs one rank: joins the process group, then runs job after job."""
        self._scheduler.acquire(rank)
        try:
            state = _RankState(rank, self._size, self._device, store, self._world_state.recorders[rank].calls)
        except BaseException as error:
            self._failure = error
            self._scheduler.release(rank)
            return
        while True:
            self._scheduler.release(rank)
            self._scheduler.acquire(rank)
            work = self._work
            assert work is not None
            answer, value = _run_job(state, work, work.rank_payloads[rank])
            work.answers[rank] = (answer, value)
            if answer.fault is not None:
                why = "" if answer.fault.connection_lost else f": {answer.fault.error}"
                self._world_state.mark_gone(rank, f"rank {rank} has failed{why}")

    def _stuck(self, rank: int, deadline_s: float | None) -> Stuck:
        """Returns why a rank has no answer; `deadline_s` is None if no rank can continue, else it has passed."""
        pending = self._world_state.pending.get(rank)
        stack = _stack(self._threads[rank])
        why = "" if deadline_s is None else f"{NO_ANSWER} {deadline_s:.1f} s: "
        if pending is not None:
            end = "" if deadline_s is not None else ", and no rank can continue"
            return Stuck(f"{why}{pending.sentence}{end}", stack, True)
        if rank == self._running_rank:
            return Stuck(f"{why}{_location(self._threads[rank])}", stack, False)
        return Stuck(f"{why}could continue, but rank {self._running_rank} is running", stack, True)


def _run_job(state: _RankState, work: _Work, rank_payload: Any) -> tuple[Answer, list[wire.Buffer]]:
    """Runs a job on one rank."""
    number, began = work.order.number, time.monotonic()
    try:
        context = state.context(work.order.task.groups, rank_payload)
    except BaseException as error:
        return Answer(number, "unprepared", describe(error)), []
    held = dict(context.kept)
    try:
        value = work.function(context, work.payload)
    except BaseException as error:  # SystemExit too: it is the result of the function
        fault = describe(error)
        traceback.clear_frames(error.__traceback__)
        return Answer(number, "raised", fault), []
    if not dist.is_initialized():
        lost = RuntimeError("the function destroyed the default process group, which belongs to the engine")
        return Answer(number, "raised", describe(lost)), []
    try:
        buffers = wire.dumps(value, LARGEST_RESULT)
        left = state.left(lasting=not same(held, context.kept))
        return Answer(number, "returned", returned=(Returned(len(buffers), time.monotonic() - began, left),)), buffers
    except BaseException as error:
        return Answer(number, "raised", describe(UnsendableResultError(value, error))), []


class _RankState:
    """What a virtual rank keeps from job to job: its process groups, its device, and `kept`."""

    def __init__(self, rank: int, world: int, device: str, store: HashStore, calls: Callable[[], int]) -> None:
        self._rank, self._world, self._calls = rank, world, calls
        self._device = device_of(rank, device, 0 if device == "cpu" else torch.cuda.device_count())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        group.join(rank, world, store)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._kept: dict[str, Any] = {}
        self._process_state = process_state()

    def context(self, partitions: Mapping[str, Partition], rank_payload: Any) -> RankContext:
        """Returns the context of a job; makes this rank's groups that do not exist yet."""
        mine: dict[str, dist.ProcessGroup] = {}
        for name, partition in partitions.items():
            for ranks in partition:
                if self._rank not in ranks:
                    continue
                if ranks not in self._groups:
                    self._groups[ranks] = group.new_group(ranks)
                mine[name] = self._groups[ranks]
        return RankContext(self._rank, self._world, self._device, mine, self._kept, self._calls, rank_payload)

    def left(self, *, lasting: bool) -> tuple[str, ...]:
        """Returns what differs in the process from the last call of this method; () if `lasting`."""
        before, self._process_state = self._process_state, process_state(len(self._groups))
        return () if lasting else difference(before, self._process_state)


def _stack(thread: threading.Thread) -> str:
    """Returns a thread's stack in faulthandler's format, innermost call first, without frames of this package."""
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in _frames(thread)]
    return "\n".join([f"Thread {thread.name} (most recent call first):", *lines])


def _location(thread: threading.Thread) -> str:
    frames = _frames(thread)
    if not frames:
        return "it is about to return"
    outside = next((frame for frame in frames if "/torch/" not in frame[0]), frames[-1])
    return f"in {frames[0][2]}, from {outside[0]}:{outside[1]}"


def _frames(thread: threading.Thread) -> list[tuple[str, int, str]]:
    frame = sys._current_frames().get(thread.ident or 0)
    found = [(call.filename, call.lineno or 0, call.name) for call in reversed(traceback.extract_stack(frame))]
    folder = os.path.dirname(__file__)
    outer = [frame for frame in found if not frame[0].startswith(folder) and frame[0] != threading.__file__]
    return outer
