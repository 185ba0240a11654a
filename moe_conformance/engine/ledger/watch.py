"""Finds the source line that uses the buffers of an asynchronous collective before the wait.

It inspects every operator of torch, which takes microseconds per operator: it is meant for repeating a job that failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .entry import HazardKind
from .operators import Call
from .recorder import RecordedCall, Recorder, caller

# They use the shape of a tensor and not its data, which their schema does not say.
_SHAPE_ONLY = frozenset(
    [
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size", "is_pinned"),
        *("size", "stride", "numel", "dim", "storage_offset", "_unsafe_view", "wait_tensor", "_wrap_tensor_autograd"),
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
    ]
)


@dataclass(frozen=True)
class _Part:
    """A byte range of a storage; `tensor` keeps the storage alive, so that its address is not reused."""

    tensor: torch.Tensor
    storage: int
    start: int
    stop: int

    def meets(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage()._cdata != self.storage:
            return False
        other = _part(tensor)
        if other.stop <= self.start or self.stop <= other.start:
            return False
        if tensor.is_contiguous():
            return True
        # Between the first and last element of a strided view are bytes that do not belong to it.
        span = (other.stop - other.start) // tensor.element_size()
        starts = other.start + tensor.element_size() * torch.arange(span).as_strided(tensor.shape, tensor.stride())
        return bool(((starts < self.stop) & (starts + tensor.element_size() > self.start)).any())

    def holds(self, tensor: torch.Tensor) -> bool:
        other = _part(tensor)
        return other.storage == self.storage and self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True)
class _Pending:
    recorded: RecordedCall
    inputs: tuple[_Part, ...]
    outputs: tuple[_Part, ...]

    def hazard(self, tensor: torch.Tensor, *, writes: bool) -> HazardKind | None:
        """Returns the hazard of reading, or writing, a tensor now; None if there is none."""
        given = not writes and any(part.holds(tensor) for part in self.inputs)  # in-place gather: still readable
        if not given and any(part.meets(tensor) for part in self.outputs):
            return "output touched"
        if writes and any(part.meets(tensor) for part in self.inputs):
            return "sent data changed"
        return None


class Watch(TorchDispatchMode):
    """Inspects every operator while asynchronous calls are pending; records the first hazard of each call."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._pending: dict[int, _Pending] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler for this mode, which takes seconds."""
        return False

    def began(self, recorded: RecordedCall, call: Call) -> None:
        """Starts watching the buffers of a call; the call's own use of pending buffers is inspected too."""
        written = {id(tensor) for tensor in call.outputs}
        for tensor in (*call.inputs, *call.outputs):
            self._inspect(tensor, writes=id(tensor) in written, by=call.op)
        if call.asynchronous:
            inputs = tuple(_part(tensor) for tensor in call.inputs if tensor.numel() and id(tensor) not in written)
            outputs = tuple(_part(tensor) for tensor in call.outputs if tensor.numel())
            self._pending[recorded.order] = _Pending(recorded, inputs, outputs)

    def ended(self, recorded: RecordedCall) -> None:
        """Stops watching the buffers of a call."""
        self._pending.pop(recorded.order, None)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper, as DTensor: operators on its inner tensors are dispatched here too
        kwargs = kwargs or {}
        if self._pending and (use := _use(func)) is not None:
            for name, value in (*enumerate(args), *kwargs.items()):
                for tensor in _tensors(value):
                    self._inspect(tensor, writes=name in use, by=str(func))
        return func(*args, **kwargs)

    def _inspect(self, tensor: torch.Tensor, *, writes: bool, by: str) -> None:
        if not self._pending or tensor.numel() == 0 or tensor.layout is not torch.strided:
            return
        for pending in list(self._pending.values()):
            if (kind := pending.hazard(tensor, writes=writes)) is not None:
                self._recorder.hazard(kind, pending.recorded, f"{caller() or 'an unknown line'} ({by})")
                self.ended(pending.recorded)


@cache
def _use(func: Any) -> frozenset[int | str] | None:
    """Returns the positions and names of the arguments that an operator writes; None if it uses no data."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    arguments = list(enumerate(schema.arguments))
    written = {at for at, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write}
    is_view = not written and any(returned.alias_info is not None for returned in schema.returns)
    if is_view or name in _SHAPE_ONLY or namespace == "c10d":  # calls of c10d are inspected in `began`
        return None
    return frozenset(written | {schema.arguments[at].name for at in written})


def _part(tensor: torch.Tensor) -> _Part:
    """Returns the byte range from the first to the last element of a tensor, which must not be empty."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return _Part(tensor, tensor.untyped_storage()._cdata, start, start + int(span) * tensor.element_size())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
