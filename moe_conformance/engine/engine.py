"""The engine: worlds of ranks by size, and the store through which they find each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from . import wire
from .faults import one_line
from .launcher import Launcher, LauncherLostError
from .records import EngineError, Job, JobResult, check
from .store import StoreServer
from .world import World


class Engine:
    """Runs jobs on ranks that stay for the next job; one thread at a time may use it.

    A world of each size is made when first needed and kept. The ranks see the driver's `sys.path` and working
    directory as they were on construction. The engine seeds nothing, and a function that returns leaves its
    process as it is: random state, default dtype, grad mode and threads pass to the next job on that rank.

    Args:
        device: "cpu" or "cuda". Ranks share GPUs if there are fewer of them.
        preload: Modules imported once, before ranks are forked. They must start no thread, run no backward
            and not initialise CUDA.
        environment: Variables that the preload and the ranks see on top of the driver's.

    Raises:
        EngineError: a module of the preload cannot be imported (says which and why), or the device is not
            there.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise EngineError(f"device must be 'cpu' or 'cuda', not {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise EngineError("device is 'cuda', but torch finds no GPU here")
        self._device = device
        self._preload = tuple(preload)
        self._environment = dict(environment or {})
        self._numbers = itertools.count(1)
        self._worlds: dict[int, World] = {}
        self._closed = False
        self._launcher: Launcher | None = Launcher(self._preload, self._environment)
        self._store = StoreServer()

    def run(self, job: Job) -> JobResult:
        """Runs a job on all its ranks and waits for it; a fault on a rank is in the result.

        Raises:
            EngineError: the job is malformed, its function or payload cannot be loaded on the ranks, ranks
                cannot be started, or the engine is closed.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        check(job)
        try:
            payload = wire.dumps(job.payload)
        except Exception as error:
            raise EngineError(f"the payload of {job.function} cannot be pickled: {one_line(error)}") from error
        try:
            return self._world(job.world).run(next(self._numbers), job, payload)
        except BaseException as error:
            if isinstance(error, LauncherLostError) or not isinstance(error, EngineError):
                self._release()  # Ctrl-C may have struck in the middle of a message: begin anew
            raise

    def close(self) -> None:
        """Ends all ranks and the process that forks them; idempotent."""
        self._closed = True
        self._release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _world(self, size: int) -> World:
        if self._launcher is None:
            self._launcher = Launcher(self._preload, self._environment)
        if size not in self._worlds:
            self._worlds[size] = World(size, self._device, self._launcher, self._store)
        return self._worlds[size]

    def _release(self) -> None:
        for world in self._worlds.values():
            world.stop()
        self._worlds.clear()
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
