"""Waits, on the driver, for the ranks' answers to one request."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from . import stacks, wire
from .blame import Finding, raised
from .deadlock import INTERVAL_S, DeadlockWatch
from .faults import one_line, type_name
from .hosts import Hosts, RankProcess
from .infrastructure import classify
from .ledger.entry import Ledger, decode, decode_all
from .local_host import describe_exit
from .rank import Answer, Returned
from .records import NO_ANSWER, EngineError, Job, RankResult

_FINAL_ANSWER_S = 2.0  # the report of a rank's exit, from another machine, may arrive before its answer
_RESUME_S = 1.0
_NOTICE_S = 20.0  # of waiting, after which `notice` is called
# The limit of several jobs, or a third of a longer deadline: one that hangs then runs alone, with its whole deadline.
_BATCH_LIMIT_S = 20.0
_NO_EVENTS_S = 0.2  # without events, before the deadlock detection starts: short jobs do not pay for it


class JobWait:
    """Waits until every rank has answered or exited, the deadline has passed, or a deadlock is proved.

    If one of several jobs did not return, all of them are given up at once. Values and ledgers are read by `findings`,
    not by `wait`. If it takes long or is interrupted, `notice` is called once and says where the ranks without an
    answer are.
    """

    def __init__(
        self,
        hosts: Hosts,
        ranks: Sequence[RankProcess],
        number: int,
        began: float,
        jobs: Sequence[Job],
        *,
        gpu: bool,
        notice: Callable[[str], None],
    ) -> None:
        self._hosts = hosts
        self._ranks = ranks
        self._number = number
        self.jobs = jobs
        self._gpu = gpu
        self._notice: Callable[[str], None] | None = notice  # None once it was called
        self.began = began
        self._deadline_s = min(job.deadline_s for job in jobs)
        if len(jobs) > 1:
            self._deadline_s = max(min(self._deadline_s, _BATCH_LIMIT_S), self._deadline_s / 3)
        self._until = began + self._deadline_s
        self._pending = {process.rank: process for process in ranks}
        self._returned: dict[int, tuple[Sequence[Returned], list[bytearray]]] = {}  # and the buffers of all values
        self._findings: dict[int, Finding] = {}  # of the others
        self._ledgers: dict[int, bytes] = {}  # as they were when all had answered, or the others were given up
        self._failure: EngineError | None = None
        self._ended = 0.0

    @property
    def ready(self) -> bool:
        """True if `wait` would return at once."""
        return bool(self._ended) or all(process.channel.readable(0.0) for process in self._ranks)

    def wait(self) -> bool:
        """Waits, at the first call; returns True if all jobs returned on all ranks and left nothing behind."""
        if not self._ended:
            try:
                self._wait_for_answers()
            except EngineError as error:
                self._failure = error
            except KeyboardInterrupt:
                self._send_notice()
                raise
            self._ended = time.monotonic()
        if self._failure is not None or not self._all_returned:
            return False
        return not any(one.left for returned, _ in self._returned.values() for one in returned)

    def findings(self) -> list[tuple[list[Finding], float]]:
        """Returns, for each job, one finding per rank in the order of ranks, and the seconds that it took.

        Empty if one of several jobs did not return on all ranks.

        Raises:
            EngineError: a rank could not load the function or the payload, or not make a group.
        """
        self.wait()
        if self._failure is not None:
            raise self._failure
        if len(self.jobs) == 1:
            return [([self._finding_of(process) for process in self._ranks], self._ended - self.began)]
        if not self._all_returned:
            return []
        findings = [self._findings_of(process.rank) for process in self._ranks]
        if any(len(of_rank) < len(self.jobs) for of_rank in findings):
            return []
        seconds = [max(by_rank) for by_rank in zip(*self._seconds(), strict=True)]
        return [(list(job), took) for job, took in zip(zip(*findings, strict=True), seconds, strict=True)]

    @property
    def _all_returned(self) -> bool:
        return len(self._returned) == len(self._ranks)

    @property
    def _must_rerun(self) -> bool:
        """True if the jobs must run again one by one, whatever else is received."""
        return len(self.jobs) > 1 and bool(self._findings)

    def _seconds(self) -> list[list[float]]:
        """Returns the seconds that each job took, per rank."""
        return [[one.seconds for one in returned] for returned, _ in self._returned.values()]

    def _findings_of(self, rank: int) -> list[Finding]:
        """Returns a rank's findings for all jobs, all of which returned; fewer if its ledger covers fewer."""
        returned, buffers = self._returned[rank]
        rest = iter(buffers)
        return [
            _with_ledger(_read(rank, one, list(islice(rest, one.buffers))), ledger)
            for one, ledger in zip(returned, decode_all(self._ledgers[rank]), strict=False)
        ]

    def _wait_for_answers(self) -> None:
        with selectors.DefaultSelector() as selector:
            for waker in self._hosts.wakers():
                selector.register(waker, selectors.EVENT_READ, None)
            for process in self._ranks:
                selector.register(process.channel, selectors.EVENT_READ, process)
            self._handle_events(selector)
        if self._must_rerun:
            return
        if self._pending:
            self._mark_hung(f"{NO_ANSWER} {self._deadline_s:.1f} s")
        self._ledgers = self._ledgers or self._hosts.ledgers(self._ranks)

    def _handle_events(self, selector: selectors.BaseSelector) -> None:
        deadlock_watch: DeadlockWatch | None = None
        while self._pending and not self._must_rerun:
            left = self._until - time.monotonic()
            events = selector.select(max(0.0, min(left, INTERVAL_S if deadlock_watch else _NO_EVENTS_S)))
            if not events and len(self.jobs) == 1 and time.monotonic() - self.began > _NOTICE_S:
                self._send_notice()
            if left <= 0 and not events:  # an answer in time may be read late: the driver has other work
                return
            for key, _ in events:
                if key.data is None:
                    self._hosts.collect()
                elif not self._receive(key.data):
                    selector.unregister(key.fileobj)
            self._record_exits()
            if events or self._gpu:  # a GPU could wake an idle rank
                deadlock_watch = None
            elif deadlock_watch is None:
                deadlock_watch = DeadlockWatch(self._hosts, self._ranks)
            elif self._pending and deadlock_watch.proves(self._pending.values()):
                self._mark_hung("waits in a collective that cannot complete")

    def _send_notice(self) -> None:
        """Calls `notice`, once, with the source line at which each rank without an answer is."""
        notice, self._notice = self._notice, None
        if notice is None or not self._pending:
            return
        texts = self._hosts.stacks(tuple(self._pending.values()))
        where = "; ".join(f"rank {rank} in {stacks.innermost(text)}" for rank, text in sorted(texts.items()))
        notice(f"waiting for {where}, after {time.monotonic() - self.began:.0f} s of {self._deadline_s:.0f} s")

    def _receive(self, process: RankProcess) -> bool:
        """Reads a rank's answer; returns False once nothing more can be read from its channel."""
        try:
            message = process.channel.receive()
            answer: Answer = wire.loads(message[:1])
        except (EOFError, OSError):
            return False
        except wire.GarbledError as error:
            sentence = f"unexpected bytes in this rank's channel to the driver: {error}"
            if process.rank in self._pending:
                self._record(Finding(RankResult(process.rank, "raised", error=sentence)))
            return False
        if answer.number == self._number:  # else it is a late answer, for an earlier request
            if answer.fault is None:
                del self._pending[process.rank]
                self._returned[process.rank] = answer.returned, message[1:]
            else:
                self._record(self._failed(process.rank, answer))
        return True

    def _failed(self, rank: int, answer: Answer) -> Finding:
        """Returns the finding of a rank on which a job did not return."""
        fault = answer.fault
        assert fault is not None
        # A peer may have made its groups, and failed already, while this rank was still making them.
        if answer.outcome == "unprepared" and not fault.connection_lost:
            function = self.jobs[0].function
            raise EngineError(f"rank {rank} cannot run {function}: {fault.error}\n{fault.traceback}")
        return raised(rank, fault)

    def _record_exits(self) -> None:
        """Records the ranks that have exited, after reading what answers they sent before."""
        for process in list(self._pending.values()):
            code = self._hosts.exit_code(process)
            if code is None:
                continue
            while (
                process.rank in self._pending and process.channel.readable(_FINAL_ANSWER_S) and self._receive(process)
            ):
                pass
            if process.rank in self._pending:
                how = describe_exit(code) + ("" if code < 0 else " before it answered")
                result = RankResult(process.rank, "died", error=how, traceback=self._hosts.last_stacks(process) or None)
                self._record(Finding(result))

    def _mark_hung(self, why: str) -> None:
        """Records all ranks without an answer as hung."""
        pending = tuple(self._pending.values())
        if len(self.jobs) > 1:
            for process in pending:
                self._record(Finding(RankResult(process.rank, "hung", error=why)))
            return
        texts = self._hosts.stacks(pending)
        without_stack = [process for process in pending if not texts[process.rank]]
        self._ledgers = self._hosts.ledgers(self._ranks)  # before one that was stopped continues
        stopped = self._resume_stopped(without_stack) if without_stack else {}
        for rank, text in (texts | stopped).items():
            where = ("stopped by a signal " if stopped.get(rank) else "") + stacks.location(text)
            result = RankResult(rank, "hung", error=f"{why}: {where}", traceback=text or None)
            self._record(Finding(result, waits=rank not in stopped and stacks.waits_in_collective(text)))

    def _resume_stopped(self, without_stack: Sequence[RankProcess]) -> dict[int, str]:
        """Sends SIGCONT to ranks that dumped no stack, and returns the stacks that they dump then."""
        self._hosts.signal(without_stack, signal.SIGCONT)
        until = time.monotonic() + _RESUME_S
        texts: dict[int, str] = {}
        dumped = False
        while not dumped and time.monotonic() < until:
            time.sleep(INTERVAL_S)
            before, texts = texts, {process.rank: self._hosts.last_stacks(process) for process in without_stack}
            dumped = before == texts and all(texts.values())
        return texts

    def _finding_of(self, process: RankProcess) -> Finding:
        """Returns a rank's finding with its ledger and, if the one job failed there, its output."""
        if process.rank in self._returned:
            (one,), buffers = self._returned[process.rank]
            finding = _read(process.rank, one, buffers)
        else:
            finding = self._findings[process.rank]
        finding = _with_ledger(finding, decode(self._ledgers[process.rank]))
        result = finding.result
        if result.status == "ok":
            return finding
        printed = self._hosts.printed(process) or None
        text = "\n".join(filter(None, (result.error, result.traceback, printed)))
        return replace(finding, result=replace(result, output=printed, infrastructure=classify(text)))

    def _record(self, finding: Finding) -> None:
        del self._pending[finding.result.rank]
        self._findings[finding.result.rank] = finding


def _read(rank: int, returned: Returned, buffers: Sequence[bytearray]) -> Finding:
    """Returns the finding of a rank on which a job returned, without its ledger."""
    try:
        value = wire.loads(buffers)
    except Exception as error:
        sentence = f"the function's result cannot be read on the driver: {one_line(error)}"
        return Finding(RankResult(rank, "raised", error=sentence, error_type=type_name(type(error))))
    return Finding(RankResult(rank, "ok", value, left=returned.left, host_syncs=returned.host_syncs))


def _with_ledger(finding: Finding, ledger: Ledger) -> Finding:
    return replace(finding, result=replace(finding.result, ledger=ledger.entries, hazards=ledger.hazards))
