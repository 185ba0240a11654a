"""Writes a rank's ledger: numbers its calls and turns them into lines."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from .entry import MOST_CALLS, Hazard, HazardKind, State, hazard_line, issue_line, state_line

# Frames of these are not the caller's: torch decorates its functions with the others.
_DECORATORS = ("contextlib.py", "functools.py", "typing_extensions.py", "warnings.py")
_LEDGER = os.path.dirname(__file__)
_VIRTUAL = os.path.join(os.path.dirname(_LEDGER), "virtual")
_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, _LEDGER + os.sep, _VIRTUAL + os.sep, "<")


@dataclass(frozen=True)
class Ticket:
    """Stands for one recorded call."""

    order: int
    op: str
    ranks: tuple[int, ...]
    where: str


class Recorder:
    """One rank's ledger of one job: its first MOST_CALLS calls. They may come from several threads.

    Args:
        write: Takes one or more whole lines.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._calls = 0
        self._sequences: Counter[str] = Counter()

    def issue(
        self,
        op: str,
        group: str,
        ranks: tuple[int, ...],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        reduce: str | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int | None = None,
        asynchronous: bool = False,
    ) -> Ticket:
        """Records a call that is about to be made; see Entry for the arguments.

        `inputs` and `outputs` are the tensors that this rank gives and gets; of their contents nothing is read.
        """
        where = caller()
        shapes = [list(tensor.shape) for tensor in inputs], [list(tensor.shape) for tensor in outputs]
        sizes = _bytes(inputs), _bytes(outputs)
        splits = in_splits and list(in_splits), out_splits and list(out_splits)
        details = (*splits, *shapes, _dtype(inputs, outputs), *sizes, reduce, root, peer, tag, asynchronous, where)
        with self._lock:  # the numbers and the lines in the order in which the calls are made
            order = self._calls
            self._calls += 1
            sequence = None
            if tag is None:
                self._sequences[group] += 1
                sequence = self._sequences[group]
            if order < MOST_CALLS:
                self._write(issue_line((order, op, group, ranks, sequence, *details)))
        return Ticket(order, op, ranks, where)

    def reached(self, state: State, ticket: Ticket) -> None:
        """Records that a call has come further."""
        if ticket.order < MOST_CALLS:
            self._write(state_line(state, ticket.order))

    def hazard(self, kind: HazardKind, ticket: Ticket, where: str = "") -> None:
        """Records a hazard; `where` is the line that did it, if known."""
        if ticket.order < MOST_CALLS:
            self._write(hazard_line(Hazard(kind, ticket.order, ticket.op, ticket.ranks, ticket.where, where)))


def caller() -> str:
    """Returns `"file:line"` of the innermost frame outside torch and this package, or ""."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def _is_own(file: str) -> bool:
    return file.startswith(_OWN_FILES) or os.path.basename(file) in _DECORATORS


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _dtype(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    names = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in (*inputs, *outputs))
    return " to ".join(names)
