"""Intercepts every collective of a process, through kernels on torch's dispatcher."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from ..gpu import delays
from .entry import Asynchrony
from .handle import Handle
from .operators import Groups, Operator, functional_overloads, operators
from .poison import Poisoned, can_poison
from .recorder import RecordedCall, Recorder
from .watch import Watch

_NOTHING = contextlib.nullcontext()
# Our kernels run before the dispatch on the device; these are the keys to continue with, by `redispatch`, which
# releases the GIL and costs half of what `_op_dk` does.
_META = DispatchKeySet(DispatchKey.Meta)
_DEVICES = (
    (DispatchKey.CPU, DispatchKeySet(DispatchKey.CPU)),
    (DispatchKey.CUDA, DispatchKeySet(DispatchKey.CUDA)),
    (DispatchKey.PrivateUse1, DispatchKeySet(DispatchKey.PrivateUse1)),
    (DispatchKey.Meta, _META),
)


class Tap:
    """Kernels on the dispatcher's operators for collectives, installed once; they record on demand.

    They also intercept collectives of backward passes on other threads, of functional collectives, DTensor and FSDP,
    and of code that imported functions of torch.distributed before. Direct calls of a backend object are not
    intercepted.

    Args:
        write: Called with lines of the ledger.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._recording: _Recording | None = None
        self._unwaited: list[Handle] = []  # C++ may still use these, so that they must be kept alive
        self._functional_calls = threading.local()
        self._libraries = [torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional")]
        for operator in operators():
            self._libraries[0].impl(operator.schema_name, self._kernel(operator), "BackendSelect", with_keyset=True)
        for overload in functional_overloads():
            name = overload._schema.name.partition("::")[2]
            self._libraries[1].impl(name, self._functional_kernel(overload), "BackendSelect", with_keyset=True)

    @contextlib.contextmanager
    def recording(self, asynchrony: Asynchrony = "plain") -> Iterator[None]:
        """Records the calls that are made in the block; a call not waited for at its end is a hazard."""
        recording = self._recording = _Recording(Recorder(self._write), asynchrony)
        try:
            with recording.watch or contextlib.nullcontext():
                yield
            recording.finish()
        finally:
            self._recording = None
            self._unwaited = [handle for handle in (*self._unwaited, *recording.close()) if not handle.was_waited]

    def calls(self) -> int:
        """Returns how many calls were made since the recording began."""
        return self._recording.calls() if self._recording is not None else 0

    def in_flight(self) -> tuple[int, ...]:
        """Returns the orders of the asynchronous calls that were not waited for so far."""
        return self._recording.in_flight() if self._recording is not None else ()

    def _kernel(self, operator: Operator) -> Callable[..., Any]:
        overload = operator.overload

        def kernel(keys: DispatchKeySet, *args: Any) -> Any:
            device = _device(keys)
            recording = self._recording
            if recording is None or device is _META:
                return overload.redispatch(device, *args)
            functional = getattr(self._functional_calls, "inside", False)
            return recording.run(operator, device, args, functional=functional)

        return kernel

    def _functional_kernel(self, overload: Any) -> Callable[..., Any]:
        def kernel(keys: DispatchKeySet, *args: Any) -> Any:
            self._functional_calls.inside = True
            try:
                return overload.redispatch(_device(keys), *args)
            finally:
                self._functional_calls.inside = False

        return kernel


@dataclass(frozen=True)
class _Pending:
    """An asynchronous call that the caller has not waited for."""

    recorded: RecordedCall
    handle: Handle
    functional: bool


class _Recording:
    """The recording of one job."""

    def __init__(self, recorder: Recorder, asynchrony: Asynchrony) -> None:
        self._recorder = recorder
        self._poisons = asynchrony == "poisoned"
        self.watch = Watch(recorder) if asynchrony == "watched" else None
        self._delays = delays.of(asynchrony)
        self._groups = Groups()
        self._pending: dict[int, _Pending] = {}
        self._open = True

    def calls(self) -> int:
        """Returns how many calls were made."""
        return self._recorder.calls

    def in_flight(self) -> tuple[int, ...]:
        """Returns the orders of the calls that were not waited for."""
        return tuple(self._pending)

    def run(self, operator: Operator, device: DispatchKeySet, args: tuple[Any, ...], *, functional: bool) -> Any:
        """Records a call, makes it, and returns its result, with our Handle if it is asynchronous."""
        call = operator.read(args, self._groups)
        recorded = self._recorder.issue(call)
        if self.watch is not None:
            self.watch.began(recorded, call)
        poisoned = Poisoned(operator, args, call) if self._poisons and can_poison(call) else None
        try:
            with self._delays.around(call.asynchronous) if self._delays is not None else _NOTHING:
                result = operator.overload.redispatch(device, *(args if poisoned is None else poisoned.args))
        except BaseException:
            if poisoned is not None:
                poisoned.undo()
            raise
        if not call.asynchronous or (work := operator.work(result)) is None:
            return result
        results = None if poisoned is None else list(call.outputs)
        handle = Handle(work, lambda: self._on_wait(recorded, poisoned), results)
        self._pending[recorded.order] = _Pending(recorded, handle, functional)
        return operator.result(args, handle)

    def finish(self) -> None:
        """Records the hazards of calls that were not waited for by a function that has returned."""
        for pending in self._pending.values():
            if pending.handle.seems_finished():
                self._recorder.reached("finished", pending.recorded)
            # Using the result of a functional collective waits for it; not using it is no error.
            if not pending.functional:
                self._recorder.hazard("never waited", pending.recorded)

    def close(self) -> list[Handle]:
        """Ends the recording and returns the handles of calls that were not waited for."""
        self._open = False
        self._recorder.end()
        return [pending.handle for pending in self._pending.values()]

    def _on_wait(self, recorded: RecordedCall, poisoned: Poisoned | None) -> None:
        """Ends a call that was waited for, perhaps after the job that made it."""
        hazards = poisoned.deliver() if poisoned is not None else []
        self._pending.pop(recorded.order, None)
        if self._open:
            if self.watch is not None:
                self.watch.ended(recorded)
            for kind in hazards:
                self._recorder.hazard(kind, recorded)
            self._recorder.reached("waited", recorded)


def _device(keys: DispatchKeySet) -> DispatchKeySet:
    """Returns the dispatch key of the device that a call's tensors are on, as a set."""
    for key, device in _DEVICES:
        if keys.has(key):
            return device
    return _DEVICES[0][1]
