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
from .world import Begun, World


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

        Waits for the job before, if its result was not taken. What is still to be read of that is read while the ranks
        run this one: to start a job first, and then take the result of the one before, is quicker than the reverse.

        Raises:
            EngineError: the job is malformed, ranks cannot be started, or the engine is closed.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        check(job)
        delays.check(job.asynchrony, self.device)
        try:
            payload = wire.dumps(job.payload)
        except Exception as error:
            raise EngineError(f"the payload of {job.function} cannot be pickled: {one_line(error)}") from error
        previous = self._running
        if previous is not None and not previous.finished:
            with self._unharmed():
                previous.make_way(job.world)
        world, begun = self._send(job, payload)
        if previous is not None and not previous.finished:
            stops = world.stops
            previous.finish()
            if world.stops != stops:  # the ranks disagreed in the job before, and with them this one was dropped
                _, begun = self._send(job, payload)
        self._running = Running(job, begun, self._collect)
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

    def _send(self, job: Job, payload: Sequence[wire.Buffer]) -> tuple[World | VirtualWorld, Begun]:
        with self._unharmed():
            world = self._world(job.world)
            return world, world.start(next(self._numbers), job, payload)

    def _collect(self, running: Running) -> JobResult:
        if self._running is running:
            self._running = None
        with self._unharmed():
            return running.begun.collect()

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

    def __init__(self, job: Job, begun: Begun, collect: Callable[[Running], JobResult]) -> None:
        self.job = job
        self.begun = begun
        self._collect = collect
        self._result: JobResult | None = None
        self._failure: EngineError | None = None

    @property
    def finished(self) -> bool:
        """Whether asking for the result waits for nothing."""
        return self._result is not None or self._failure is not None

    def result(self) -> JobResult:
        """Waits for the job, the first time that it is asked, and returns how it went.

        Raises:
            EngineError: the function or payload cannot be loaded on the ranks, or a group not be made; or there
                will be no result because the engine was closed or its ranks renewed.
        """
        self.finish()
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def make_way(self, world: int) -> None:
        """Waits until the ranks can have a job for a world of that size; finishes unless that can wait."""
        try:
            settled = self.begun.settle()
        except BaseException:  # Ctrl-C
            self.drop("waiting for it failed")
            raise
        if not settled or world != self.job.world:
            self.finish()

    def finish(self) -> None:
        """Waits for the job; what is wrong with it is raised when its result is taken."""
        if self.finished:
            return
        try:
            self._result = self._collect(self)
        except EngineError as error:
            self._failure = error
        except BaseException:  # Ctrl-C
            self.drop("taking it failed")
            raise

    def drop(self, why: str) -> None:
        """Gives up on the result, unless it is there."""
        if not self.finished:
            self._failure = EngineError(f"{self.job.function} has no result: {why} before it was taken")
