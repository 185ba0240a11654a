"""The goldens of packed sequences are what the longhand makes of the stored inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_conformance.goldens.chapters.thd import CONTEXTS, CUMULATIVE_PADDED, JUDGED, LENGTHS, MULTIPLES, PACKS, SIZES
from self_tests.chapters.token_padding import second as packing
from self_tests.goldens.golden_twins import assert_twins, stored, told


def of_lengths(lengths: Sequence[int], claims: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Sums, padded lengths, and what is said of claimed ones."""
    real = packing.running_sums(lengths)
    return {
        "cumulative_S": real,
        "padded_MS": [[packing.next_multiple(length, multiple) for length in lengths] for multiple in MULTIPLES],
        "judged_N": [JUDGED.index(packing.judged_lengths(lengths, real, claim, 4)) for claim in claims],
    }


def real_rows(case: str) -> list[bool]:
    """For every row of a pack, whether it is a token's."""
    lengths, padded, more = PACKS[case]
    return packing.real_rows(packing.running_sums(lengths), packing.running_sums(padded), sum(padded) + more)


def of_context(order: Sequence[int]) -> dict[str, Any]:
    """Which cp rank holds which row, and what is a partition."""
    splits = ([order[:7], order[7:]], [order[:7], order[6:]], [order[:7]])
    found: dict[str, Any] = {
        "halves-twice-part-are-partitions": [packing.each_row_once(split, len(order)) for split in splits]
    }
    for cp in CONTEXTS:
        found[f"share-cp{cp}_CP"] = packing.places_by_cp_rank(12, cp)
        found[f"rows-cp{cp}_CR"] = packing.rows_by_cp_rank(CUMULATIVE_PADDED, cp)
        found[f"none-cp{cp}_CR"] = packing.rows_by_cp_rank([0, 0], cp)
    return found


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored length, verdict and row."""
        values = stored("thd")
        multiples = [packing.divider(tp, cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
        answers = told("lengths", {"multiples": multiples})
        for i, lengths in enumerate(LENGTHS):
            answers |= told(f"lengths-{i}", of_lengths(lengths, values[f"lengths-{i}/in/claimed_NS"].tolist()))
        for case in PACKS:
            answers |= told(case, {"real_P": real_rows(case)})
        assert_twins("thd", answers | told("context", of_context(values["context/in/order_R"].tolist())))
