"""The goldens of padding are what the longhand makes of the stored inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_conformance.goldens.chapters.token_padding import ALIGNMENTS, BOUNDS, GROUPS, REFUSALS, A
from self_tests.chapters.token_padding import second as packing
from self_tests.goldens.golden_twins import assert_twins, stored, told


def of_counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Counts rounded up, and those of a configured bound, which are the same."""
    counts = values["counts/in/counts_N"].tolist()
    aligned = [[packing.next_multiple(count, unit) for count in counts] for unit in ALIGNMENTS]
    by_default = [packing.next_multiple(count, 64) for count in counts]
    return told("counts", {"aligned_AN": aligned, "bounded_AN": aligned, "by-default_N": by_default})


def of_groups(tokens: Sequence[int], groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the ranks of each group pad to, and may refuse."""
    return {
        "padded_W": packing.common_counts(tokens, groups, A),
        "with-a-row_W": packing.common_counts(tokens, groups, A, at_least_one=True),
        "legal_BRG": [
            [packing.refusals_are_legal(refused, tokens, groups, bound, A) for refused in REFUSALS] for bound in BOUNDS
        ],
    }


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored count and verdict."""
        values = stored("token_padding")
        answers = of_counts(values)
        for case, groups in GROUPS.items():
            answers |= told(case, of_groups(values[f"{case}/in/tokens_W"].tolist(), groups))
        assert_twins("token_padding", answers)
