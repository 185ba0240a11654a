"""A world of virtual ranks, as the driver sees it: one process."""

from __future__ import annotations

import contextlib
import re
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from .. import blame, stacks, wire
from ..blame import Finding, raised
from ..faults import one_line, type_name
from ..hosts import Hosts, RankProcess
from ..infrastructure import classify
from ..job_message import PackedJob
from ..local_host import describe_exit
from ..rank import Answer, RankSpec
from ..records import NO_ANSWER, EngineError, Job, JobResult, RankResult
from ..running import StartedJobs
from .threads import End, Order

_START_LIMIT_S = 120.0
_GRACE_S = 1.0  # after the deadline, for the process to report which ranks hang; it cannot while a rank holds the GIL
_WAITS = re.compile(r'first\):\n  File ".*/engine/virtual/scheduler\.py"')  # in the scheduler


@dataclass(frozen=True)
class _StartedJobs:
    world: VirtualWorld
    job: Job
    began: float

    @property
    def ready(self) -> bool:
        """False: results are known only once they are collected."""
        return False

    def wait(self) -> bool:
        """Returns False: the ranks cannot run other jobs before the results are collected."""
        return False

    def collect(self) -> list[JobResult]:
        """Waits for the job and returns its result."""
        return [self.world.collect(self)]


class VirtualWorld:
    """The virtual ranks of one world size: threads of one process, which is replaced after a fault."""

    def __init__(self, size: int, device: str, hosts: Hosts) -> None:
        self._size, self._hosts = size, hosts
        self._spec = RankSpec(
            rank=0, device=device, world=size, transport="", address="", port=0, prefix="", virtual=True
        )
        self._process: RankProcess | None = None
        self.stops = 0

    def start(self, number: int, packed_jobs: Sequence[PackedJob]) -> StartedJobs:
        """Sends one job to the ranks; `number` is never used twice.

        Raises:
            EngineError: the ranks could not start, or the job asks for more than "plain" asynchrony.
        """
        (packed_job,) = packed_jobs
        job = packed_job.job
        if job.asynchrony != "plain":
            raise EngineError(f"virtual ranks have no {job.asynchrony} collectives; run the job on real ones")
        try:
            process = self._ensure()
            started = _StartedJobs(self, job, time.monotonic())
            order = Order(number, packed_job.task, job.deadline_s, tuple(map(len, packed_job.rank_payloads)))
            process.channel.socket.settimeout(job.deadline_s)
            self._hosts.begin([process])
            with contextlib.suppress(OSError):  # it has just exited, or is stopped: there will be no answer
                process.channel.send(
                    [*wire.dumps(order), *packed_job.payload, *chain.from_iterable(packed_job.rank_payloads)]
                )
            return started
        except BaseException:
            self.stop()
            raise

    def collect(self, started: _StartedJobs) -> JobResult:
        """Waits for a job that was started."""
        try:
            findings = self._findings(started)
            seconds = time.monotonic() - started.began
            disagreements = blame.disagreements(findings)
            results = blame.assign(findings, disagreements)
            result = JobResult(self._with_output(results), seconds, disagreements)
            if not result.ok or any(rank.left for rank in results):
                self.stop()
        except BaseException:
            self.stop()
            raise
        return result

    def stop(self) -> None:
        """Kills the process; the next job starts another."""
        self.stops += 1
        if self._process is not None:
            self._hosts.drop(self._process)
            self._process = None

    def _ensure(self) -> RankProcess:
        self._hosts.collect()
        if self._process is not None and self._hosts.exit_code(self._process) is None:
            return self._process
        self.stop()
        who = f"the process of {self._size} virtual ranks"
        self._process = process = self._hosts.start([self._spec])[0]
        process.channel.socket.settimeout(_START_LIMIT_S)
        try:
            answer: Answer = wire.loads(process.channel.receive())
        except TimeoutError:
            raise EngineError(f"{who} had not started after {_START_LIMIT_S} s") from None
        except (EOFError, OSError):
            code = self._hosts.wait(process, patience_s=1.0)
            how = "closed its channel" if code is None else describe_exit(code)
            raise EngineError(f"{who} ended while it was starting: {how}") from None
        if answer.fault is not None:
            raise EngineError(f"{who} could not start: {answer.fault.error}\n{answer.fault.traceback}")
        return process

    # ---- what became of the job ----------------------------------------------------------------------------------

    def _findings(self, started: _StartedJobs) -> list[Finding]:
        assert self._process is not None
        message = self._receive(self._process, started)
        if message is not None:
            return _read(message, started.job)
        code = self._hosts.exit_code(self._process)
        if code is not None:
            return self._died(self._process, code)
        return self._unresponsive(self._process, started.job.deadline_s)

    def _receive(self, process: RankProcess, started: _StartedJobs) -> list[bytearray] | None:
        """Returns the process's answer; None if it has exited or the deadline has passed."""
        until = started.began + started.job.deadline_s + _GRACE_S
        with selectors.DefaultSelector() as selector:
            for waker in self._hosts.wakers():
                selector.register(waker, selectors.EVENT_READ)
            selector.register(process.channel, selectors.EVENT_READ)
            while True:
                left = until - time.monotonic()
                events = selector.select(max(left, 0.0))
                if process.channel.readable():  # in time, even if it is read late: the driver has other work
                    with contextlib.suppress(EOFError, OSError):
                        return process.channel.receive()
                    self._hosts.wait(process, patience_s=1.0)
                    return None
                self._hosts.collect()
                if self._hosts.exit_code(process) is not None or not events:
                    return None

    def _died(self, process: RankProcess, code: int) -> list[Finding]:
        how = describe_exit(code) + ("" if code < 0 else " before it answered")
        running = self._running_rank(process)
        dump = self._hosts.last_stacks(process) or None
        if running is None:
            return [Finding(RankResult(rank, "died", error=how, traceback=dump)) for rank in range(self._size)]
        others = f"its process, which it shares, was ended while rank {running} ran: {how}"
        return [
            Finding(RankResult(rank, "died", error=how, traceback=dump))
            if rank == running
            else Finding(RankResult(rank, "died", error=others), waits=True)
            for rank in range(self._size)
        ]

    def _unresponsive(self, process: RankProcess, deadline_s: float) -> list[Finding]:
        """Returns the findings of a process that does not answer: a rank holds the GIL, or all are stopped."""
        text = _running_block(self._hosts.stacks([process])[process.rank])
        running = self._running_rank(process)
        why = f"{NO_ANSWER} {deadline_s:.1f} s"
        return [
            Finding(RankResult(rank, "hung", error=f"{why}: {stacks.location(text)}", traceback=text or None))
            if rank == running
            else Finding(
                RankResult(rank, "hung", error=f"{why}: rank {running} ran without yielding to the others"), waits=True
            )
            for rank in range(self._size)
        ]

    def _running_rank(self, process: RankProcess) -> int | None:
        """Returns the rank that ran last; None if none ran."""
        lines = self._hosts.ledgers([process])[process.rank].split(b"\n")
        return int(lines[-2]) if len(lines) > 1 else None

    def _with_output(self, results: Sequence[RankResult]) -> tuple[RankResult, ...]:
        """Adds what the process printed to the results of the ranks at fault."""
        assert self._process is not None
        if all(result.status == "ok" for result in results):
            return tuple(results)
        printed = self._hosts.printed(self._process) or None
        found = []
        for result in results:
            if result.status != "ok" and not result.secondary:
                text = "\n".join(filter(None, (result.error, result.traceback, printed)))
                result = replace(result, output=printed, infrastructure=classify(text))
            found.append(result)
        return tuple(found)


def _read(message: list[bytearray], job: Job) -> list[Finding]:
    ends: list[End] = wire.loads(message[:1])
    values = iter(message[1:])
    findings = []
    for rank, end in enumerate(ends):
        buffers = sum(one.buffers for one in end.answer.returned) if end.answer is not None else 0
        finding = _judge(rank, end, list(islice(values, buffers)), job)
        findings.append(replace(finding, result=replace(finding.result, ledger=end.ledger)))
    return findings


def _judge(rank: int, end: End, value: Sequence[bytearray], job: Job) -> Finding:
    if end.stuck is not None:
        stuck = end.stuck
        return Finding(RankResult(rank, "hung", error=stuck.error, traceback=stuck.stack), waits=stuck.waits)
    assert end.answer is not None
    fault = end.answer.fault
    if fault is None:
        try:
            return Finding(RankResult(rank, "ok", wire.loads(value), left=end.answer.returned[0].left))
        except Exception as error:
            sentence = f"the function's result cannot be read on the driver: {one_line(error)}"
            return Finding(RankResult(rank, "raised", error=sentence, error_type=type_name(type(error))))
    if end.answer.outcome == "unprepared":
        raise EngineError(f"rank {rank} cannot run {job.function}: {fault.error}\n{fault.traceback}")
    return raised(rank, fault)


def _running_block(text: str) -> str:
    """Returns the stack of the thread that does not wait in the scheduler; "" if the dump has none."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if "most recent call first" in block]
    return next((block for block in blocks if not _WAITS.search(block)), "")
