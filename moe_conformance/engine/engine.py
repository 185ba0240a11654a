"""The engine: worlds of ranks by size, the store through which they find each other, and the job that runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import torch

from . import wire
from .faults import one_line
from .gpu import delays
from .host import Host, HostLostError, Site
from .launcher import LocalSite
from .records import EngineError, Job, JobResult, check
from .store import StoreServer
from .virtual.world import VirtualWorld
from .world import World


class Engine:
    """Runs jobs on ranks that stay for the next job; one thread at a time may use it, for one job at a time.

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
        site: The machines on which ranks run; the driver's alone if None.

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
        site: Site | None = None,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise EngineError(f"device must be 'cpu' or 'cuda', not {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise EngineError("device is 'cuda', but torch finds no GPU here")
        self.device = device
        self._virtual = virtual
        self._preload = tuple(preload)
        self._environment = dict(environment or {})
        self._site = site if site is not None else LocalSite()
        self._numbers = itertools.count(1)
        self._worlds: dict[int, World | VirtualWorld] = {}
        self._closed = False
        self._running: Running | None = None
        self._host: Host | None = self._site.open(self._preload, self._environment)
        self._store = StoreServer(self._host.address)

    def run(self, job: Job) -> JobResult:
        """Runs a job on all its ranks and waits for it: `start(job).result()`."""
        return self.start(job).result()

    def start(self, job: Job) -> Running:
        """Sends a job to its ranks and returns while it runs there; a fault on a rank will be in the result.

        Raises:
            EngineError: the job is malformed, ranks cannot be started, the engine is closed, or the result of the
                job before has not been taken.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        if self._running is not None:
            raise EngineError(f"{self._running.job.function} still runs; take its result() before the next start()")
        check(job)
        delays.check(job.asynchrony, self.device)
        try:
            payload = wire.dumps(job.payload)
        except Exception as error:
            raise EngineError(f"the payload of {job.function} cannot be pickled: {one_line(error)}") from error
        with self._unharmed():
            self._world(job.world).start(next(self._numbers), job, payload)
        self._running = Running(job, self._collect)
        return self._running

    def renew(self) -> None:
        """Ends all ranks; the next job has new ones. What runs is dropped."""
        if self._running is not None:
            self._running.drop("the ranks were renewed")
            self._running = None
        for world in self._worlds.values():
            world.stop()

    def close(self) -> None:
        """Ends all ranks and the process that forks them; idempotent."""
        self._closed = True
        if self._running is not None:
            self._running.drop("the engine was closed")
            self._running = None
        self._release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, job: Job) -> JobResult:
        self._running = None
        with self._unharmed():
            return self._worlds[job.world].collect()

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        """Begins anew where an exception leaves ranks or messages half done: Ctrl-C may strike anywhere."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, HostLostError) or not isinstance(error, EngineError):
                self._release()
            raise

    def _world(self, size: int) -> World | VirtualWorld:
        if self._host is None:
            self._host = self._site.open(self._preload, self._environment)
        if size not in self._worlds:
            self._worlds[size] = (
                VirtualWorld(size, self.device, self._host)
                if self._virtual
                else World(size, self.device, self._host, self._store)
            )
        return self._worlds[size]

    def _release(self) -> None:
        for world in self._worlds.values():
            world.stop()
        self._worlds.clear()
        if self._host is not None:
            self._host.close()
            self._host = None


class Running:
    """A job that was sent to its ranks."""

    def __init__(self, job: Job, collect: Callable[[Job], JobResult]) -> None:
        self.job = job
        self._collect = collect
        self._result: JobResult | None = None
        self._dropped: str | None = None

    def result(self) -> JobResult:
        """Waits for the job, the first time that it is asked, and returns how it went.

        Raises:
            EngineError: the function or payload cannot be loaded on the ranks, or a group not be made; or there
                will be no result because the engine was closed or its ranks renewed.
        """
        if self._dropped is not None:
            raise EngineError(f"{self.job.function} has no result: {self._dropped} before it was taken")
        if self._result is None:
            try:
                self._result = self._collect(self.job)
            except BaseException:
                self.drop("taking it failed")
                raise
        return self._result

    def drop(self, why: str) -> None:
        """Gives up on the result, unless it was taken."""
        if self._result is None:
            self._dropped = why
