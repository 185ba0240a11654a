"""Rank 0: sends a workload to all ranks, puts together what came of it, and has the check judge it."""

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

_STILL_S = 5.0  # for which all ranks stand in the same collectives before they are given up
_PARTING_S = 5 * INTERVAL_S  # for others to end by themselves, before a launcher ends them for rank 0's status
_SILENT_S = 5.0  # for which a rank that was given up may take to say where it stands


def work(named: Named, deadline_s: float | None) -> NoReturn:
    """Be the rank that the environment says; rank 0 prints the verdict and ends all."""
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
    """What rank 0 does beside being a rank."""

    def __init__(self, named: Named, wanted: Prepared, rank: Rank, mailbox: Mailbox, deadline_s: float | None) -> None:
        """Take the rank that this process is, and begin to watch all of them."""
        self._named, self._wanted, self._rank, self._mailbox = named, wanted, rank, mailbox
        self._deadline_s = deadline_s
        self._running = wanted.case.workload
        look(rank, self._stuck)
        threading.Thread(target=self._give_up, name="gives ranks up", daemon=True).start()

    def judge(self) -> NoReturn:
        """Run the case, have the check judge it, and end this process."""
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
        for rank, own in enumerate(sent.rank_payloads):
            self._mailbox.put(f"{number}/job/{rank}", (replace(sent, rank_payloads=()), own))
        self._rank.run(self._mailbox, number)
        return self._outcome(self._mailbox)

    def _outcome(self, mailbox: Mailbox) -> Outcome:
        """Wait for every rank, and return what came of the workload that runs."""
        findings = [self._finding(mailbox, rank) for rank in range(self._rank.place.world)]
        disagreements = blame.disagreements(findings)
        result = JobResult(blame.assign(findings, disagreements), 0.0, disagreements)
        return outcome_of(self._named.backend, self._running, result)

    def _finding(self, mailbox: Mailbox, rank: int) -> Finding:
        """Wait for a rank, or its end; one that was given up may still say where it stands."""
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
        """Judge in the place of the main thread, which will not come back."""
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
        """Say so once all ranks that have not answered stand in collectives and move no more, or time is up."""
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
        """Return where the ranks stand that have not answered; "" if one of them does not wait, or all have."""
        missing = [
            rank
            for rank in range(self._rank.place.world)
            if not mailbox.there(f"{number}/answer/{rank}") and not mailbox.there(f"ended/{rank}")
        ]
        places = [mailbox.said(f"{number}/stands/{rank}") for rank in missing]
        return "\n".join(places) if all(places) else ""
