"""Writes a rank's ledger: numbers its calls and formats them as lines.

It runs before every call, hundreds of times a second: lines are formatted by hand, which is faster than json.dumps.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from .entry import ENDED_LINE, MOST_CALLS, Hazard, HazardKind, State, hazard_line, state_line
from .operators import Call

# Not the caller's frames: torch decorates its functions with these.
_DECORATORS = ("contextlib.py", "functools.py", "typing_extensions.py", "warnings.py")
_LEDGER = os.path.dirname(__file__)
_VIRTUAL = os.path.join(os.path.dirname(_LEDGER), "virtual")
_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, _LEDGER + os.sep, _VIRTUAL + os.sep, "<")


class RecordedCall(NamedTuple):
    """Identifies one recorded call."""

    order: int
    op: str
    ranks: tuple[int, ...]
    where: str


class Recorder:
    """Records the first MOST_CALLS calls of a job on one rank; they may come from several threads.

    Args:
        write: Takes one or more whole lines, from one thread at a time.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self.calls = 0
        self._sequences: Counter[str] = Counter()

    def issue(self, call: Call) -> RecordedCall:
        """Records a call that is about to be made, without reading the contents of its tensors."""
        where = caller()
        with self._lock:  # numbers and lines in the order of the calls
            order = self.calls
            self.calls += 1
            sequence = None
            if call.tag is None:
                sequence = self._sequences[call.group.name] = self._sequences[call.group.name] + 1
            if order < MOST_CALLS:
                self._write(_line(order, sequence, call, where).encode())
        return RecordedCall(order, call.op, call.group.ranks, where)

    def reached(self, state: State, recorded: RecordedCall) -> None:
        """Records a new state of an asynchronous call; that of a blocking call follows from the next line."""
        if recorded.order < MOST_CALLS:
            with self._lock:
                self._write(state_line(state, recorded.order))

    def hazard(self, kind: HazardKind, recorded: RecordedCall, where: str = "") -> None:
        """Records a hazard; `where` is the source line that caused it, if known."""
        if recorded.order < MOST_CALLS:
            line = hazard_line(Hazard(kind, recorded.order, recorded.op, recorded.ranks, recorded.where, where))
            with self._lock:
                self._write(line)

    def end(self) -> None:
        """Records the end of the job, which completes the last blocking call."""
        with self._lock:
            self._write(ENDED_LINE)


def caller() -> str:
    """Returns `"file:line"` of the innermost frame outside torch, its dispatch modes and this package, or ""."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_own(file) and frame.f_code.co_name != "__torch_dispatch__":
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _line(order: int, sequence: int | None, call: Call, where: str) -> str:
    """Returns the fields of an Entry, without its state, as a JSON array with dtypes in place of bytes.

    The numbers of the call come first: the rest is often equal, and then parsed only once.
    """
    op, group, inputs, outputs, in_splits, out_splits, *rest = call
    return (
        f'["issued",{order},{sequence or "null"},"{op}",{_group(group)},{in_splits or "null"},{out_splits or "null"},'
        f"{_shapes(inputs)},{_shapes(outputs)},{_dtypes(inputs)},{_dtypes(outputs)},{_rest(*rest)},{_text(where)}]\n"
    )


@cache
def _is_own(file: str) -> bool:
    return file.startswith(_OWN_FILES) or os.path.basename(file) in _DECORATORS


@cache
def _group(group: tuple[object, ...]) -> str:
    name, ranks, *_ = group
    return f"{json.dumps(name)},{json.dumps(ranks)}"


@cache
def _rest(*values: str | int | None) -> str:
    return ",".join(map(json.dumps, values))


@cache
def _text(text: str) -> str:
    return json.dumps(text)


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return f"[{','.join([_shape(tensor.shape) for tensor in tensors])}]"


@lru_cache(maxsize=4096)
def _shape(shape: tuple[int, ...]) -> str:
    return str([*shape])


def _dtypes(tensors: Sequence[torch.Tensor]) -> str:
    """Returns the one dtype of all tensors, or a list of one each."""
    if len(tensors) == 1 or len({tensor.dtype for tensor in tensors}) == 1:
        return _dtype(tensors[0].dtype)
    return f"[{','.join([_dtype(tensor.dtype) for tensor in tensors])}]"


@cache
def _dtype(dtype: torch.dtype) -> str:
    return json.dumps(str(dtype).removeprefix("torch."))
