"""The code of every rank: join the others, run the workloads that rank 0 sends, and return the results."""

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
    """The rank, world size and store address of this process, as set by a launcher."""

    rank: int
    world: int
    address: str
    port: int
    secret: bytes = b""  # the ranks' secret, once they have agreed on one

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process, from environment variables."""
        given = os.environ
        return cls(int(given["RANK"]), int(given["WORLD_SIZE"]), given["MASTER_ADDR"], int(given["MASTER_PORT"]))

    def mailbox(self) -> Mailbox:
        """Return a new mailbox; every thread needs a separate one."""
        return Mailbox(self.address, self.port, self.secret)


class Rank:
    """The rank of this process: its connection to the others, and the workload that it runs."""

    def __init__(self, place: Place, device: str) -> None:
        """Join the other ranks; blocks until all have joined."""
        torch.set_num_threads(1)
        self.number = 0  # number of the present or last workload, from 1
        self.answered = True
        self._answering = threading.Lock()
        self._lines: list[bytes] = []
        self._store = _hosted(place)
        self.place = replace(place, secret=secrets.agreed(place.rank, place.world, place.address, place.port))
        self._home = RankState(_station(place, device))
        self._tap = Tap(self._lines.append)

    def run(self, mailbox: Mailbox, number: int) -> None:
        """Run the workload that was sent to this rank under a number, and put the result into the mailbox."""
        job, payload = mailbox.take(f"{number}/job/{self.place.rank}")
        self._lines.clear()
        self.number, self.answered = number, False
        self.answer(mailbox, self._run(job, payload))

    def answer(self, mailbox: Mailbox, finding: Finding) -> bool:
        """Put a finding, with the ledger, into the mailbox unless there is one already; return whether it was put."""
        with self._answering:
            if self.answered:
                return False
            self.answered = True
        ledger = decode(b"".join(self._lines))
        result = replace(finding.result, ledger=ledger.entries, hazards=ledger.hazards)
        mailbox.put(f"{self.number}/answer/{self.place.rank}", replace(finding, result=result))
        return True

    def calls(self) -> int:
        """Return the number of collectives that the workload has called."""
        return self._tap.calls()

    def _run(self, job: Job, rank_payload: object) -> Finding:
        rank = self.place.rank
        try:
            context = self._home.context(job.groups, self._tap, rank_payload)
            with self._tap.recording(job.asynchrony):
                value = find(job.function)(context, job.payload)
        except (KeyboardInterrupt, bdb.BdbQuit):
            raise
        except BaseException as error:
            fault = describe(error)
            words = f"lost its peers: {fault.error}" if fault.connection_lost else f"raised\n{fault.traceback}"
            print(f"rank {rank} {words}", file=sys.stderr, flush=True)
            return raised(rank, fault)
        return Finding(RankResult(rank, "ok", value))


def leave(status: int) -> NoReturn:
    """End this process at once: a normal exit destroys process groups, in which gloo sometimes aborts."""
    flush()
    os._exit(status)


def _station(place: Place, device: str) -> RankSpec:
    """Return the engine's spec of this rank; with fewer GPUs than ranks, ranks share GPUs and use gloo."""
    local = int(os.environ.get("LOCAL_RANK", place.rank))
    count = torch.cuda.device_count() if device == "cuda" else 0
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", place.world)) <= count
    name = str(device_of(local, device, count))
    transport = "cpu:gloo,cuda:nccl" if alone else "gloo"
    return RankSpec(place.rank, name, place.world, transport, place.address, place.port, "ranks", local_rank=local)


def _hosted(place: Place) -> object:
    """Serve the store on rank 0 if the launcher does not; it is served as long as the returned object lives."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or place.rank > 0:
        return None
    return store.serve(store.listen(place.address, place.port))
