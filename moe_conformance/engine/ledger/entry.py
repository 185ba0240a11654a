"""The records of the ledger, and the lines in which they are written to its file.

Every line is a JSON array. One line is written when a call is issued, a short one when an asynchronous call was waited
for, and one at the end of the job. A rank may be killed at any time: an incomplete last line is ignored. The jobs of
one request are written one after the other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import torch

MOST_CALLS = 20_000  # recorded per job and rank: an endless loop of calls must not fill memory
Shapes = tuple[tuple[int, ...], ...]
Asynchrony = Literal["plain", "poisoned", "watched", "delayed_compute", "delayed_communication"]
State = Literal["issued", "finished", "waited"]
HazardKind = Literal["never waited", "sent data changed", "output written", "output touched"]


ENDED_LINE = b'["ended"]\n'
_ISSUED = b'["issued",'


@dataclass(frozen=True)
class Entry:
    """One call of a collective, or of a send or receive, on one rank.

    Attributes:
        order: 0, 1, ... over all calls of a job on this rank.
        op: The public name, `"all_to_all_single"`, `"send"`.
        group: The process group's name; two groups may have the same ranks.
        ranks: The group's global ranks, by group rank.
        sequence: 1, 2, ... over the collectives on this group on this rank; None for sends and receives.
        in_splits: Rows to each rank of the group; None if they are even or the operator has no splits.
        out_splits: Rows from each rank of the group; None likewise.
        shapes_in: Shapes of the rank's input tensors.
        shapes_out: Shapes of the rank's output tensors.
        dtype: `"float32"`; `"float32 to bfloat16"` if inputs and outputs differ; "" without a tensor.
        bytes_in: Bytes of all input tensors.
        bytes_out: Bytes of all output tensors.
        reduce: `"SUM"`, for a reduction.
        root: Global rank of the root, if there is one.
        peer: Global rank of the other side of a send or receive; None also for a receive from any rank.
        tag: The tag of a send or receive.
        asynchronous: Whether the caller received a handle to wait for; sends and receives always return one.
        where: `"path/to/file.py:12"`, the line outside torch that made the call; "" if it was not made from Python.
        state: "waited" once the caller has waited, or a blocking call has returned; "finished" if it was complete at
            the end of the job and the caller had not waited.
    """

    order: int
    op: str
    group: str
    ranks: tuple[int, ...]
    sequence: int | None
    in_splits: tuple[int, ...] | None
    out_splits: tuple[int, ...] | None
    shapes_in: Shapes
    shapes_out: Shapes
    dtype: str
    bytes_in: int
    bytes_out: int
    reduce: str | None
    root: int | None
    peer: int | None
    tag: int | None
    asynchronous: bool
    where: str
    state: State = "issued"


@dataclass(frozen=True)
class Hazard:
    """An error in how a rank uses the buffers or the handle of an asynchronous call.

    Attributes:
        kind: "never waited"; "sent data changed" or "output written" between the call and the wait, by other code than
            the call; "output touched", which is read or written, before the wait.
        order: `Entry.order` of the call.
        op: `Entry.op` of the call.
        ranks: The ranks of the call's group.
        issued: The line that made the call.
        where: The line that used the buffer, with the name of the operator; "" if it is not known.
    """

    kind: HazardKind
    order: int
    op: str
    ranks: tuple[int, ...]
    issued: str
    where: str = ""

    def __str__(self) -> str:
        """Returns the hazard as a sentence that does not name the rank."""
        call = f"{self.op} on {group_words(self.ranks)}, issued at {self.issued or 'an unknown line'},"
        by = f" at {self.where}" if self.where else ""
        return {
            "never waited": f"{call} was never waited for",
            "sent data changed": f"data that {call} sends was changed before wait(){by}",
            "output written": f"the output of {call} was overwritten before wait(){by}",
            "output touched": f"the output of {call} was read or written before wait(){by}",
        }[self.kind]


@dataclass(frozen=True)
class Ledger:
    """Everything that a rank recorded in one job."""

    entries: tuple[Entry, ...] = ()
    hazards: tuple[Hazard, ...] = ()


def group_words(ranks: tuple[int, ...]) -> str:
    """Returns a short text that names a group by its ranks."""
    if len(ranks) <= 8:
        return f"group ({', '.join(map(str, ranks))})"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"group ({ranks[0]} to {ranks[-1]})"
    return f"group ({', '.join(map(str, ranks[:3]))}, ... {ranks[-1]}; {len(ranks)} ranks)"


def state_line(state: State, order: int) -> bytes:
    """Returns the line that records a call's new state."""
    return b'["%b",%d]\n' % (state.encode(), order)


def hazard_line(hazard: Hazard) -> bytes:
    """Returns the line that records a hazard."""
    fields = ("hazard", hazard.kind, hazard.order, hazard.op, hazard.ranks, hazard.issued, hazard.where)
    return json.dumps(fields).encode() + b"\n"


def decode(data: bytes) -> Ledger:
    """Parses a ledger file; an incomplete last line is ignored.

    Raises:
        ValueError: a complete line is not a line of a ledger.
    """
    issued: list[tuple[int, int | None, tuple[Any, ...]]] = []
    states: dict[int, State] = {}
    hazards: list[Hazard] = []
    ended = False
    for line in data.split(b"\n")[:-1]:
        if line.startswith(_ISSUED):
            order, sequence, rest = line[len(_ISSUED) :].split(b",", 2)
            issued.append((int(order), None if sequence == b"null" else int(sequence), _described(rest)))
            continue
        what, *fields = json.loads(line)
        if what == "hazard":
            kind, number, op, ranks, at, where = fields
            hazards.append(Hazard(kind, number, op, tuple(ranks), at, where))
        elif what == "ended":
            ended = True
        else:
            (number,) = fields
            states[number] = what
    # A rank that makes another call has returned from the previous one.
    blocking: list[State] = ["waited"] * len(issued)
    if blocking and not ended:
        blocking[-1] = "issued"
    return Ledger(
        tuple(
            _entry(order, sequence, fields, states.get(order), state)
            for (order, sequence, fields), state in zip(issued, blocking, strict=True)
        ),
        tuple(hazards),
    )


def decode_all(data: bytes) -> list[Ledger]:
    """Parses the ledgers of several jobs, which are written one after the other and have all ended."""
    return [decode(lines + ENDED_LINE) for lines in data.split(ENDED_LINE)[:-1]]


def _entry(order: int, sequence: int | None, fields: tuple[Any, ...], written: State | None, blocking: State) -> Entry:
    op, group, ranks, *others = fields
    state = written or ("issued" if others[-2] else blocking)  # others[-2]: whether it is asynchronous
    return Entry(order, op, group, ranks, sequence, *(*others, state))


@lru_cache(maxsize=4096)
def _described(rest: bytes) -> tuple[Any, ...]:
    """Parses the end of an "issued" line: the fields of an Entry without its numbers and state."""
    op, group, ranks, in_splits, out_splits, shapes_in, shapes_out, dtypes_in, dtypes_out, *others = json.loads(
        b"[" + rest
    )
    return (
        op,
        group,
        tuple(ranks),
        in_splits and tuple(in_splits),
        out_splits and tuple(out_splits),
        tuple(map(tuple, shapes_in)),
        tuple(map(tuple, shapes_out)),
        _dtype(dtypes_in, dtypes_out),
        _bytes(shapes_in, dtypes_in),
        _bytes(shapes_out, dtypes_out),
        *others,
    )


def _dtype(*dtypes: str | list[str]) -> str:
    """Returns the text of a call's dtypes; the arguments are one dtype for all tensors of a side, or one each."""
    if dtypes[0] == dtypes[1] and isinstance(dtypes[0], str):
        return dtypes[0]
    names: list[str] = []
    for side in dtypes:
        names += [side] if isinstance(side, str) else side
    return " to ".join(dict.fromkeys(names))


def _bytes(shapes: list[list[int]], dtypes: str | list[str]) -> int:
    by_tensor = [dtypes] * len(shapes) if isinstance(dtypes, str) else dtypes
    return sum(math.prod(shape) * _item_size(dtype) for shape, dtype in zip(shapes, by_tensor, strict=True))


@cache
def _item_size(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size
