"""The rows and bytes that a rank sends to other ranks by its collectives, read from its ledger.

The part that a rank sends to itself does not count. Data that is reduced on another rank counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.scenarios.outcome import RankOutcome


def by_phase(rank: RankOutcome) -> Mapping[str, tuple[Entry, ...]]:
    """Return the ledger entries of a finished rank by phase: "forward:0", "answered:0", "backward:0", ..., "finish".

    The phase "forward" ends when the experts are called, and "answered" begins.
    """
    found: dict[str, tuple[Entry, ...]] = {}
    for (phase, start), (_, end) in pairwise(rank.phases):
        found[phase] = (*found.get(phase, ()), *rank.ledger[start:end])
    return found


def exchange_phases(rank: RankOutcome) -> Iterator[tuple[str, Sequence[Entry]]]:
    """Yield all phases with their calls, except the finishing of gradients and repetitions."""
    for phase, calls in by_phase(rank).items():
        if phase.partition(":")[0] not in ("finish", "repetition"):
            yield phase, calls


def signature(entry: Entry) -> tuple[object, ...]:
    """Return the properties of a call that are equal in equal steps: kind, ranks, splits, shapes and dtype."""
    return entry.op, entry.ranks, entry.in_splits, entry.out_splits, entry.shapes_in, entry.shapes_out, entry.dtype


def dispatches(rank: RankOutcome) -> Iterator[tuple[str, Sequence[Entry]]]:
    """Yield the phase and the calls of every dispatch of a rank."""
    for phase, calls in by_phase(rank).items():
        if phase.partition(":")[0] in ("forward", "dispatch"):
            yield phase, calls


def parted(calls: Sequence[Entry], hidden: int) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Split the calls of a dispatch before the first one that carries rows of width D."""
    first = next((n for n, entry in enumerate(calls) if carries_rows(entry, hidden)), len(calls))
    return calls[:first], calls[first:]


def carries_rows(entry: Entry, hidden: int) -> bool:
    """Return whether a call carries rows of width D: floating point, with D as its last dimension."""
    shapes = entry.shapes_in or entry.shapes_out
    return "float" in entry.dtype and bool(shapes) and all(len(of) > 1 and of[-1] == hidden for of in shapes)


def rows_leaving(entry: Entry, rank: int, hidden: int) -> float:
    """Return the number of rows that leave a rank by a call; a fraction where a reduction shares a row out."""
    return _elements_leaving(entry, rank) / hidden


def bytes_leaving(entry: Entry, rank: int) -> float:
    """Return the number of bytes that leave a rank by a call."""
    given = sum(map(math.prod, entry.shapes_in))
    return _elements_leaving(entry, rank) * entry.bytes_in / given if given else 0.0


def _elements_leaving(entry: Entry, rank: int) -> float:
    """Return the number of elements that a rank sends to others, counted once per receiving rank."""
    given, W = [math.prod(shape) for shape in entry.shapes_in], len(entry.ranks)
    if not given or W == 1:
        return 0.0
    if entry.op == "all_to_all_single" and entry.in_splits is not None:
        (shape,), place = entry.shapes_in, entry.ranks.index(rank)
        return (sum(entry.in_splits) - entry.in_splits[place]) * math.prod(shape[1:])
    if entry.op in ("all_to_all", "reduce_scatter", "scatter") and len(given) == W:
        return sum(given) - given[entry.ranks.index(rank)]
    if entry.op in ("all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
        return sum(given) * (W - 1) / W
    if entry.op.startswith("all_gather") or entry.op == "broadcast":
        return sum(given) * (W - 1)
    if entry.op.startswith("all_reduce"):
        return 2 * sum(given) * (W - 1) / W  # as a reduce-scatter and an all-gather, of which one is made
    return sum(given)  # to one other rank: send, gather, reduce
