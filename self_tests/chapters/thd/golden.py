"""Calls the second oracle of packed sequences as the recipe of its golden calls the first."""

from __future__ import annotations

from self_tests.chapters.token_padding import second
from self_tests.goldens.second_oracles import second_oracle

ORACLE = second_oracle(
    length_multiple=second.divider,
    cumulative=second.running_sums,
    padded_lengths=lambda lengths, multiple: [second.next_multiple(length, multiple) for length in lengths],
    judge_lengths=lambda lengths, real, claimed_S, unit: second.judged_lengths(lengths, real, claimed_S.tolist(), unit),
    real_rows=second.real_rows,
    context_share=second.places_by_cp_rank,
    context_rows=lambda sums_S, cp: second.rows_by_cp_rank(sums_S.tolist(), cp),
    is_partition=lambda shares, rows: second.each_row_once([share.tolist() for share in shares], rows),
)
