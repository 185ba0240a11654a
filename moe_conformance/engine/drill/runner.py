"""Plays faults to a real engine and holds what it says, and what is left of it, against what must be."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from .. import Engine, Job, JobResult, RankResult
from . import leaks, probe
from .faults import FAULTS, Fault, Verdict
from .plot import BYSTANDER
from .scene import Scene, groups

_PACKAGE = __name__.rpartition(".")[0]
_PRELOAD = tuple(f"{_PACKAGE}.{name}" for name in ("ends", "collectives", "remains", "probe"))
_MARK = "ENGINE_DRILL"
_LARGEST_OUTPUT = 1 << 16


@dataclass(frozen=True)
class Trial:
    """How one playing of a fault went.

    Attributes:
        fault: The fault.
        world: The number of ranks.
        verdict: What the engine's result comes to.
        blamed: Whom it blames.
        report_s: Seconds from the start of the job to its result.
        next_s: Seconds from there to the result of a good case.
        wrong: One sentence for everything that is not as it must be.
    """

    fault: Fault
    world: int
    verdict: Verdict
    blamed: tuple[int, ...]
    report_s: float
    next_s: float
    wrong: tuple[str, ...]


class BadCaseError(Exception):
    """A good case went wrong."""


class Drill:
    """An engine with ranks for worlds of several sizes, all of them kept up while faults are played on one.

    Args:
        worlds: Even numbers of ranks.

    Attributes:
        mark: The environment variable, with its value, by which all processes of this engine are known.
    """

    def __init__(self, worlds: Sequence[int]) -> None:
        self._tickets = itertools.count(1)
        mark = uuid.uuid4().hex
        self.mark = f"{_MARK}={mark}"
        with _silence():
            self._engine = Engine(preload=_PRELOAD, environment={_MARK: mark})
        self._pids: dict[int, tuple[int, ...]] = {}
        for world in worlds:
            self._run_good(world)  # makes the groups
        self._states = {world: [each.state for each in self._run_good(world)] for world in worlds}
        self._nursery = self._run_good(worlds[0])[0].parent
        self._before = leaks.holdings(self.mark, self._nursery, self._ranks())

    def __enter__(self) -> Drill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._engine.close()

    def run(self, times: int = 1, faults: Sequence[Fault] = FAULTS) -> Iterator[Trial]:
        """Plays every fault on every world, with another faulty rank each time."""
        for turn, fault, world in itertools.product(range(times), faults, self._states):
            yield self.play(Scene(fault, world, turn))

    def play(self, scene: Scene) -> Trial:
        """Plays one fault, and a good case after it."""
        fault, world = scene.fault, scene.world
        began = time.monotonic()
        result = self._engine.run(Job(fault.function, scene.plot, world, groups(world), fault.deadline_s))
        told = time.monotonic()
        wrong = list(_wrong_result(scene, result))
        try:
            good = self._run_good(world)
        except BadCaseError as error:
            wrong.append(str(error))
            self._engine.renew(world)
            good = self._run_good(world)
        again = time.monotonic()
        if [one.state for one in good] != self._states[world]:
            wrong.append(f"the ranks of the next case are not as new: {good}")
        wrong += self._leaks()
        return Trial(fault, world, verdict_of(result), result.blamed, told - began, again - told, tuple(wrong))

    def _run_good(self, world: int) -> list[probe.Good]:
        ticket = next(self._tickets)
        partitions = groups(world)
        result = self._engine.run(Job(f"{_PACKAGE}.probe:good", ticket, world, partitions))
        if not result.ok:
            raise BadCaseError(f"the next case failed: {'; '.join(rank.error for rank in result.ranks if rank.error)}")
        said = [cast(probe.Good, rank.value) for rank in result.ranks]
        for rank, one in enumerate(said):
            mine = {name: len(ranks) for name, lists in partitions.items() for ranks in lists if rank in ranks}
            expected = probe.expected(ticket, rank, world, mine)
            if expected != (one.ticket, one.sums, one.received):
                raise BadCaseError(f"rank {rank} computed {one} in the next case, not {expected}")
        self._pids[world] = tuple(one.pid for one in said)
        return said

    def _leaks(self) -> list[str]:
        """Says what leaked; it is told once."""
        before = self._before
        self._before = leaks.settled(before, self.mark, self._nursery, self._ranks())
        return leaks.differences(before, self._before)

    def _ranks(self) -> list[int]:
        return [pid for pids in self._pids.values() for pid in pids]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps to itself what the processes that are started meanwhile print: it is no part of the drill's report."""
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def verdict_of(result: JobResult) -> Verdict:
    """Returns what a result comes to, in one word."""
    blamed = [result.ranks[rank] for rank in result.blamed]
    if any(rank.status == "hung" for rank in result.ranks):
        return "hang"
    if any(rank.status in ("raised", "died") for rank in blamed):
        return "crash"
    return "fail" if blamed else "pass"


def _wrong_result(scene: Scene, result: JobResult) -> Iterator[str]:
    fault = scene.fault
    if (verdict := verdict_of(result)) not in fault.verdict:
        yield f"verdict {verdict}, not {' or '.join(fault.verdict)}"
    if result.blamed != scene.blamed:
        yield f"blamed {result.blamed}, not {scene.blamed}"
    if [rank.rank for rank in result.ranks] != list(range(scene.world)):
        yield f"results of ranks {[rank.rank for rank in result.ranks]}"
    if bool(result.disagreements) != fault.disagrees:
        yield f"disagreements {[str(each) for each in result.disagreements]}"
    cause = str(result.disagreements[0]) if result.disagreements else ""
    for rank in result.ranks:
        for sentence in _wrong_rank(scene, rank, cause):
            yield f"rank {rank.rank} ({scene.role(rank.rank)}): {sentence}"


def _wrong_rank(scene: Scene, rank: RankResult, cause: str) -> Iterator[str]:
    fault, role = scene.fault, scene.role(rank.rank)
    allowed = ("ok",) if role == "bystander" else fault.faulty if role == "faulty" else fault.peers
    if rank.status not in allowed:
        yield f"{rank.status}, not {' or '.join(allowed)}: {rank.error}"
    returned = None if rank.status != "ok" else BYSTANDER if role == "bystander" else "returned"
    if rank.value != returned:
        yield f"returned {rank.value!r}, not {returned!r}"
    if rank.rank in scene.blamed and not re.search(fault.says, f"{rank.error}; {cause}"):
        yield f"says {rank.error!r} because of {cause!r}, not {fault.says!r}"
    if not scene.blamed and role == "faulty" and not re.search(fault.says, ", ".join(rank.left)):
        yield f"left {rank.left}, not {fault.says!r}"
    if rank.status != "ok" and (role != "faulty" or fault.stacks) and not rank.traceback:
        yield f"{rank.status} without a stack"
    if len(rank.output or "") > _LARGEST_OUTPUT:
        yield f"{len(rank.output or '')} characters of output"
    yield from _wrong_ledger(scene, rank)


def _wrong_ledger(scene: Scene, rank: RankResult) -> Iterator[str]:
    calls = " ".join(entry.op for entry in rank.ledger)
    role = scene.role(rank.rank)
    expected = "" if role == "bystander" else scene.fault.calls[0 if role == "faulty" else 1]
    if not re.fullmatch(expected, calls):
        yield f"made the calls {calls!r}, not {expected!r}"
