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
from statistics import median
from types import TracebackType
from typing import cast

from .. import Engine, Job, JobResult, RankResult
from . import leaks, probe
from .faults import FAULTS, Fault, Verdict
from .injection import NONMEMBER, Injection, groups

_PACKAGE = __name__.rpartition(".")[0]
_PRELOAD = tuple(f"{_PACKAGE}.{name}" for name in ("failures", "collectives", "leftovers", "probe"))
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


class ProbeError(Exception):
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
            self._run_probe(world)  # makes the groups
        self._states = {world: [each.state for each in self._run_probe(world)] for world in worlds}
        self._fork_server = self._run_probe(worlds[0])[0].parent
        self._before = leaks.holdings(self.mark, self._fork_server, self._ranks())

    def __enter__(self) -> Drill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._engine.close()

    def run(self, times: int = 1, faults: Sequence[Fault] = FAULTS) -> Iterator[Trial]:
        """Plays every fault on every world, with another faulty rank each time."""
        for turn, fault, world in itertools.product(range(times), faults, self._states):
            yield self.inject(Injection(fault, world, turn))

    def inject(self, injection: Injection) -> Trial:
        """Plays one fault, and a good case after it."""
        fault, world = injection.fault, injection.world
        began = time.monotonic()
        result = self._engine.run(Job(fault.function, injection.target, world, groups(world), fault.deadline_s))
        told = time.monotonic()
        wrong = list(_wrong_result(injection, result))
        try:
            good = self._run_probe(world)
        except ProbeError as error:
            wrong.append(str(error))
            self._engine.renew(world)
            good = self._run_probe(world)
        again = time.monotonic()
        if [one.state for one in good] != self._states[world]:
            wrong.append(f"the ranks of the next case are not as new: {good}")
        wrong += self._leaks()
        return Trial(fault, world, verdict_of(result), result.blamed, told - began, again - told, tuple(wrong))

    def _run_probe(self, world: int) -> list[probe.ProbeResult]:
        ticket = next(self._tickets)
        partitions = groups(world)
        result = self._engine.run(Job(f"{_PACKAGE}.probe:run", ticket, world, partitions))
        if not result.ok:
            raise ProbeError(f"the next case failed: {'; '.join(rank.error for rank in result.ranks if rank.error)}")
        said = [cast(probe.ProbeResult, rank.value) for rank in result.ranks]
        for rank, one in enumerate(said):
            mine = {name: len(ranks) for name, lists in partitions.items() for ranks in lists if rank in ranks}
            expected = probe.expected(ticket, rank, world, mine)
            if expected != (one.ticket, one.sums, one.received):
                raise ProbeError(f"rank {rank} computed {one} in the next case, not {expected}")
        self._pids[world] = tuple(one.pid for one in said)
        return said

    def _leaks(self) -> list[str]:
        """Says what leaked; it is told once."""
        before = self._before
        self._before = leaks.settled(before, self.mark, self._fork_server, self._ranks())
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


def _wrong_result(injection: Injection, result: JobResult) -> Iterator[str]:
    fault = injection.fault
    if (verdict := verdict_of(result)) not in fault.verdict:
        yield f"verdict {verdict}, not {' or '.join(fault.verdict)}"
    if result.blamed != injection.blamed:
        yield f"blamed {result.blamed}, not {injection.blamed}"
    if [rank.rank for rank in result.ranks] != list(range(injection.world)):
        yield f"results of ranks {[rank.rank for rank in result.ranks]}"
    if bool(result.disagreements) != fault.disagrees:
        yield f"disagreements {[str(each) for each in result.disagreements]}"
    cause = str(result.disagreements[0]) if result.disagreements else ""
    for rank in result.ranks:
        for sentence in _wrong_rank(injection, rank, cause):
            yield f"rank {rank.rank} ({injection.role(rank.rank)}): {sentence}"


def _wrong_rank(injection: Injection, rank: RankResult, cause: str) -> Iterator[str]:
    fault, role = injection.fault, injection.role(rank.rank)
    allowed = ("ok",) if role == "nonmember" else fault.faulty if role == "faulty" else fault.peers
    if rank.status not in allowed:
        yield f"{rank.status}, not {' or '.join(allowed)}: {rank.error}"
    returned = None if rank.status != "ok" else NONMEMBER if role == "nonmember" else "returned"
    if rank.value != returned:
        yield f"returned {rank.value!r}, not {returned!r}"
    if rank.rank in injection.blamed and not re.search(fault.says, f"{rank.error}; {cause}"):
        yield f"says {rank.error!r} because of {cause!r}, not {fault.says!r}"
    if not injection.blamed and role == "faulty" and not re.search(fault.says, ", ".join(rank.left)):
        yield f"left {rank.left}, not {fault.says!r}"
    if rank.status != "ok" and (role != "faulty" or fault.stacks) and not rank.traceback:
        yield f"{rank.status} without a stack"
    if len(rank.output or "") > _LARGEST_OUTPUT:
        yield f"{len(rank.output or '')} characters of output"
    yield from _wrong_ledger(injection, rank)


def _wrong_ledger(injection: Injection, rank: RankResult) -> Iterator[str]:
    calls = " ".join(entry.op for entry in rank.ledger)
    role = injection.role(rank.rank)
    expected = "" if role == "nonmember" else injection.fault.calls[0 if role == "faulty" else 1]
    if not re.fullmatch(expected, calls):
        yield f"made the calls {calls!r}, not {expected!r}"


def table(trials: Sequence[Trial]) -> list[str]:
    """Returns the lines of a Markdown table: one row per fault and world; times are least / median / greatest."""
    rows: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.fault.name, trial.world), []).append(trial)
    cells = [
        ("fault", "ranks", "verdict", "blamed", "report s", "next case s", "right"),
        *(_row(name, world, played) for (name, world), played in rows.items()),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _row(name: str, world: int, played: Sequence[Trial]) -> tuple[str, ...]:
    right = sum(not trial.wrong for trial in played)
    return (
        name,
        str(world),
        ", ".join(sorted({trial.verdict for trial in played})),
        _blamed(played),
        _times([trial.report_s for trial in played]),
        _times([trial.next_s for trial in played]),
        ("yes" if right else "NO") if len(played) == 1 else f"{right} of {len(played)}",
    )


def _blamed(played: Sequence[Trial]) -> str:
    """Names the ranks of one playing, and the rule of many: each has another faulty rank."""
    if len(played) == 1:
        return " and ".join(map(str, played[0].blamed)) or "nobody"
    return played[0].fault.blamed


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.2f}"
    return f"{min(seconds):.2f} / {median(seconds):.2f} / {max(seconds):.2f}"
