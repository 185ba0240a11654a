"""The driver's wait for the answers to one job."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from . import stacks, wire
from .blame import Finding
from .deadlock import DeadlockWatch
from .faults import one_line, type_name
from .host import Host, RankProcess
from .infrastructure import classify
from .launcher import describe_exit
from .ledger.entry import decode
from .rank import Answer
from .records import EngineError, Job, RankResult
from .stillness import INTERVAL_S

_LAST_WORDS_S = 2.0  # from another machine, the news of a rank's end may overtake its answer
_AWAKENING_S = 1.0
_QUIET_S = 0.2  # without news, before ranks are watched for stillness: short jobs pay nothing for it


class Vigil:
    """Waits until every rank has answered or ended, the deadline passes, or the ranks can no longer move.

    What is read of the answers and of what the ranks wrote can wait: `settle` leaves that to `findings`.
    """

    def __init__(
        self, host: Host, ranks: Sequence[RankProcess], number: int, began: float, job: Job, *, gpu: bool
    ) -> None:
        self._host = host
        self._ranks = ranks
        self._number = number
        self._job = job
        self._gpu = gpu
        self.began = began
        self._until = began + job.deadline_s
        self._pending = {process.rank: process for process in ranks}
        self._findings: dict[int, Finding] = {}
        self._ledgers: dict[int, bytes] = {}  # as they were when all had answered, or the others were given up
        self._failure: EngineError | None = None
        self._ended = 0.0

    @property
    def seconds(self) -> float:
        """From the beginning until all had answered or were given up."""
        return self._ended - self.began

    def settle(self) -> bool:
        """Waits, the first time; tells whether all ranks returned and left nothing behind."""
        if not self._ended:
            try:
                self._wait()
            except EngineError as error:
                self._failure = error
            self._ended = time.monotonic()
        results = [finding.result for finding in self._findings.values()]
        return self._failure is None and all(result.status == "ok" and not result.left for result in results)

    def findings(self) -> list[Finding]:
        """Returns one finding per rank, in the order of ranks.

        Raises:
            EngineError: a rank could not load the function or the payload, or not make a group.
        """
        self.settle()
        if self._failure is not None:
            raise self._failure
        return [self._complete(process, self._ledgers[process.rank]) for process in self._ranks]

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for waker in self._host.wakers():
                selector.register(waker, selectors.EVENT_READ, None)
            for process in self._ranks:
                selector.register(process.channel, selectors.EVENT_READ, process)
            self._listen(selector)
        if self._pending:
            self._give_up(f"no answer within {self._job.deadline_s:.1f} s")
        self._ledgers = self._ledgers or self._host.ledgers(self._ranks)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        watch: DeadlockWatch | None = None
        while self._pending:
            left = self._until - time.monotonic()
            events = selector.select(max(0.0, min(left, INTERVAL_S if watch else _QUIET_S)))
            if left <= 0 and not events:  # an answer in time may be taken in late: the driver has other work
                return
            for key, _ in events:
                if key.data is None:
                    self._host.collect()
                elif not self._hear(key.data):
                    selector.unregister(key.fileobj)
            self._bury()
            if events or self._gpu:  # a GPU could wake a rank that lies still
                watch = None
            elif watch is None:
                watch = DeadlockWatch(self._host, self._ranks)
            elif self._pending and watch.proves(self._pending.values()):
                self._give_up("waits in a collective that can no longer complete")

    def _hear(self, process: RankProcess) -> bool:
        """Takes in a rank's answer; returns False once there is nothing more to hear from it."""
        try:
            message = process.channel.receive()
            answer: Answer = wire.loads(message[:1])
        except (EOFError, OSError):
            return False
        except wire.GarbledError as error:
            sentence = f"something else than its answer was written into this rank's channel to the driver: {error}"
            if process.rank in self._pending:
                self._settle(Finding(RankResult(process.rank, "raised", error=sentence)))
            return False
        if answer.number == self._number:  # else late, for an earlier job
            self._settle(self._judge(process.rank, answer, message[1:]))
        return True

    def _judge(self, rank: int, answer: Answer, value: Sequence[bytearray]) -> Finding:
        fault = answer.fault
        if fault is None:
            try:
                loaded = wire.loads(value)
                return Finding(RankResult(rank, "ok", loaded, left=answer.left, host_syncs=answer.host_syncs))
            except Exception as error:
                sentence = f"the function's result cannot be read on the driver: {one_line(error)}"
                return Finding(RankResult(rank, "raised", error=sentence, error_type=type_name(type(error))))
        # A peer may be done with making groups, and in trouble already, while this rank was still making them.
        if answer.outcome == "unprepared" and not fault.connection_lost:
            raise EngineError(f"rank {rank} cannot run {self._job.function}: {fault.error}\n{fault.traceback}")
        return Finding(
            RankResult(
                rank,
                "raised",
                error=fault.error,
                error_type=fault.error_type,
                error_attributes=fault.error_attributes,
                traceback=fault.traceback,
            ),
            connection_lost=fault.connection_lost,
        )

    def _bury(self) -> None:
        """Settles ranks that have ended; their last words first."""
        for process in list(self._pending.values()):
            code = self._host.exit_code(process)
            if code is None:
                continue
            while process.rank in self._pending and process.channel.readable(_LAST_WORDS_S) and self._hear(process):
                pass
            if process.rank in self._pending:
                how = describe_exit(code) + ("" if code < 0 else " before it answered")
                result = RankResult(process.rank, "died", error=how, traceback=self._host.last_stacks(process) or None)
                self._settle(Finding(result))

    def _give_up(self, why: str) -> None:
        """Settles all ranks without an answer as hung."""
        pending = tuple(self._pending.values())
        texts = self._host.stacks(pending)
        silent = [process for process in pending if not texts[process.rank]]
        self._ledgers = self._host.ledgers(self._ranks)  # before one that was stopped goes on
        stopped = self._awaken(silent) if silent else {}
        for rank, text in (texts | stopped).items():
            place = ("stopped by a signal " if stopped.get(rank) else "") + stacks.place(text)
            result = RankResult(rank, "hung", error=f"{why}: {place}", traceback=text or None)
            self._settle(Finding(result, waits=rank not in stopped and stacks.waits_in_collective(text)))

    def _awaken(self, silent: Sequence[RankProcess]) -> dict[int, str]:
        """Lets ranks that dumped no stack go on, in case that they are stopped: the dump is the first that they do."""
        self._host.signal(silent, signal.SIGCONT)
        until = time.monotonic() + _AWAKENING_S
        texts: dict[int, str] = {}
        dumped = False
        while not dumped and time.monotonic() < until:
            time.sleep(INTERVAL_S)
            before, texts = texts, {process.rank: self._host.last_stacks(process) for process in silent}
            dumped = before == texts and all(texts.values())
        return texts

    def _complete(self, process: RankProcess, written: bytes) -> Finding:
        """Adds what a rank wrote, and if it failed what it printed."""
        finding, ledger = self._findings[process.rank], decode(written)
        result = replace(finding.result, ledger=ledger.entries, hazards=ledger.hazards)
        if result.status == "ok":
            return replace(finding, result=result)
        printed = self._host.printed(process) or None
        told = "\n".join(filter(None, (result.error, result.traceback, printed)))
        return replace(finding, result=replace(result, output=printed, infrastructure=classify(told)))

    def _settle(self, finding: Finding) -> None:
        del self._pending[finding.result.rank]
        self._findings[finding.result.rank] = finding
