"""Whole routing maps on the wire: whether a ledger shows those that a backend says it gathers.

A mark and a weight for every expert of every token, (T, E) each: more than ids and weights of K slots, and granted to
who says so. So it has to be so: what else is as large is not granted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.findings import some
from moe_conformance.judging.observed.traffic import bytes_leaving
from moe_conformance.judging.verdict import WrongForm

_MARK_BYTES, _WEIGHT_BYTES = 1, torch.float32.itemsize


class Map(NamedTuple):
    """The map of a rank's tokens: T by E, and the ranks W that shall all have it."""

    T: int
    E: int
    W: int


def require_maps(calls: Sequence[Entry], rank: int, whole: Map, hidden: int, phase: str) -> int:
    """Require a map of marks and one of weights, given once each to every other rank; return their bytes an entry.

    Of no tokens there is nothing to show. Where E = D a map of weights counts as rows, and is not asked for.

    Raises:
        WrongForm: one of them is not there, or comes more than once.
    """
    given = [entry for entry in calls if _to_all(entry, rank, whole)]
    marks = [entry for entry in given if "float" not in entry.dtype and _size(entry) == _MARK_BYTES]
    weights = [entry for entry in given if "float" in entry.dtype and _size(entry) <= _WEIGHT_BYTES]
    told = whole.E != hidden
    wanted = [("marks", marks), ("weights", weights)][: 1 + told]
    wrong = [f"{len(found) or 'no'} maps of {name}" for name, found in wanted if len(found) != 1]
    if whole.T and wrong:
        sentence = f"the backend says that whole maps travel, and rank {rank} gives the others {' and '.join(wrong)}"
        gave = some([f"{entry.dtype} {entry.shapes_in} by {entry.op}" for entry in calls])
        raise WrongForm("dispatch", f"{sentence}, {whole.T} by {whole.E}, in {phase}: {gave}", ranks=(rank,))
    return _MARK_BYTES + told * _WEIGHT_BYTES


def _to_all(entry: Entry, rank: int, whole: Map) -> bool:
    """Whether a call brings as many numbers as the map has to each other rank, in rows of E."""
    rows_of_experts = bool(entry.shapes_in) and all(of[-1:] == (whole.E,) for of in entry.shapes_in)
    if not rows_of_experts or not entry.bytes_in or entry.reduce is not None:
        return False
    return bytes_leaving(entry, rank) == (whole.W - 1) * whole.T * whole.E * _size(entry)


def _size(entry: Entry) -> float:
    """Return the bytes of an element that is given."""
    return entry.bytes_in / sum(map(math.prod, entry.shapes_in))
