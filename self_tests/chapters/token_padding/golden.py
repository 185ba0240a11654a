"""Calls the second oracle of token padding as the recipe of its golden calls the first."""

from __future__ import annotations

from self_tests.chapters.token_padding import second
from self_tests.goldens.second_oracles import second_oracle

ORACLE = second_oracle(
    aligned=lambda count, *, alignment=64: second.next_multiple(count, alignment),
    bounded_count=lambda bound, *, alignment: second.next_multiple(bound, alignment),
    padded_counts=lambda tokens, groups, *, alignment, needs_a_row=False: second.common_counts(
        tokens, groups, alignment, at_least_one=needs_a_row
    ),
    legal_refusals=lambda refused, tokens, groups, bound, *, alignment: second.refusals_are_legal(
        refused, tokens, groups, bound, alignment
    ),
)
