"""The code of rank 0: send a workload to all ranks, collect the results, and call the check on them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from moe_conformance.engine import NO_ANSWER, EngineError, JobResult, RankResult, blame
from moe_conformance.engine.blame import Finding
from moe_conformance.reproducing.checks import CannotRun, Named, Prepared, prepared
from moe_conformance.reproducing.looking import DONE, look
from moe_conformance.reproducing.mailbox import INTERVAL_S, Mailbox
from moe_conformance.reproducing.rank import Place, Rank, leave
from moe_conformance.scenarios.moe_step import job, outcome_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload

_STILL_S = 5.0  # seconds that all ranks wait in the same collectives before they are given up
_PARTING_S = 5 * INTERVAL_S  # seconds for other ranks to end, before a launcher ends them because of rank 0's status
_SILENT_S = 5.0  # seconds for a rank that was given up to report its stack


def work(named: Named, deadline_s: float | None) -> NoReturn:
    """Run as the rank that the environment names; rank 0 prints the verdict and ends all ranks."""
    place = Place.here()
    try:
        wanted = prepared(named, place.world)
    except CannotRun as error:
        if place.rank == 0:
            print(f"cannot run: {error}")
        leave(2 if place.rank == 0 else 0)
    try:
        rank = Rank(place, named.device)
    except EngineError as error:
        print(f"cannot run: rank {place.rank}: {error}")
        leave(2)
    mailbox = rank.place.mailbox()
    if place.rank == 0:
        Gathering(named, wanted, rank, mailbox, deadline_s).judge()
    look(rank)
    number = 0
    while True:
        number += 1
        rank.run(mailbox, number)


class Gathering:
    """The tasks of rank 0 besides those of a rank: send workloads, collect results, detect hangs, judge."""

    def __init__(self, named: Named, wanted: Prepared, rank: Rank, mailbox: Mailbox, deadline_s: float | None) -> None:
        """Keep the rank of this process, and start to watch all ranks."""
        self._named, self._wanted, self._rank, self._mailbox = named, wanted, rank, mailbox
        self._deadline_s = deadline_s
        self._running = wanted.case.workload
        look(rank, self._stuck)
        threading.Thread(target=self._give_up, name="gives ranks up", daemon=True).start()

    def judge(self) -> NoReturn:
        """Run the case, call the check, print the verdict and end this process."""
        self._end(self._mailbox, *self._wanted.verdict(self._run(self._wanted.case.workload), self._run_all))

    def _run_all(self, workloads: Sequence[Workload]) -> list[Outcome]:
        return [self._run(workload) for workload in workloads]

    def _run(self, workload: Workload) -> Outcome:
        """Run a workload on all ranks, this one included."""
        number = self._rank.number + 1
        sent = job(self._named.device, self._named.backend, workload)
        if sent.world != self._rank.place.world:
            raise CannotRun(f"the check also runs a layout of {sent.world} ranks")
        self._running = workload
        for rank, payload in enumerate(sent.rank_payloads):
            self._mailbox.put(f"{number}/job/{rank}", (replace(sent, rank_payloads=()), payload))
        self._rank.run(self._mailbox, number)
        return self._outcome(self._mailbox)

    def _outcome(self, mailbox: Mailbox) -> Outcome:
        """Wait for every rank, and return the outcome of the running workload."""
        findings = [self._finding(mailbox, rank) for rank in range(self._rank.place.world)]
        disagreements = blame.disagreements(findings)
        result = JobResult(blame.assign(findings, disagreements), 0.0, disagreements)
        return outcome_of(self._named.backend, self._running, result)

    def _finding(self, mailbox: Mailbox, rank: int) -> Finding:
        """Wait for the result or the end of a rank; a rank that was given up may still report its stack."""
        number = self._rank.number
        until: float | None = None
        while not mailbox.there(f"{number}/answer/{rank}"):
            ended = mailbox.there(f"ended/{rank}")
            why = mailbox.said(f"{number}/given up")
            if (ended or why) and until is None:
                until = time.monotonic() + _SILENT_S * (not ended)
            if until is not None and time.monotonic() > until:
                if ended:
                    return Finding(RankResult(rank, "died", error=mailbox.take(f"ended/{rank}")))
                return Finding(RankResult(rank, "hung", error=f"{why}: it dumped no stack"))
            time.sleep(INTERVAL_S)
        finding: Finding = mailbox.take(f"{number}/answer/{rank}")
        return finding

    def _stuck(self, mailbox: Mailbox) -> None:
        """Judge in this thread, because the main thread hangs."""
        outcome = self._outcome(mailbox)
        if self._rank.number == 1:
            self._end(mailbox, *self._wanted.verdict(outcome, None))
        self._end(mailbox, *self._wanted.unfinished(outcome))

    def _end(self, mailbox: Mailbox, status: int, sentence: str) -> NoReturn:
        print(sentence)
        sys.stdout.flush()
        mailbox.say(DONE, "")
        time.sleep(_PARTING_S)
        leave(status)

    def _give_up(self) -> None:
        """Give the ranks up once all that have no result wait in the same collectives, or the deadline has passed."""
        mailbox, number, began = self._rank.place.mailbox(), 0, 0.0
        stood, since = "", 0.0
        while True:
            time.sleep(INTERVAL_S)
            now = time.monotonic()
            if number != self._rank.number:
                number, began, stood = self._rank.number, now, ""
            standing = self._standing(mailbox, number)
            if standing != stood:
                stood, since = standing, now
            if number and stood and now - since > _STILL_S:
                mailbox.say(f"{number}/given up", "waits in a collective that cannot complete")
            elif number and self._deadline_s is not None and now - began > self._deadline_s:
                mailbox.say(f"{number}/given up", f"{NO_ANSWER} {self._deadline_s:.1f} s")

    def _standing(self, mailbox: Mailbox, number: int) -> str:
        """Return the stacks of ranks without a result; "" if one is not in a collective, or there is no such rank."""
        missing = [
            rank
            for rank in range(self._rank.place.world)
            if not mailbox.there(f"{number}/answer/{rank}") and not mailbox.there(f"ended/{rank}")
        ]
        places = [mailbox.said(f"{number}/stands/{rank}") for rank in missing]
        return "\n".join(places) if all(places) else ""
