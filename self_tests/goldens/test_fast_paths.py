"""The goldens of shortcuts are what the longhand makes of the stored inputs, the long way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from moe_conformance.goldens.chapters.fast_paths import (
    BATCHES,
    EP,
    HISTORIES,
    OFFSETS,
    PIECES,
    ROBINS,
    SIZES,
    SPLITS,
    E,
)
from self_tests.chapters.fast_paths.second import choices, equal_splits
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def of_pieces(own: Mapping[str, Any], pieces: Sequence[int], split: int) -> dict[str, Any]:
    """Rows put to their places and taken from them."""
    return {
        "padded_PD": equal_splits.pad(own["rows_RD"], pieces, split),
        "drows_RD": equal_splits.pad_backward(own["upstream_PD"], pieces, split),
        "compacted_RD": equal_splits.compact(own["rows_PD"], pieces, split),
        "drows_PD": equal_splits.compact_backward(own["upstream_RD"], pieces, split),
    }


def of_exchange(own: Mapping[str, Any], splits: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Rows dealt out to ranks, and their gradients sent back."""
    splits_WW, ranks = np.array(splits, dtype=np.int64), range(len(splits))
    rows, upstream = ([own[f"{name}_RD-{rank}"] for rank in ranks] for name in ("rows", "upstream"))
    smallest = equal_splits.smallest_split(splits_WW)
    lawful = [equal_splits.lawful_splits(sizes, splits_WW) for sizes in product(SIZES, repeat=len(ranks))]
    found: dict[str, Any] = {"smallest": smallest, "lawful_N": lawful}
    back = equal_splits.uneven_exchange_backward(upstream, splits_WW)
    for name, received in (
        ("uneven", equal_splits.uneven_exchange(rows, splits_WW)),
        ("smallest", equal_splits.equal_exchange(rows, splits_WW, smallest)),
        ("larger", equal_splits.equal_exchange(rows, splits_WW, smallest + 2)),
    ):
        for rank in ranks:
            found[f"{name}.received_RD-{rank}"], found[f"{name}.drows_RD-{rank}"] = received[rank], back[rank]
    return found


def of_choices(own: Mapping[str, Any]) -> dict[str, Any]:
    """Verdicts and counters, each by trying or counting."""
    counts = [*own["counts_N3"].tolist(), [2, 2, 2], [0, 0, 0], []]
    equal = [choices.equal_counts(each, sum(each)) for each in counts]
    equal.insert(-1, choices.equal_counts(None, 6))
    return {
        "equal_N": equal,
        "round-robin_N": [
            choices.round_robin_shortcut(offset, K, E, ep) for ep in EP for K in range(1, E + 1) for offset in OFFSETS
        ],
        "decisions_N2": [choices.decision_counts(own["taken_N"].astype(bool).tolist()), (0, 0)],
        "look-ups_N2": [choices.look_up_counts(events) for events in HISTORIES],
    }


def of_robin(own: Mapping[str, Any], T: int, offset: int, K: int, ep: int) -> dict[str, Any]:
    """What each rank receives, slot by slot, and what comes back to the tokens."""
    found, sizes = {}, (offset, K, E, ep)
    for rank in range(ep):
        upstream_RD = own[f"upstream_RD-{rank}"]
        found[f"rows_RD-{rank}"] = choices.round_robin_rows(own["x_TD"], rank, *sizes)
        found[f"dx_TD-{rank}"] = choices.round_robin_rows_backward(T, upstream_RD, rank, *sizes)
    return found


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored row, gradient, verdict and counter."""
        values = stored("fast_paths")
        answers = told("choices", of_choices(given(values, "choices")))
        for case, (pieces, split) in PIECES.items():
            answers |= told(case, of_pieces(given(values, case), pieces, split))
        for case, splits in SPLITS.items():
            answers |= told(case, of_exchange(given(values, case), splits))
        for case, (held, each) in BATCHES.items():
            own = given(values, case)
            batch_NnD = choices.as_batch(own["columns_DR"].T, held, each)
            back_RD = choices.as_batch_backward(own["upstream_NnD"])
            answers |= told(case, {"batch_NnD": batch_NnD, "dcolumns_DR": back_RD.T})
        for case, sizes in ROBINS.items():
            answers |= told(case, of_robin(given(values, case), *sizes))
        assert_twins("fast_paths", answers)
