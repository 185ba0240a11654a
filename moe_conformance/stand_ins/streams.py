"""Streams and events of a device, on a CPU: operators run at once, and collectives of a side stream are in flight.

Operators run in the order of the program, on whatever stream. Inside `overlapping`, an all-to-all on a side stream is
issued and not waited for. It is waited for where the program orders that: where another stream waits for an event that
was recorded behind it, or where an operator of its own stream reads what it delivers. A wait that is missing shows, as
on a device, in tokens that have not arrived. What is not seen here: two kernels never overlap, and memory is never
reused too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Issued:
    """A collective or a copy that was issued, and the memory that it writes, kept so that it is not reused."""

    def __init__(self, wait: Callable[[], object], output: Tensor) -> None:
        self._wait: Callable[[], object] | None = wait
        self.memory = output.untyped_storage()  # one more holder of the tensor would have autograd copy it

    def wait(self) -> None:
        """Wait for it once."""
        if self._wait is not None:
            self._wait()
        self._wait = None

    @property
    def in_flight(self) -> bool:
        """Whether nobody has waited for it."""
        return self._wait is not None


class Stream:
    """A stream, which is also its event: operators are done when their call returns, collectives may be in flight."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        """Take what `torch.cuda.Stream` takes."""
        self.device, self.priority = device, priority
        self.issued: list[_Issued] = []

    def finish(self) -> None:
        """Wait for what was issued here, in its order."""
        for issued in self.issued:
            issued.wait()
        self.issued.clear()

    def wait_stream(self, stream: Stream) -> None:
        """Wait for what was issued on another stream."""
        if stream is not self:
            stream.finish()

    def wait_event(self, event: Event | Stream) -> None:
        """Wait for what was issued before the event."""
        event.wait(self) if isinstance(event, Event) else self.wait_stream(event)

    def record_event(self, event: Event | None = None) -> Event | Stream:
        """Record an event."""
        if event is None:
            return self
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for what was issued here."""
        self.finish()


class Event:
    """What was issued on a stream before the event was last recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        """Take what `torch.cuda.Event` takes."""
        self._stream: Stream | None = None
        self._before: list[_Issued] = []

    def record(self, stream: Stream | None = None) -> None:
        """Remember what is in flight on the stream."""
        self._stream = current_stream() if stream is None else stream
        self._before = [issued for issued in self._stream.issued if issued.in_flight]

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait; the stream of the event itself keeps its order without waiting."""
        if (current_stream() if stream is None else stream) is not self._stream:
            self.synchronize()

    def synchronize(self) -> None:
        """Let the host wait."""
        for issued in self._before:
            issued.wait()
        self._before.clear()


_DEFAULT = Stream()
_entered: list[Stream] = []
_overlaps: list[bool] = []


def current_stream(device: object = None) -> Stream:
    """Return the stream that was entered last, or the default one."""
    return _entered[-1] if _entered else _DEFAULT


def _memory(tensors: Any) -> set[int]:
    """Return the storages of the tensors among arguments."""
    if isinstance(tensors, Tensor):
        return {tensors.untyped_storage()._cdata}
    return {memory for each in tensors for memory in _memory(each)} if isinstance(tensors, list | tuple) else set()


_SHAPE_ONLY = frozenset(["empty_like", "new_empty", "new_empty_strided", "new_zeros", "zeros_like"])


class _InOrder(TorchDispatchMode):
    """Waits before an operator of a stream reads or writes what a collective of this stream delivers.

    A copy of it, which autograd makes of gradients, is put off with it.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self._stream.issued or func.is_view or func.namespace != "aten" or name in _SHAPE_ONLY:
            return func(*args, **(kwargs or {}))
        delivered = {issued.memory._cdata for issued in self._stream.issued if issued.in_flight}
        if name == "copy_" and _memory(args[1]) <= delivered and not _memory(args[0]) & delivered:
            to, given = args[0], args[1].detach()
            self._stream.issued.append(_Issued(lambda: to.data.copy_(given), to))
            return to
        if delivered & _memory(args):
            self._stream.finish()
        return func(*args, **(kwargs or {}))


@contextmanager
def stream(entered: Stream) -> Iterator[None]:
    """Stand for `torch.cuda.stream`."""
    _entered.append(entered)
    try:
        with _InOrder(entered) if _overlaps and entered is not _DEFAULT else nullcontext():
            yield
    finally:
        _entered.pop()


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Stand for `torch.distributed.all_to_all_single`: on a side stream it is issued and not waited for.

    It sends a copy: the caller may give the memory of its input back, which a device's allocator keeps for the stream.
    """
    on, splits = current_stream(), (output_split_sizes, input_split_sizes)
    if async_op or not _overlaps or on is _DEFAULT:
        return dist.all_to_all_single(output, input, *splits, group, async_op)
    work = dist.all_to_all_single(output, input.detach().clone(), *splits, group, async_op=True)
    on.issued.append(_Issued(work.wait, output))
    return None


@contextmanager
def overlapping() -> Iterator[None]:
    """Let collectives of side streams overlap with what follows, until the block is left.

    `Tensor.record_stream`, which tells an allocator which streams use a tensor, takes streams of this module then.
    """
    Tensor.record_stream = lambda tensor, used: None  # type: ignore[assignment,method-assign]
    _overlaps.append(True)
    try:
        yield
    finally:
        _overlaps.pop()
        del Tensor.record_stream  # that of the base class shows again


class Ranges:
    """The functions of `torch.cuda.nvtx`: marks for a profiler of the device."""

    def range_push(self, message: str) -> None:
        """Mark nothing."""

    def range_pop(self) -> None:
        """Mark nothing."""

    def range(self, message: str) -> AbstractContextManager[None]:
        """Mark nothing."""
        return nullcontext()
