"""The goldens of process groups are what the longhand decodes from the stored sizes, one rank after the other."""

from __future__ import annotations

from moe_conformance.goldens.chapters.groups import LAYOUTS, NAMES
from self_tests.chapters.groups.second.members import Sizes, groups, valid
from self_tests.goldens.golden_twins import assert_twins, stored, told


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored group and validity; the longhand is asked of positive sizes alone."""
        values = stored("groups")
        answers = told("sizes", {"valid_N": [valid(Sizes(*sizes)) for sizes in values["sizes/in/sizes_N6"].tolist()]})
        for case in LAYOUTS:
            made = groups(Sizes(*values[f"{case}/in/sizes_6"].tolist()))
            ranks = [[rank for group in made[name] for rank in group] for name in NAMES]
            answers |= told(case, {"ranks_GW": ranks, "group-size_G": [len(made[name][0]) for name in NAMES]})
        assert_twins("groups", answers, unanswered=["not-positive/out/valid_N"])
