"""Calls the second oracle of process groups as the recipe of its golden calls the first."""

from __future__ import annotations

from self_tests.chapters.groups.second import members
from self_tests.chapters.groups.second.members import Sizes
from self_tests.goldens.second_oracles import second_oracle

UNANSWERED = ("not-positive/out/valid_N",)  # it is asked of positive sizes alone


def valid(*sizes: int) -> str | None:
    """None for sizes that make a layout."""
    return None if min(sizes) < 1 or members.valid(Sizes(*sizes)) else "they make no layout"


ORACLE = second_oracle(valid=valid, groups=lambda *sizes: members.groups(Sizes(*sizes)))
