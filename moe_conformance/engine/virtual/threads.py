"""The ranks' side of a virtual world: one process, a thread per rank, each job on all of them.

What virtual ranks have in common, and real ones have not: the modules with their globals, the environment, the payload
(nobody may write into it), and the process, so that one rank that ends it ends all. Nothing else runs while a rank
runs: one that waits for another in any way but through `torch.distributed` waits for ever. State that each has for
itself is in `private.py`.
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

from .. import offspring, wire
from ..faults import describe
from ..ledger.book import Book
from ..ledger.entry import Entry
from ..leftovers import difference, surroundings
from ..parcel import Task
from ..rank import LARGEST_RESULT, Answer, Returned, Station, UnsendableResultError, find, flush, same
from ..records import NO_ANSWER, Partition, RankContext
from ..transport import device_of
from . import group
from .meeting import House
from .private import Private
from .turns import Turns

_M_ARENA_MAX = -8  # of mallopt(3)


@dataclass(frozen=True)
class Order:
    """What is sent to a virtual world: a job, and how long it may take.

    The payload's buffers follow, then of each rank those of its own; `own` holds their numbers, if there are any.
    """

    number: int
    task: Task
    deadline_s: float
    own: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stuck:
    """A rank that did not come to an end: what it waits for, or where it runs, and its stack."""

    error: str
    stack: str
    waits: bool


@dataclass(frozen=True)
class End:
    """How a job ended on one rank: an answer or none, and what it called."""

    answer: Answer | None = None
    stuck: Stuck | None = None
    ledger: tuple[Entry, ...] = ()


def serve(channel: wire.Channel, station: Station, ledger: int) -> NoReturn:
    """Runs a virtual world until its process ends; its first answer, to job 0, says whether its ranks could join.

    `ledger` is the descriptor of a file. The last line written there is the rank that has the floor, for whoever looks
    at it after the death of the process.
    """
    torch.set_num_threads(1)
    offspring.adopt()  # so that it is seen what a function leaves behind
    _use_one_heap()
    with contextlib.suppress(EOFError, OSError):  # of the channel: the driver has closed its end
        try:
            ranks = _Ranks(station, ledger)
        except BaseException as error:
            channel.send(wire.dumps(Answer(0, "unprepared", describe(error))))
            os._exit(0)
        channel.send(wire.dumps(Answer(0, "returned")))
        while ranks.whole:
            channel.send(ranks.do(channel.receive()))
    os._exit(0)


def _use_one_heap() -> None:
    """Keeps malloc from a heap for every other thread: only one of them runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@dataclass
class _Work:
    """The job as the threads find it, and what they leave of it."""

    order: Order
    function: Callable[[RankContext, Any], Any]
    payload: Any
    own: Sequence[Any]  # by rank
    answers: dict[int, tuple[Answer, list[wire.Buffer]]] = field(default_factory=dict)


class _Ranks:
    """The threads, which stay for the next job as long as all of them return and leave nothing behind."""

    def __init__(self, station: Station, ledger: int) -> None:
        self._size = station.world
        self._device = station.device
        self._ledger = Book(ledger)
        self._private = Private(station.world, gpu=station.device != "cpu")
        self._turns = Turns(station.world, self._private.leave, self._take_floor)
        self._house = House(station.world, self._turns)
        self._holder = 0
        self._work: _Work | None = None
        self._failure: BaseException | None = None  # while joining
        self.whole = True
        group.install(self._house)
        store = HashStore()
        self._threads = [
            threading.Thread(target=self._live, args=(rank, store), name=f"rank {rank}", daemon=True)
            for rank in range(station.world)
        ]
        for thread in self._threads:
            thread.start()
        self._turns.begin()
        self._turns.quiet()
        if self._failure is not None:
            raise self._failure

    def do(self, message: list[bytearray]) -> list[wire.Buffer]:
        """Runs a job on all ranks and returns the message that says how it ended on each."""
        began = time.monotonic()
        order: Order = wire.loads(message[:1])
        rest = iter(message[1:])
        self._ledger.begin()
        try:
            function = find(order.task.function)
            payload = wire.loads(list(islice(rest, order.task.buffers)))
            own = [wire.loads(list(islice(rest, count))) for count in order.own] or [None] * self._size
        except BaseException as error:
            self.whole = False
            unprepared = Answer(order.number, "unprepared", describe(error))
            return wire.dumps([End(unprepared) for _ in range(self._size)])
        self._work = _Work(order, function, payload, own)
        for notes in self._house.notes:
            notes.clear()
        self._turns.begin()
        in_time = self._turns.quiet(began + order.deadline_s - time.monotonic())
        answers = dict(self._work.answers)
        ends, buffers = [], []
        for rank in range(self._size):
            ledger = self._house.notes[rank].entries()
            if rank in answers:
                answer, value = answers[rank]
                ends.append(End(answer, ledger=ledger))
                buffers += value
            else:
                ends.append(End(stuck=self._stuck(rank, None if in_time else order.deadline_s), ledger=ledger))
        self._work = None
        flush()
        self.whole = all(end.answer is not None and not end.answer.last for end in ends)
        return [*wire.dumps(ends), *buffers]

    def _take_floor(self, rank: int) -> None:
        self._holder = rank
        self._ledger.write(b"%d\n" % rank)
        self._private.enter(rank)

    def _live(self, rank: int, store: HashStore) -> None:
        """Runs one rank, job after job."""
        self._turns.enter(rank)
        try:
            home = _Home(rank, self._size, self._device, store, self._house.notes[rank].calls)
        except BaseException as error:
            self._failure = error
            self._turns.leave(rank)
            return
        while True:
            self._turns.leave(rank)
            self._turns.enter(rank)
            work = self._work
            assert work is not None
            answer, value = _do(home, work, work.own[rank])
            work.answers[rank] = (answer, value)
            if answer.fault is not None:
                why = "" if answer.fault.connection_lost else f": {answer.fault.error}"
                self._house.lose(rank, f"rank {rank} has failed{why}")

    def _stuck(self, rank: int, deadline_s: float | None) -> Stuck:
        """Says what a rank without an answer does; `deadline_s` if it has passed, None if nobody can go on."""
        awaited = self._house.awaited.get(rank)
        stack = _stack(self._threads[rank])
        why = "" if deadline_s is None else f"{NO_ANSWER} {deadline_s:.1f} s: "
        if awaited is not None:
            end = "" if deadline_s is not None else ", and no rank can continue"
            return Stuck(f"{why}{awaited.sentence}{end}", stack, True)
        if rank == self._holder:
            return Stuck(f"{why}{_place(self._threads[rank])}", stack, False)
        return Stuck(f"{why}could continue, but rank {self._holder} is running", stack, True)


def _do(home: _Home, work: _Work, own: Any) -> tuple[Answer, list[wire.Buffer]]:
    """Runs a job on one rank."""
    number, began = work.order.number, time.monotonic()
    try:
        context = home.context(work.order.task.groups, own)
    except BaseException as error:
        return Answer(number, "unprepared", describe(error)), []
    held = dict(context.kept)
    try:
        value = work.function(context, work.payload)
    except BaseException as error:  # SystemExit too: whatever the function does is its result
        fault = describe(error)
        traceback.clear_frames(error.__traceback__)
        return Answer(number, "raised", fault), []
    if not dist.is_initialized():
        lost = RuntimeError("the function destroyed the default process group, which belongs to the engine")
        return Answer(number, "raised", describe(lost)), []
    try:
        buffers = wire.dumps(value, LARGEST_RESULT)
        left = home.left(lasting=not same(held, context.kept))
        return Answer(number, "returned", returned=(Returned(len(buffers), time.monotonic() - began, left),)), buffers
    except BaseException as error:
        return Answer(number, "raised", describe(UnsendableResultError(value, error))), []


class _Home:
    """A rank's process group, its device, and the groups made so far."""

    def __init__(self, rank: int, world: int, device: str, store: HashStore, calls: Callable[[], int]) -> None:
        self._rank, self._world, self._calls = rank, world, calls
        self._device = device_of(rank, device, 0 if device == "cpu" else torch.cuda.device_count())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        group.join(rank, world, store)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._kept: dict[str, Any] = {}
        self._surroundings = surroundings()

    def context(self, partitions: Mapping[str, Partition], own: Any) -> RankContext:
        """Makes this rank's groups that do not exist yet."""
        mine: dict[str, dist.ProcessGroup] = {}
        for name, partition in partitions.items():
            for ranks in partition:
                if self._rank not in ranks:
                    continue
                if ranks not in self._groups:
                    self._groups[ranks] = group.new_group(ranks)
                mine[name] = self._groups[ranks]
        return RankContext(self._rank, self._world, self._device, mine, self._kept, self._calls, own)

    def left(self, *, lasting: bool) -> tuple[str, ...]:
        """Returns what differs in the process from when this was last asked; nothing if it was made to last."""
        before, self._surroundings = self._surroundings, surroundings(len(self._groups))
        return () if lasting else difference(before, self._surroundings)


def _stack(thread: threading.Thread) -> str:
    """Returns a thread's stack in the form of faulthandler's, innermost call first, without our own frames."""
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in _frames(thread)]
    return "\n".join([f"Thread {thread.name} (most recent call first):", *lines])


def _place(thread: threading.Thread) -> str:
    frames = _frames(thread)
    if not frames:
        return "it is about to return"
    outside = next((frame for frame in frames if "/torch/" not in frame[0]), frames[-1])
    return f"in {frames[0][2]}, from {outside[0]}:{outside[1]}"


def _frames(thread: threading.Thread) -> list[tuple[str, int, str]]:
    frame = sys._current_frames().get(thread.ident or 0)
    found = [(each.filename, each.lineno or 0, each.name) for each in reversed(traceback.extract_stack(frame))]
    own = os.path.dirname(__file__)
    outer = [frame for frame in found if not frame[0].startswith(own) and frame[0] != threading.__file__]
    return outer
