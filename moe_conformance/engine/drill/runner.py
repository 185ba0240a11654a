"""Injects faults into a real engine, compares results with expectations, and prints the table."""

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
    """What came of one injection of a fault.

    Attributes:
        fault: The fault.
        world: The number of ranks.
        verdict: The verdict on the engine's result.
        blamed: The ranks that it blames.
        report_s: Seconds from the start of the job to its result.
        next_s: Seconds from there to the result of the healthy job.
        wrong: One sentence for everything that differs from what the fault requires.
    """

    fault: Fault
    world: int
    verdict: Verdict
    blamed: tuple[int, ...]
    report_s: float
    next_s: float
    wrong: tuple[str, ...]


class ProbeError(Exception):
    """The healthy job after a fault failed, or computed wrong numbers."""


class Drill:
    """An engine with worlds of several sizes, all of which are kept while faults are injected into one.

    Args:
        worlds: Even numbers of ranks.

    Attributes:
        mark: The environment variable, with its value, that identifies all processes of this engine.
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
        self._states = {world: [probed.state for probed in self._run_probe(world)] for world in worlds}
        self._fork_server = self._run_probe(worlds[0])[0].parent
        self._before = leaks.count_resources(self.mark, self._fork_server, self._ranks())

    def __enter__(self) -> Drill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._engine.close()

    def run(self, times: int = 1, faults: Sequence[Fault] = FAULTS) -> Iterator[Trial]:
        """Injects every fault into every world, with another faulty rank in every repetition."""
        for turn, fault, world in itertools.product(range(times), faults, self._states):
            yield self.inject(Injection(fault, world, turn))

    def inject(self, injection: Injection) -> Trial:
        """Injects one fault, and runs a healthy job after it."""
        fault, world = injection.fault, injection.world
        began = time.monotonic()
        result = self._engine.run(Job(fault.function, injection.target, world, groups(world), fault.deadline_s))
        reported = time.monotonic()
        wrong = list(_wrong_result(injection, result))
        try:
            probes = self._run_probe(world)
        except ProbeError as error:
            wrong.append(str(error))
            self._engine.renew(world)
            probes = self._run_probe(world)
        again = time.monotonic()
        if [probed.state for probed in probes] != self._states[world]:
            wrong.append(f"the state of the ranks differs from that of new ranks: {probes}")
        wrong += self._leaks()
        return Trial(fault, world, verdict_of(result), result.blamed, reported - began, again - reported, tuple(wrong))

    def _run_probe(self, world: int) -> list[probe.ProbeResult]:
        ticket = next(self._tickets)
        partitions = groups(world)
        result = self._engine.run(Job(f"{_PACKAGE}.probe:run", ticket, world, partitions))
        if not result.ok:
            raise ProbeError(f"the healthy job failed: {'; '.join(rank.error for rank in result.ranks if rank.error)}")
        probes = [cast(probe.ProbeResult, rank.value) for rank in result.ranks]
        for rank, probed in enumerate(probes):
            sizes = {}
            for name, partition in partitions.items():
                for ranks in partition:
                    if rank in ranks:
                        sizes[name] = len(ranks)
            expected = probe.expected(ticket, rank, world, sizes)
            if expected != (probed.ticket, probed.sums, probed.received):
                raise ProbeError(f"rank {rank} computed {probed} in the healthy job, not {expected}")
        self._pids[world] = tuple(probed.pid for probed in probes)
        return probes

    def _leaks(self) -> list[str]:
        """Returns one line for each leaked resource, and makes the present count the one to compare with."""
        before = self._before
        self._before = leaks.settled(before, self.mark, self._fork_server, self._ranks())
        return leaks.differences(before, self._before)

    def _ranks(self) -> list[int]:
        return [pid for pids in self._pids.values() for pid in pids]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Redirects stdout to /dev/null for processes that are started in the block."""
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
    """Returns the verdict on a result: "hang", "crash", "fail" or "pass"."""
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
        yield f"disagreements {[str(disagreement) for disagreement in result.disagreements]}"
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
        yield f"error {rank.error!r} because of {cause!r}, not {fault.says!r}"
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
    """Returns the lines of a Markdown table, one row per fault and world; times are least / median / greatest."""
    rows: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.fault.name, trial.world), []).append(trial)
    cells = [
        ("fault", "ranks", "verdict", "blamed", "report s", "next case s", "right"),
        *(_row(name, world, played) for (name, world), played in rows.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
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
    """Returns the blamed ranks of one trial, or the rule for several trials with different faulty ranks."""
    if len(played) == 1:
        return " and ".join(map(str, played[0].blamed)) or "nobody"
    return played[0].fault.blamed


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.2f}"
    return f"{min(seconds):.2f} / {median(seconds):.2f} / {max(seconds):.2f}"
