"""What each rank does: it joins the others, runs the workloads that rank 0 sends, and says what it saw."""

from __future__ import annotations

import bdb
import os
import sys
import threading
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from moe_conformance.engine import Job, RankResult, store
from moe_conformance.engine.blame import Finding, raised
from moe_conformance.engine.faults import describe
from moe_conformance.engine.ledger.entry import decode
from moe_conformance.engine.ledger.tap import Tap
from moe_conformance.engine.rank import RankSpec, RankState, find, flush
from moe_conformance.engine.transport import device_of
from moe_conformance.reproducing import secrets
from moe_conformance.reproducing.mailbox import Mailbox


@dataclass(frozen=True)
class Place:
    """Where this process is among the ranks, as a launcher says it."""

    rank: int
    world: int
    address: str
    port: int
    secret: bytes = b""  # of the ranks, once they have agreed on one

    @classmethod
    def here(cls) -> Place:
        """Return that of this process."""
        given = os.environ
        return cls(int(given["RANK"]), int(given["WORLD_SIZE"]), given["MASTER_ADDR"], int(given["MASTER_PORT"]))

    def mailbox(self) -> Mailbox:
        """Return a mailbox of its own for each thread."""
        return Mailbox(self.address, self.port, self.secret)


class Rank:
    """The rank that this process is."""

    def __init__(self, place: Place, device: str) -> None:
        """Join the others; all of them have to."""
        torch.set_num_threads(1)
        self.number = 0  # of the workload that runs or ran last, from 1
        self.answered = True
        self._answering = threading.Lock()
        self._lines: list[bytes] = []
        self._store = _hosted(place)
        self.place = replace(place, secret=secrets.agreed(place.rank, place.world, place.address, place.port))
        self._home = RankState(_station(place, device))
        self._tap = Tap(self._lines.append)

    def run(self, mailbox: Mailbox, number: int) -> None:
        """Run what was sent to this rank under that number, and put what came of it."""
        job, own = mailbox.take(f"{number}/job/{self.place.rank}")
        self._lines.clear()
        self.number, self.answered = number, False
        self.answer(mailbox, self._run(job, own))

    def answer(self, mailbox: Mailbox, finding: Finding) -> bool:
        """Put a finding with the ledger, unless there is one already; tell whether it was."""
        with self._answering:
            if self.answered:
                return False
            self.answered = True
        ledger = decode(b"".join(self._lines))
        result = replace(finding.result, ledger=ledger.entries, hazards=ledger.hazards)
        mailbox.put(f"{self.number}/answer/{self.place.rank}", replace(finding, result=result))
        return True

    def calls(self) -> int:
        """Return how many collectives the workload has called."""
        return self._tap.calls()

    def _run(self, job: Job, own: object) -> Finding:
        rank = self.place.rank
        try:
            context = self._home.context(job.groups, self._tap, own)
            with self._tap.recording(job.asynchrony):
                value = find(job.function)(context, job.payload)
        except (KeyboardInterrupt, bdb.BdbQuit):
            raise
        except BaseException as error:
            fault = describe(error)
            told = f"lost its peers: {fault.error}" if fault.connection_lost else f"raised\n{fault.traceback}"
            print(f"rank {rank} {told}", file=sys.stderr, flush=True)
            return raised(rank, fault)
        return Finding(RankResult(rank, "ok", value))


def leave(status: int) -> NoReturn:
    """End this process; an orderly exit would destroy process groups, in which gloo sometimes aborts."""
    flush()
    os._exit(status)


def _station(place: Place, device: str) -> RankSpec:
    """Return the place of this rank as the engine has it; with fewer GPUs than ranks several share one, over gloo."""
    local = int(os.environ.get("LOCAL_RANK", place.rank))
    count = torch.cuda.device_count() if device == "cuda" else 0
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", place.world)) <= count
    own = str(device_of(local, device, count))
    transport = "cpu:gloo,cuda:nccl" if alone else "gloo"
    return RankSpec(place.rank, own, place.world, transport, place.address, place.port, "ranks", local_rank=local)


def _hosted(place: Place) -> object:
    """Return the store where no launcher has one, on rank 0 alone; it is there as long as what is returned."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or place.rank > 0:
        return None
    return store.serve(store.listen(place.address, place.port))
