"""Golden of shortcuts: pieces padded to equal splits with gradients, and counters of shortcuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import nan

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, gradients, leaf, named
from moe_conformance.reference.fast_paths import choices, equal_splits

D = 3
# name: rows of every piece, and the size to which they are padded
PIECES: Mapping[str, tuple[Sequence[int], int]] = {
    "pieces": ((2, 0, 3, 1), 3), "wide-splits": ((2, 0, 3), 5), "no-rows": ((0, 0), 2), "no-piece": ((), 4),
    "empty-splits": ((0, 0), 0),
}  # fmt: skip
# name: rows from each rank to each
SPLITS: Mapping[str, Sequence[Sequence[int]]] = {
    "three-ranks": ((1, 0, 2), (0, 0, 0), (4, 1, 0)), "one-rank": ((4,),), "nothing-sent": ((0, 0), (0, 0)),
}  # fmt: skip
SIZES = (0, 3, 4, 6)
EVENTS = ("look_up", "change", "reset")
HISTORIES = tuple(events for length in range(5) for events in product(EVENTS, repeat=length))


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return rows and upstream gradients of every case, counts of which some are equal, and decisions."""
    found: dict[str, Tensor] = {}

    def rows(case: str, **shapes: tuple[int, ...]) -> None:
        found.update(named(case, "in", {name: rng.standard_normal(shape) for name, shape in shapes.items()}))

    for case, (pieces, split) in PIECES.items():
        shapes = {name: (sum(pieces), D) for name in ("rows_RD", "upstream_RD")}
        rows(case, **shapes, **{name: (len(pieces) * split, D) for name in ("rows_PD", "upstream_PD")})
    return found | named("choices", "in", {"counts_N3": rng.integers(0, 3, (12, 3)), "taken_N": rng.random(9) < 0.4})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return rows padded and compacted, their gradients, verdicts and counters."""
    found = named("choices", "out", _choices(given(inputs, "choices"), oracle))
    for case, (pieces, split) in PIECES.items():
        found |= named(case, "out", _padded(given(inputs, case), pieces, split, oracle))
    for case, splits in SPLITS.items():
        found |= named(case, "out", _lawful(torch.tensor(splits), oracle))
    return found


def _padded(drawn: Mapping[str, Tensor], pieces: Sequence[int], split: int, oracle: Oracle) -> dict[str, Tensor]:
    """Return padded and compacted rows; padding is NaN and must reach no result."""
    rows_RD, rows_PD = leaf(drawn["rows_RD"]), leaf(drawn["rows_PD"])
    padded_PD = oracle.pad(rows_RD, pieces, split)
    is_padding_P1 = oracle.pad(torch.ones(len(rows_RD), 1), pieces, split) == 0
    compacted_RD = oracle.compact(rows_PD.masked_fill(is_padding_P1, nan), pieces, split)
    leaves = {"rows_RD": rows_RD, "rows_PD": rows_PD}
    back = gradients([padded_PD, compacted_RD], leaves, [drawn["upstream_PD"], drawn["upstream_RD"]])
    return {"padded_PD": padded_PD, "compacted_RD": compacted_RD, **back}


def _lawful(splits_WW: Tensor, oracle: Oracle) -> dict[str, object]:
    """Return the smallest size of equal splits, and which sizes of the ranks are lawful."""
    sizes = product(SIZES, repeat=len(splits_WW))
    lawful_N = [oracle.lawful_splits(size_by_rank, splits_WW) for size_by_rank in sizes]
    return {"smallest": oracle.smallest_split(splits_WW), "lawful_N": lawful_N}


def _choices(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, object]:
    counts_N3 = [*drawn["counts_N3"].tolist(), [2, 2, 2], [0, 0, 0]]
    equal_N = [oracle.equal_counts(counts, sum(counts)) for counts in counts_N3]
    taken_N = drawn["taken_N"].bool().tolist()
    return {
        "equal_N": [*equal_N, oracle.equal_counts(None, 6), oracle.equal_counts([], 0)],
        "decisions_N2": [oracle.decision_counts(taken) for taken in (taken_N, [])],
        "look-ups_N2": [oracle.look_up_counts(events) for events in HISTORIES],
    }


REQUIREMENTS = ("FAST-01", "FAST-02", "FAST-03", "FAST-04", "FAST-12", "FAST-16")

CHAPTER = Chapter(2409, REQUIREMENTS, functions(choices, equal_splits), draw, work_out)
