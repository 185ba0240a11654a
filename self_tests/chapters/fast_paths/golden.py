"""Calls the second oracle of shortcuts as the recipe of its golden calls the first."""

from __future__ import annotations

from self_tests.chapters.fast_paths.second import choices, equal_splits
from self_tests.goldens.second_oracles import differentiable, second_oracle

ORACLE = second_oracle(
    choices,
    equal_splits,
    pad=differentiable(equal_splits.pad, lambda g_PD, rows_RD, *how: [equal_splits.pad_backward(g_PD, *how)]),
    compact=differentiable(
        equal_splits.compact, lambda g_RD, rows_PD, *how: [equal_splits.compact_backward(g_RD, *how)]
    ),
)
