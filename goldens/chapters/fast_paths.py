"""Golden of shortcuts: exchanges by equal splits with gradients, and where which shortcut may be taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import nan

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, gradients, leaf, named, prefixed
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
BATCHES = {"batch": (3, 2), "batch-of-one": (1, 4), "no-expert": (0, 2), "no-row-each": (2, 0)}  # experts, rows each
E, EP, OFFSETS = 6, (1, 2, 3, 6), tuple(range(9))  # of round-robins
# name: tokens, offset, K, ep
ROBINS: Mapping[str, tuple[int, int, int, int]] = {
    "round-robin": (5, 4, 2, 3), "few-tokens": (1, 2, 2, 3), "no-token": (0, 0, 3, 2), "ep-of-one": (3, 5, 6, 1),
}  # fmt: skip
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
    for case, splits_WW in SPLITS.items():
        for rank in range(len(splits_WW)):
            received = sum(row[rank] for row in splits_WW)
            rows(case, **{f"rows_RD-{rank}": (sum(splits_WW[rank]), D), f"upstream_RD-{rank}": (received, D)})
    for case, (held, n) in BATCHES.items():
        rows(case, columns_DR=(D, held * n), upstream_NnD=(held, n, D))
    for case, (T, offset, K, ep) in ROBINS.items():
        received_R = [K * len(range((rank - offset // K) % ep, T, ep)) for rank in range(ep)]
        rows(case, x_TD=(T, D), **{f"upstream_RD-{rank}": (R, D) for rank, R in enumerate(received_R)})
    return found | named("choices", "in", {"counts_N3": rng.integers(0, 3, (12, 3)), "taken_N": rng.random(9) < 0.4})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return rows padded, compacted, exchanged and listed, their gradients, verdicts and counters."""
    found = named("choices", "out", _choices(given(inputs, "choices"), oracle))
    for case, (pieces, split) in PIECES.items():
        found |= named(case, "out", _padded(given(inputs, case), pieces, split, oracle))
    for case, splits in SPLITS.items():
        found |= named(case, "out", _exchanged(given(inputs, case), torch.tensor(splits), oracle))
    for case, (held, n) in BATCHES.items():
        drawn = given(inputs, case)
        leaves = {"columns_DR": leaf(drawn["columns_DR"])}
        batch_NnD = oracle.as_batch(leaves["columns_DR"].T, held, n)
        found |= named(case, "out", {"batch_NnD": batch_NnD, **gradients([batch_NnD], leaves, [drawn["upstream_NnD"]])})
    for case in ROBINS:
        found |= named(case, "out", _round_robin(given(inputs, case), ROBINS[case], oracle))
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


def _exchanged(drawn: Mapping[str, Tensor], splits_WW: Tensor, oracle: Oracle) -> dict[str, object]:
    """Return what every rank receives, by splits as they are and by two sizes of equal ones, and which are lawful."""
    W, smallest = len(splits_WW), oracle.smallest_split(splits_WW)
    sizes = product(SIZES, repeat=W)
    found: dict[str, object] = {
        "smallest": smallest,
        "lawful_N": [oracle.lawful_splits(size_by_rank, splits_WW) for size_by_rank in sizes],
    }
    for name, split in (("uneven", None), ("smallest", smallest), ("larger", smallest + 2)):
        leaves = {f"rows_RD-{rank}": leaf(drawn[f"rows_RD-{rank}"]) for rank in range(W)}
        rows = list(leaves.values())
        received = (
            oracle.uneven_exchange(rows, splits_WW) if split is None else oracle.equal_exchange(rows, splits_WW, split)
        )
        back = gradients(received, leaves, [drawn[f"upstream_RD-{rank}"] for rank in range(W)])
        found |= prefixed(name, {**{f"received_RD-{rank}": rows_RD for rank, rows_RD in enumerate(received)}, **back})
    return found


def _choices(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, object]:
    counts_N3 = [*drawn["counts_N3"].tolist(), [2, 2, 2], [0, 0, 0]]
    equal_N = [oracle.equal_counts(counts, sum(counts)) for counts in counts_N3]
    grid = product(EP, range(1, E + 1), OFFSETS)
    taken_N = drawn["taken_N"].bool().tolist()
    return {
        "equal_N": [*equal_N, oracle.equal_counts(None, 6), oracle.equal_counts([], 0)],
        "round-robin_N": [oracle.round_robin_shortcut(offset, K, E, ep) for ep, K, offset in grid],
        "decisions_N2": [oracle.decision_counts(taken) for taken in (taken_N, [])],
        "look-ups_N2": [oracle.look_up_counts(events) for events in HISTORIES],
    }


def _round_robin(drawn: Mapping[str, Tensor], sizes: tuple[int, int, int, int], oracle: Oracle) -> dict[str, Tensor]:
    _, offset, K, ep = sizes
    found: dict[str, Tensor] = {}
    for rank in range(ep):
        x_TD = leaf(drawn["x_TD"])
        rows_RD = oracle.round_robin_rows(x_TD, rank, offset=offset, top_k=K, experts=E, ep=ep)
        found[f"rows_RD-{rank}"] = rows_RD
        found[f"dx_TD-{rank}"] = gradients([rows_RD], {"x": x_TD}, [drawn[f"upstream_RD-{rank}"]])["dx"]
    return found


REQUIREMENTS = ("FAST-01", "FAST-02", "FAST-03", "FAST-04", "FAST-05", "FAST-12", "FAST-13", "FAST-14", "FAST-16")

CHAPTER = Chapter(2409, REQUIREMENTS, functions(choices, equal_splits), draw, work_out)
