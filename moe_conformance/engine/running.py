"""Handles of jobs that are running, from which their results are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from .hosts import HostLostError
from .records import EngineError, Job, JobResult


class StartedJobs(Protocol):
    """Jobs that ranks have received in one request."""

    @property
    def ready(self) -> bool:
        """True if `wait` would return at once."""

    def wait(self) -> bool:
        """Waits for the ranks if that is needed; returns True if they can run other jobs before `collect`."""

    def collect(self) -> list[JobResult] | None:
        """Waits for the results, once; None if there are several and they must run again one by one.

        Raises:
            EngineError: a rank could not load the function or the payload, or not make a group.
        """


class Batch:
    """Jobs that were sent in one message, which each rank runs one after the other.

    If all of them are ok and leave nothing behind, all results are available at once. Else every job runs again alone
    when its result is taken, while the previous result is read: its verdict, its deadline and the blamed ranks then do
    not depend on the other jobs.

    Args:
        jobs: One or more.
        started: None if the jobs run one by one from the start.
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
        self.finished = started is None  # True even if jobs have yet to run again

    def result(self, number: int) -> JobResult:
        """Waits for the job with that number and returns its result; see Running.result."""
        self.finish()
        if self._failure is not None:
            raise self._failure
        if self._results is not None:
            return self._results[number]
        running = self._by_itself(number)
        if number + 1 < len(self.jobs):
            with contextlib.suppress(EngineError):  # it is raised again when its result is taken
                self._by_itself(number + 1)
        return running.result()

    @property
    def ready(self) -> bool:
        """True if the ranks can run other jobs without waiting."""
        return self.finished or (self.started is not None and self.started.ready)

    def free_ranks(self) -> None:
        """Waits until the ranks can run other jobs; takes the results only if it has to."""
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
        """Waits until no job is running; an error is raised when a result is taken."""
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
        """Discards the jobs, unless they have finished; taking a result then raises an EngineError with the reason."""
        if not self.finished:
            functions = ", ".join(dict.fromkeys(job.function for job in self.jobs))
            self._failure = EngineError(f"{functions} has no result: {why} before it was taken")
            self.finished = True

    def _by_itself(self, number: int) -> Running:
        if number not in self._alone:
            self._alone[number] = self._start(self.jobs[number])
        return self._alone[number]


class Running:
    """The handle of a job that was sent to its ranks."""

    def __init__(self, batch: Batch, number: int) -> None:
        self.job = batch.jobs[number]
        self._batch = batch
        self._number = number

    @property
    def finished(self) -> bool:
        """True if the job has ended. A job of a batch that must run again does so when its result is taken."""
        return self._batch.finished

    @property
    def ready(self) -> bool:
        """True if the ranks have finished, or failed at, the job and all that were sent with it."""
        return self._batch.ready

    def finish(self) -> None:
        """Waits until the ranks have finished the job and all that were sent with it."""
        self._batch.finish()

    def result(self) -> JobResult:
        """Waits for the job, at the first call, and returns its result.

        Raises:
            EngineError: the function or payload cannot be loaded on the ranks, or a group not be made; or there
                will be no result because the engine was closed or its ranks renewed.
        """
        return self._batch.result(self._number)
