"""The engine: worlds of ranks by size, the store through which they find each other, and the job that runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import torch

from .gpu import delays
from .hosts import Cluster, HostLostError, Hosts
from .job_message import PackedJob, pack
from .local_host import LocalCluster
from .records import EngineError, Job, JobResult, check
from .running import Batch, Running, StartedJobs
from .store import StoreServer
from .virtual.world import VirtualWorld
from .world import World


class Engine:
    """Runs jobs on ranks that stay for the next job; one thread at a time may use it.

    A world of each size is made when first needed and kept. The ranks see the driver's `sys.path` and working
    directory as they were on construction. The engine seeds nothing, and random state passes to the next job on
    that rank; ranks that leave behind more than that are replaced (see `RankResult.left`).

    Args:
        device: "cpu" or "cuda". Ranks share GPUs if there are fewer of them.
        virtual: Ranks are threads of one process, so that there may be hundreds. What they share, and real ranks do
            not, is told in virtual/threads.py.
        preload: Modules imported once, before ranks are forked. They must start no thread, run no backward
            and not initialise CUDA.
        environment: Variables that the preload and the ranks see on top of the driver's.
        cluster: The machines on which ranks run; the driver's alone if None.
        notice: Called with a sentence where a job takes long, or the wait for it is interrupted: where its ranks are.

    Raises:
        EngineError: a module of the preload cannot be imported (says which and why), or the device is not
            there.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        virtual: bool = False,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cluster: Cluster | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise EngineError(f"device must be 'cpu' or 'cuda', not {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise EngineError("device is 'cuda', but torch finds no GPU")
        self.device = device
        self._virtual = virtual
        self._preload = tuple(preload)
        self._environment = dict(environment or {})
        self._notice = notice or (lambda sentence: None)
        self._cluster = cluster if cluster is not None else LocalCluster()
        self._numbers = itertools.count(1)
        self._worlds: dict[int, World | VirtualWorld] = {}
        self._closed = False
        self._running: dict[int, Batch] = {}  # by the size of its world
        self._hosts: Hosts | None = self._cluster.open(self._preload, self._environment)
        self._store = StoreServer(self._hosts.address)

    def run(self, job: Job) -> JobResult:
        """Runs a job on all its ranks and waits for it: `start(job).result()`."""
        return self.start(job).result()

    def start(self, job: Job) -> Running:
        """Sends a job to its ranks and returns while it runs there; a fault on a rank will be in the result.

        Waits for what ran before in a world of this size, if its result was not taken. What is still to be read of that
        is read while the ranks run this job: to start a job first, and then take the result of the one before, is
        quicker than the reverse. Worlds of different sizes run at the same time, unless their ranks share GPUs or a
        process: then it waits for those as well.

        Raises:
            EngineError: the job is malformed, ranks cannot be started, or the engine is closed.
        """
        return self.start_many([job])[0]

    def start_many(self, jobs: Sequence[Job]) -> list[Running]:
        """Sends jobs for one world to their ranks in one message, which run them one after the other.

        The results are those of `start` for each of them: if a job of several has a fault or leaves something behind,
        none of what these runs returned is used, and each job runs again alone when its result is asked for. All of
        them together have the shortest of their deadlines, and at most 20 s or a third of it; what takes longer runs
        again one by one too.

        Raises:
            EngineError: a job is malformed, the worlds differ, ranks cannot be started, or the engine is closed.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        for job in jobs:
            check(job)
            delays.check(job.asynchrony, self.device)
        if len({job.world for job in jobs}) != 1:
            raise EngineError("jobs that are sent together need one world")
        packed_jobs = [pack(job) for job in jobs]
        if self._virtual and len(jobs) > 1:
            batch = Batch(jobs, None, self._collect, self.start)
        else:
            batch = Batch(jobs, self._begin(packed_jobs), self._collect, self.start)
            self._running[jobs[0].world] = batch
        return [Running(batch, number) for number in range(len(jobs))]

    def _begin(self, packed_jobs: Sequence[PackedJob]) -> StartedJobs:
        """Sends jobs when what ran before has made way."""
        size = packed_jobs[0].job.world
        if self._virtual or self.device != "cpu":  # ranks of other worlds share a process or GPUs with these
            with self._closing_on_error():
                for batch in [batch for other, batch in self._running.items() if other != size]:
                    batch.finish()
        previous = self._running.get(size)
        if previous is not None:
            with self._closing_on_error():
                previous.free_ranks()
        world, started = self._send(packed_jobs)
        if previous is not None and not previous.finished:
            stops = world.stops
            previous.finish()
            if world.stops != stops:  # the ranks disagreed in the job before, and with them these were dropped
                _, started = self._send(packed_jobs)
        return started

    def renew(self, world: int) -> None:
        """Ends the ranks of a world of that size; its next job has new ones. What they run is dropped."""
        batch = self._running.pop(world, None)
        if batch is not None:
            batch.drop("the ranks were renewed")
        if world in self._worlds:
            self._worlds[world].stop()

    def close(self) -> None:
        """Ends all ranks and the process that forks them; idempotent."""
        self._closed = True
        self._release("the engine was closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, packed_jobs: Sequence[PackedJob]) -> tuple[World | VirtualWorld, StartedJobs]:
        with self._closing_on_error():
            world = self._world(packed_jobs[0].job.world)
            return world, world.start(next(self._numbers), packed_jobs)

    def _collect(self, batch: Batch) -> list[JobResult] | None:
        if self._running.get(batch.jobs[0].world) is batch:
            del self._running[batch.jobs[0].world]
        assert batch.started is not None
        with self._closing_on_error():
            return batch.started.collect()

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Begins anew where an exception leaves ranks or messages half done: Ctrl-C may strike anywhere."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, HostLostError) or not isinstance(error, EngineError):
                self._release("all ranks were ended")
            raise

    def _world(self, size: int) -> World | VirtualWorld:
        if self._hosts is None:
            self._hosts = self._cluster.open(self._preload, self._environment)
        if size not in self._worlds:
            self._worlds[size] = (
                VirtualWorld(size, self.device, self._hosts)
                if self._virtual
                else World(size, self.device, self._hosts, self._store, self._notice)
            )
        return self._worlds[size]

    def _release(self, why: str) -> None:
        for batch in self._running.values():
            batch.drop(why)
        self._running.clear()
        for world in self._worlds.values():
            world.stop()
        self._worlds.clear()
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None
