"""The Work object that the caller of an asynchronous collective receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Work
from torch.futures import Future


class Handle(Work):
    """Wraps the transport's Work, and calls `on_wait` once the caller has waited.

    C++ code sees a Work and calls `wait` and `get_future` of this object, but does not keep it alive: Python code must,
    until the wait.

    Args:
        inner: The transport's Work.
        on_wait: Called once, after the wait, before it returns; it may raise.
        results: Replaces the results of the transport's Work, in `result` and in the future, if not None.
    """

    def __init__(self, inner: Work, on_wait: Callable[[], None], results: list[Any] | None = None) -> None:
        super().__init__()
        self._inner = inner
        self._on_wait = on_wait
        self._results = results
        self._lock = threading.Lock()
        self._was_waited = False

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Waits until the call has finished and its result is available."""
        done = self._inner.wait(*args, **kwargs)
        self._mark_waited()
        return done

    def synchronize(self) -> None:
        """Makes the current stream wait."""
        self._inner.synchronize()
        self._mark_waited()

    def block_current_stream(self) -> None:
        """Makes the current stream wait, without blocking the host."""
        self._inner.block_current_stream()
        self._mark_waited()

    def is_completed(self) -> bool:
        """Returns True if the call has finished, which then counts as a wait."""
        done = self._inner.is_completed()
        if done:
            self._mark_waited()
        return done

    def get_future(self) -> Future[Any]:
        """Returns a future of the results."""
        future = self._inner.get_future()
        if self._results is not None:
            return future.then(self._after)
        self._mark_waited()  # the caller now waits for the future
        return future

    def result(self) -> list[Any]:
        """Returns the results of a call that has finished."""
        results = self._inner.result()
        self._mark_waited()
        return results if self._results is None else self._results

    def is_success(self) -> bool:
        """Tells whether the call finished without an exception."""
        return self._inner.is_success()

    def exception(self) -> Any:
        """Returns the exception that the call ended with."""
        return self._inner.exception()

    def source_rank(self) -> int:
        """Returns the rank from which a message was received."""
        return self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    @property
    def was_waited(self) -> bool:
        """True if the caller has waited."""
        return self._was_waited

    def seems_finished(self) -> bool:
        """Returns True if the transport has finished; unlike `is_completed` this does not count as a wait."""
        return self._inner.is_completed()

    def _after(self, future: Future[Any]) -> Any:
        future.value()  # raises what the collective raised
        self._mark_waited()
        return self._results

    def _mark_waited(self) -> None:
        with self._lock:  # held to the end: for another thread that waits, the data must be delivered
            if not self._was_waited:
                self._on_wait()
                self._was_waited = True
