"""What kernels deliver and add up, in loops over lists of all ranks' inputs: no tensor operation of the stand-ins.

W ranks, N experts on each; a token is (vector, ids, weights), an empty slot has id -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Arrived:
    """What one rank gets: a row for each token with an expert there, by source rank, then token."""

    rows: list[Tensor] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)  # local, -1 for slots of other ranks
    weights: list[list[float]] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)  # rank, token


def arrivals(x: list[Tensor], ids: list[Tensor], weights: list[Tensor], held: int) -> list[Arrived]:
    """Return what every rank gets."""
    found = []
    for rank in range(len(x)):
        here = Arrived()
        for source in range(len(x)):
            for token in range(len(x[source])):
                local = [e - rank * held if e // held == rank else -1 for e in ids[source][token].tolist()]
                if max(local, default=-1) < 0:
                    continue
                here.rows.append(x[source][token])
                here.ids.append(local)
                given = weights[source][token].tolist()
                here.weights.append([w if e >= 0 else 0.0 for e, w in zip(local, given, strict=True)])
                here.sources.append((source, token))
        found.append(here)
    return found


def by_expert(here: Arrived, held: int) -> list[list[tuple[int, int]]]:
    """Return for every expert the rows (of `here`) and slots that are routed to it, in order."""
    return [
        [(row, slot) for row, ids in enumerate(here.ids) for slot, e in enumerate(ids) if e == expert]
        for expert in range(held)
    ]


def summed(answers: list[list[Tensor]], arrived: list[Arrived], tokens: list[int], width: int) -> list[Tensor]:
    """Return for every rank's tokens the sums of the rows that ranks send back."""
    sums = [torch.zeros(count, width) for count in tokens]
    for rows, here in zip(answers, arrived, strict=True):
        for row, (source, token) in zip(rows, here.sources, strict=True):
            sums[source][token] += row
    return sums
