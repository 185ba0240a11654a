"""A world of ranks, each a process: started on demand, given jobs, and replaced after a fault."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import blame, wire
from .blame import Finding
from .hosts import Hosts, RankProcess
from .job_message import PackedJob, Request
from .job_wait import JobWait
from .local_host import describe_exit
from .rank import Answer, RankSpec
from .records import EngineError, JobResult
from .running import StartedJobs
from .store import StoreServer
from .transport import assign

_START_LIMIT_S = 120.0


class World:
    """The ranks of one world size, each in a process.

    The ranks are kept after a job only if all of them returned, agree on their collectives and left nothing behind. A
    rank that exits between two jobs is detected before the next one, and the ranks are replaced; no job is blamed.
    """

    def __init__(self, size: int, device: str, hosts: Hosts, store: StoreServer, notice: Callable[[str], None]) -> None:
        self._size = size
        self._device = device
        self._hosts = hosts
        self._store = store
        self._notice = notice
        self._ranks: list[RankProcess] = []
        self.stops = 0

    def start(self, number: int, packed_jobs: Sequence[PackedJob]) -> StartedJobs:
        """Sends jobs to the ranks; `number` is never used twice.

        Raises:
            EngineError: a rank could not start.
        """
        self._ensure()
        try:
            began = time.monotonic()
            head = wire.dumps(Request(number, tuple(packed.task for packed in packed_jobs)))
            jobs = [packed.job for packed in packed_jobs]
            self._send(head, packed_jobs, min(job.deadline_s for job in jobs))
            gpu = self._device != "cpu"
            return _StartedJobs(
                self, JobWait(self._hosts, self._ranks, number, began, jobs, gpu=gpu, notice=self._notice)
            )
        except BaseException:
            self.stop()
            raise

    def collect(self, job_wait: JobWait) -> list[JobResult] | None:
        """Waits for jobs that were started; None if there are several and not all of them are ok."""
        try:
            results = [_result(findings, seconds) for findings, seconds in job_wait.findings()]
        except BaseException:  # Ctrl-C too: the ranks are in the middle of something
            self.stop()
            raise
        if results and all(result.ok and not any(rank.left for rank in result.ranks) for result in results):
            return results
        self.stop()
        return results if len(job_wait.jobs) == 1 else None

    def stop(self) -> None:
        """Kills the ranks; the next job starts new ones."""
        self.stops += 1
        ranks, self._ranks = self._ranks, []
        for process in ranks:
            self._hosts.drop(process)

    def _ensure(self) -> None:
        self._hosts.collect()
        # Between jobs a rank sends nothing: what can be read is EOF, which may come before the report of its exit.
        if any(self._hosts.exit_code(rank) is not None or rank.channel.readable() for rank in self._ranks):
            self.stop()
        if not self._ranks:
            try:
                self._start()
            except BaseException:
                self.stop()
                raise

    def _start(self) -> None:
        prefix = self._store.fresh_prefix()
        placements = [self._hosts.placement(rank) for rank in range(self._size)]
        devices, transport = assign(self._device, placements)
        where = (self._size, transport, self._hosts.address, self._store.port, prefix)
        specs = [
            RankSpec(rank, device, *where, local_rank=placement.local_rank)
            for rank, (device, placement) in enumerate(zip(devices, placements, strict=True))
        ]
        self._ranks = self._hosts.start(specs)
        until = time.monotonic() + _START_LIMIT_S
        with selectors.DefaultSelector() as selector:
            for process in self._ranks:
                selector.register(process.channel, selectors.EVENT_READ, process)
            while selector.get_map():
                ready = selector.select(until - time.monotonic())
                if not ready:
                    raise EngineError(f"a world of {self._size} had not started after {_START_LIMIT_S} s")
                for key, _ in ready:
                    self._receive_first_answer(key.data)
                    selector.unregister(key.fileobj)

    def _receive_first_answer(self, process: RankProcess) -> None:
        """Reads a new rank's first answer, and raises if the rank could not start."""
        who = f"rank {process.rank} of a world of {self._size}"
        try:
            answer: Answer = wire.loads(process.channel.receive())
        except (EOFError, OSError):
            code = self._hosts.wait(process, patience_s=1.0)
            how = "closed its channel" if code is None else describe_exit(code)
            raise EngineError(f"{who} ended while it was starting: {how}") from None
        if answer.fault is not None:
            raise EngineError(f"{who} could not start: {answer.fault.error}\n{answer.fault.traceback}")

    def _send(self, head: Sequence[wire.Buffer], packed_jobs: Sequence[PackedJob], deadline_s: float) -> None:
        self._hosts.begin(self._ranks)
        for process in self._ranks:
            contents = [buffer for packed in packed_jobs for buffer in packed.buffers_for(process.rank)]
            process.channel.socket.settimeout(deadline_s)
            with contextlib.suppress(OSError):  # it has just exited, or is stopped: there will be no answer
                process.channel.send([*head, *contents])


def _result(findings: Sequence[Finding], seconds: float) -> JobResult:
    disagreements = blame.disagreements(findings)
    return JobResult(blame.assign(findings, disagreements), seconds, disagreements)


@dataclass(frozen=True)
class _StartedJobs:
    world: World
    job_wait: JobWait

    @property
    def ready(self) -> bool:
        return self.job_wait.ready

    def wait(self) -> bool:
        return self.job_wait.wait()

    def collect(self) -> list[JobResult] | None:
        return self.world.collect(self.job_wait)
