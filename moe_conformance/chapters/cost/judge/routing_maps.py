"""Whole routing maps in a ledger, which a backend may gather only if it reports so.

A map of marks and one of weights have an entry for every expert of every token, (T, E) each, which is more than ids and
weights of K slots. Other data of that size is not allowed.
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
    """The size (T, E) of the map of a rank's tokens, and the number W of ranks that receive it."""

    T: int
    E: int
    W: int


def require_maps(calls: Sequence[Entry], rank: int, whole: Map, hidden: int, phase: str) -> int:
    """Require a map of marks and one of weights, each sent once to every other rank; return their bytes per entry.

    Without tokens nothing is required. Where E = D a map of weights counts as rows, and is not required.

    Raises:
        WrongForm: one of the maps is missing, or sent more than once.
    """
    given = [entry for entry in calls if _to_all(entry, rank, whole)]
    marks = [entry for entry in given if "float" not in entry.dtype and _size(entry) == _MARK_BYTES]
    weights = [entry for entry in given if "float" in entry.dtype and _size(entry) <= _WEIGHT_BYTES]
    separate = whole.E != hidden
    wanted = [("marks", marks), ("weights", weights)][: 1 + separate]
    wrong = [f"{len(found) or 'no'} maps of {name}" for name, found in wanted if len(found) != 1]
    if whole.T and wrong:
        sent = f"rank {rank} sends {' and '.join(wrong)} instead of 1 each"
        sentence = f"the backend claims routing = 'maps', and {sent}"
        gave = some([f"{entry.dtype} {entry.shapes_in} by {entry.op}" for entry in calls])
        raise WrongForm("dispatch", f"{sentence}, of shape ({whole.T}, {whole.E}), in {phase}: {gave}", ranks=(rank,))
    return _MARK_BYTES + separate * _WEIGHT_BYTES


def _to_all(entry: Entry, rank: int, whole: Map) -> bool:
    """Return whether a call sends as many numbers as the map has to each other rank, in rows of E."""
    rows_of_experts = bool(entry.shapes_in) and all(of[-1:] == (whole.E,) for of in entry.shapes_in)
    if not rows_of_experts or not entry.bytes_in or entry.reduce is not None:
        return False
    return bytes_leaving(entry, rank) == (whole.W - 1) * whole.T * whole.E * _size(entry)


def _size(entry: Entry) -> float:
    """Return the bytes per element of the data that a call sends."""
    return entry.bytes_in / sum(map(math.prod, entry.shapes_in))
