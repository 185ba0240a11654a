"""What a rank does: it joins its world, then runs one job after the other until the driver goes away.

A rank that could not answer "returned" ends at once, and the driver replaces its whole world: collectives may be half
done, and a process that ends closes its connections, so that peers waiting for it get an error within milliseconds. One
that returned stays, whatever it left behind, until the driver replaces it: peers may not be done with it. It always
ends by `os._exit`, after its answer is sent: gloo sometimes aborts in the destructors of an orderly exit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from . import offspring, store, wire
from .faults import Fault, describe
from .gpu import poisoned
from .gpu.memory import Baseline, in_use
from .gpu.syncs import HostSyncs
from .ledger.entry import Asynchrony
from .ledger.tap import Tap
from .leftovers import difference, surroundings
from .records import Partition, RankContext

LARGEST_RESULT = 2 << 30  # bytes; the driver holds those of all ranks at once


@dataclass(frozen=True)
class Station:
    """The place of one rank: its device ("cuda:1"), its world, and where to find its peers in the driver's store.

    A virtual station is that of all ranks of a world, which are threads of one process.
    """

    rank: int
    device: str
    world: int
    transport: str
    address: str
    port: int
    prefix: str
    virtual: bool = False


@dataclass(frozen=True)
class Assignment:
    """A job as the ranks see it; the payload's buffers follow it in the message."""

    number: int
    function: str
    groups: Mapping[str, Partition]
    asynchrony: Asynchrony = "plain"


@dataclass(frozen=True)
class Answer:
    """What a rank says of a job; the value's buffers follow it in the message if it returned.

    `unprepared` means that the function was never called: it or its payload could not be loaded, or a group
    not made; `left` is what the function left behind, `host_syncs` how often it made the host wait for its GPU.
    """

    number: int
    outcome: Literal["returned", "raised", "unprepared"]
    fault: Fault | None = None
    left: tuple[str, ...] = ()
    host_syncs: int | None = None

    @property
    def last(self) -> bool:
        """True where the rank ends after this answer."""
        return self.outcome != "returned"


def serve(channel: wire.Channel, station: Station, ledger: int) -> NoReturn:
    """Runs a rank until its process ends; its first answer, to job 0, says whether it could join.

    `ledger` is the descriptor of a file to which the rank appends lines about the running job.
    """
    torch.set_num_threads(1)
    offspring.adopt()  # so that it is seen what a function leaves behind
    with contextlib.suppress(EOFError, OSError):  # of the channel: the driver has closed its end
        _work(channel, station, ledger)
    os._exit(0)


def _work(channel: wire.Channel, station: Station, ledger: int) -> None:
    """Answers until there is an answer after which the rank must not go on."""
    try:
        home = _Home(station)
        tap = Tap(functools.partial(os.write, ledger))
    except BaseException as error:
        channel.send(wire.dumps(Answer(0, "unprepared", describe(error))))
        return
    answer, myself = Answer(0, "returned"), os.getpid()
    channel.send(wire.dumps(answer))
    while not answer.last:
        answer, *value = _do(home, tap, channel.receive())
        flush()
        if os.getpid() != myself:  # the function forked, and this is its child: one rank gives one answer
            os._exit(0)
        channel.send([*wire.dumps(answer), *value])


def _do(home: _Home, tap: Tap, message: list[bytearray]) -> tuple[Any, ...]:
    """Returns the Answer and, after it, the buffers of the value."""
    assignment: Assignment = wire.loads(message[:1])
    number = assignment.number
    try:
        function = find(assignment.function)
        payload = wire.loads(message[1:])
        context = home.context(assignment.groups, tap.calls)
    except BaseException as error:
        return (Answer(number, "unprepared", describe(error)),)
    held = dict(context.kept)
    try:
        with HostSyncs(context.device) as syncs, tap.recording(assignment.asynchrony):
            value = function(context, payload)
        poisoned.check(context.device)
    except BaseException as error:  # SystemExit too: whatever the function does is its result
        return (Answer(number, "raised", describe(error)),)
    if not dist.is_initialized():
        lost = RuntimeError("the function destroyed the default process group, which belongs to the engine")
        return (Answer(number, "raised", describe(lost)),)
    try:
        buffers = wire.dumps(value, LARGEST_RESULT)
    except BaseException as error:
        return (Answer(number, "raised", describe(UnsendableResultError(value, error))),)
    del value  # may hold device memory
    left = home.left() if same(held, context.kept) else home.settle()
    return (Answer(number, "returned", left=left, host_syncs=syncs.count), *buffers)


class UnsendableResultError(TypeError):
    """A function returned what cannot be sent to the driver."""

    def __init__(self, value: object, reason: BaseException) -> None:
        super().__init__(f"the function's result, a {type(value).__qualname__}, cannot be sent: {reason}")


def flush() -> None:
    """Writes out what the function printed: `os._exit` would drop it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


def same(held: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Tells whether a function has kept nothing new."""
    return held.keys() == kept.keys() and all(kept[name] is value for name, value in held.items())


def find(function: str) -> Callable[[RankContext, Any], Any]:
    """Returns the function of that name, `"package.module:function"`."""
    module, _, name = function.partition(":")
    found: Callable[[RankContext, Any], Any] = getattr(importlib.import_module(module), name)
    return found


class _Home:
    """A rank's process group, its device, and the groups made so far."""

    def __init__(self, station: Station) -> None:
        self._rank, self._world = station.rank, station.world
        self._device = torch.device(station.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            station.transport,
            store=store.join(station.address, station.port, station.prefix),
            rank=station.rank,
            world_size=station.world,
            timeout=store.FOREVER,
        )
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._kept: dict[str, Any] = {}
        self._surroundings = surroundings()
        self._memory = Baseline(in_use(self._device)) if self._device.type == "cuda" else None

    def left(self) -> tuple[str, ...]:
        """Returns what differs in the process from when this was last asked."""
        before, self._surroundings = self._surroundings, surroundings(self._own_groups())
        memory = self._memory.left() if self._memory is not None else ()
        return (*difference(before, self._surroundings), *memory)

    def _own_groups(self) -> int:
        return sum(isinstance(group, dist.ProcessGroup) for group in self._groups.values())  # else it is not in it

    def settle(self) -> tuple[str, ...]:
        """Takes the process as it is now; nothing counts as left behind."""
        self.left()
        return ()

    def context(self, partitions: Mapping[str, Partition], calls: Callable[[], int]) -> RankContext:
        """Makes the groups that do not exist yet: all of them, on all ranks, in the same order."""
        mine: dict[str, dist.ProcessGroup] = {}
        for name, partition in partitions.items():
            for ranks in partition:
                if ranks not in self._groups:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=store.FOREVER)
                if self._rank in ranks:
                    mine[name] = self._groups[ranks]
        return RankContext(self._rank, self._world, self._device, mine, self._kept, calls)
