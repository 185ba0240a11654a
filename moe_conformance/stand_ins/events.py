"""Events of DeepEP. What an asynchronous call returns is filled with poison until its event is waited for.

From deep_ep/utils.py and csrc/event.hpp of deepseek-ai/DeepEP, branch hybrid-ep at 94a9f8f, and main at dd758ca.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor


class EventHandle:
    """A point in the order of work: what was begun before it, done once it is waited for."""

    def __init__(self) -> None:
        """Record; of a caller's own event nothing is to be waited for, since work on a CPU is done."""
        self._arrivals: list[Callable[[], object]] = []

    def before(self, arrival: Callable[[], object]) -> None:
        """Let something arrive not before this event is waited for."""
        self._arrivals.append(arrival)

    def current_stream_wait(self) -> None:
        """Wait."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival()


class EventOverlap:
    """An event, or none, that can be waited for; as a context manager, when the body ends."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        """Take the event, and tensors to keep alive."""
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Wait for the event."""
        assert self.event is not None
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        """Return the event."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait."""
        if self.event is not None:
            self.event.current_stream_wait()


def begin(
    previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
) -> Callable[..., EventOverlap]:
    """Wait for the event that a call is given, and return the function that ends the call with its own.

    The host side refuses to allocate on the communication stream in a call that is not asynchronous or has no event.
    """
    if allocate_on_comm_stream:
        assert previous_event is not None, "previous_event.has_value() and async"
        assert async_finish, "previous_event.has_value() and async"
    if previous_event is not None:
        previous_event.current_stream_wait()

    def end(results: Sequence[Tensor | None]) -> EventOverlap:
        if not async_finish:
            return EventOverlap()
        event = EventHandle()
        for result in results:
            if result is not None:
                late(result, event)
        return EventOverlap(event)

    return end


def late(result: Tensor, event: EventHandle) -> None:
    """Poison a result in place until the event is waited for."""
    value = result.detach().clone()
    poison(result)
    event.before(lambda: result.data.copy_(value))


def poison(tensor: Tensor) -> None:
    """Fill with a value that no caller may use: NaN, the smallest integer, or True."""
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
    else:
        tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)
