"""Streams and events on which everything runs at once, in the order of the program.

What a device may do later or beside something else is not seen here: two kernels never overlap, an event that is
missing breaks nothing, and memory is never reused too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor


class Stream:
    """A stream whose work is done when the call returns; it is also its event."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        """Take what `torch.cuda.Stream` takes."""
        self.device, self.priority = device, priority

    def wait_stream(self, stream: object) -> None:
        """Nothing has to be waited for."""

    def wait_event(self, event: object) -> None:
        """Nothing has to be waited for."""

    def record_event(self, event: object = None) -> Stream:
        """Return the event."""
        return self

    def synchronize(self) -> None:
        """Nothing has to be waited for."""


class Event:
    """An event that has happened when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        """Take what `torch.cuda.Event` takes."""

    def record(self, stream: object = None) -> None:
        """Everything before it has run."""

    def wait(self, stream: object = None) -> None:
        """Nothing has to be waited for."""

    def synchronize(self) -> None:
        """Nothing has to be waited for."""


class Ranges:
    """The functions of `torch.cuda.nvtx`: marks for a profiler of the device."""

    def range_push(self, message: str) -> None:
        """Mark nothing."""

    def range_pop(self) -> None:
        """Mark nothing."""

    def range(self, message: str) -> AbstractContextManager[None]:
        """Mark nothing."""
        return nullcontext()


@contextmanager
def stream(entered: object) -> Iterator[None]:
    """Stand for `torch.cuda.stream`: one stream is like another."""
    yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let `Tensor.record_stream` take a stream of this module, until the block is left.

    It tells the allocator of a device which streams use a tensor. Memory that the code under test gives back itself,
    with `untyped_storage().resize_(0)`, is given back here too.
    """
    Tensor.record_stream = lambda tensor, used: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.record_stream  # that of the base class shows again
