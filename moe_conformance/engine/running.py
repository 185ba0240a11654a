"""Jobs that were sent to their ranks, and their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from .hosts import HostLostError
from .records import EngineError, Job, JobResult


class StartedJobs(Protocol):
    """Jobs that ranks were given."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would not wait."""

    def wait(self) -> bool:
        """Tells whether the ranks can have other jobs before these are collected; may wait for them."""

    def collect(self) -> list[JobResult] | None:
        """Waits for the jobs, once; None if there are several and they must run again, one by one.

        Raises:
            EngineError: a rank could not load the function or the payload, or not make a group.
        """


class Batch:
    """Jobs that were sent in one message, one after the other on each rank.

    Where all of them are ok and leave nothing behind, all results are there at once. Else the jobs are run again, each
    alone and when its result is asked for, the next one while that is read: a job's verdict, its deadline and who is to
    blame are then its own, as if there were no other.

    Args:
        jobs: One or more.
        started: None if they are to be run one by one from the start.
        collect: Takes the results from the ranks.
        start: Starts one job alone.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        started: StartedJobs | None,
        collect: Callable[[Batch], list[JobResult] | None],
        start: Callable[[Job], Running],
    ) -> None:
        self.jobs = jobs
        self.started = started
        self._collect = collect
        self._start = start
        self._results: list[JobResult] | None = None
        self._alone: dict[int, Running] = {}
        self._failure: EngineError | None = None
        self.finished = started is None  # finished: what is still to run again counts as other jobs

    def result(self, number: int) -> JobResult:
        """Waits for the job of that number and returns how it went; see Running.result."""
        self.finish()
        if self._failure is not None:
            raise self._failure
        if self._results is not None:
            return self._results[number]
        running = self._by_itself(number)
        if number + 1 < len(self.jobs):
            with contextlib.suppress(EngineError):  # it will be met again when its result is asked for
                self._by_itself(number + 1)
        return running.result()

    @property
    def ready(self) -> bool:
        """Whether nothing is to be waited for before ranks can have other jobs."""
        return self.finished or (self.started is not None and self.started.ready)

    def free_ranks(self) -> None:
        """Waits until the ranks can have other jobs; finishes unless that can wait."""
        if self.finished:
            return
        assert self.started is not None
        try:
            free = self.started.wait()
        except BaseException:  # Ctrl-C
            self.drop("waiting for it failed")
            raise
        if not free:
            self.finish()

    def finish(self) -> None:
        """Waits until no job runs; what is wrong is raised when a result is taken."""
        for running in self._alone.values():
            running.finish()
        if self.finished:
            return
        try:
            self._results = self._collect(self)
        except EngineError as error:
            if len(self.jobs) == 1 or isinstance(error, HostLostError):
                self._failure = error
        except BaseException:  # Ctrl-C
            self.drop("taking it failed")
            raise
        self.finished = True

    def drop(self, why: str) -> None:
        """Gives up on the results, unless they are there."""
        if not self.finished:
            functions = ", ".join(dict.fromkeys(job.function for job in self.jobs))
            self._failure = EngineError(f"{functions} has no result: {why} before it was taken")
            self.finished = True

    def _by_itself(self, number: int) -> Running:
        if number not in self._alone:
            self._alone[number] = self._start(self.jobs[number])
        return self._alone[number]


class Running:
    """A job that was sent to its ranks."""

    def __init__(self, batch: Batch, number: int) -> None:
        self.job = batch.jobs[number]
        self._batch = batch
        self._number = number

    @property
    def finished(self) -> bool:
        """Whether it runs no longer. One of several that must run again, alone, does when its result is asked for."""
        return self._batch.finished

    @property
    def ready(self) -> bool:
        """Whether the ranks are done with it, and with all that was sent with it, or have failed at it."""
        return self._batch.ready

    def finish(self) -> None:
        """Waits until the ranks are done with it, and with all that was sent with it."""
        self._batch.finish()

    def result(self) -> JobResult:
        """Waits for the job, the first time that it is asked, and returns how it went.

        Raises:
            EngineError: the function or payload cannot be loaded on the ranks, or a group not be made; or there
                will be no result because the engine was closed or its ranks renewed.
        """
        return self._batch.result(self._number)
