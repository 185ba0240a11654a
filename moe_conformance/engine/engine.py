"""The Engine class: runs jobs on worlds of ranks, which it starts, keeps and replaces."""

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
    """Runs jobs on ranks that are kept for the next job; one thread at a time may use it.

    A world of each size is made when first needed and kept. The ranks see the driver's `sys.path` and working
    directory as they were on construction. The engine sets no seed, and a rank's random state carries over to its next
    job; ranks on which a function leaves more than that behind are replaced (see `RankResult.left`).

    Args:
        device: "cpu" or "cuda". Ranks share GPUs if there are fewer of them.
        virtual: Ranks are threads of one process, so that there may be hundreds. virtual/threads.py describes what they
            share and real ranks do not.
        preload: Modules imported once, before ranks are forked. They must start no thread, run no backward
            and not initialise CUDA.
        environment: Variables that the preload and the ranks see on top of the driver's.
        cluster: The machines on which ranks run; the driver's alone if None.
        notice: Called with a sentence that says where the ranks are, if a job takes long or the wait for it is
            interrupted.

    Raises:
        EngineError: a module of the preload cannot be imported (says which and why), or the device is not
            available.
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
        """Sends a job to its ranks and returns while it runs; a fault on a rank is in the result.

        Waits for the previous job in a world of this size, if its result was not taken; what the driver still has to
        read of it is read while the ranks run this job. To start a job first, and then take the result of the previous
        one, is therefore faster than the reverse. Worlds of different sizes run at the same time, unless their ranks
        share GPUs or a process: then this method waits for those as well.

        Raises:
            EngineError: the job is malformed, ranks cannot be started, or the engine is closed.
        """
        return self.start_many([job])[0]

    def start_many(self, jobs: Sequence[Job]) -> list[Running]:
        """Sends several jobs for one world in one message; the ranks run them one after the other.

        The results are those that `start` would give for every job: if one of several has a fault or leaves something
        behind, nothing that they returned is used, and every job runs again alone when its result is taken. Together
        they have the shortest of their deadlines, but at most the larger of 20 s and a third of it; if they take longer
        they also run again one by one.

        Raises:
            EngineError: a job is malformed, the worlds differ, ranks cannot be started, or the engine is closed.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        for job in jobs:
            check(job)
            delays.check(job.asynchrony, self.device)
        if len({job.world for job in jobs}) != 1:
            raise EngineError("all jobs of start_many must have the same number of ranks")
        packed_jobs = [pack(job) for job in jobs]
        if self._virtual and len(jobs) > 1:
            batch = Batch(jobs, None, self._collect, self.start)
        else:
            batch = Batch(jobs, self._begin(packed_jobs), self._collect, self.start)
            self._running[jobs[0].world] = batch
        return [Running(batch, number) for number in range(len(jobs))]

    def _begin(self, packed_jobs: Sequence[PackedJob]) -> StartedJobs:
        """Sends jobs once the ranks are free."""
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
            if world.stops != stops:  # the previous job had a fault, and its ranks were ended with these jobs
                _, started = self._send(packed_jobs)
        return started

    def renew(self, world: int) -> None:
        """Ends the ranks of the world of that size, and drops the jobs that run there; the next job has new ranks."""
        batch = self._running.pop(world, None)
        if batch is not None:
            batch.drop("the ranks were renewed")
        if world in self._worlds:
            self._worlds[world].stop()

    def close(self) -> None:
        """Ends all ranks and the process from which they are forked; idempotent."""
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
        """Ends all ranks if an exception may leave a rank or a message half done, as Ctrl-C may at any line."""
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
