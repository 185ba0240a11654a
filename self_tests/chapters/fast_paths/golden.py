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
    uneven_exchange=differentiable(
        equal_splits.uneven_exchange,
        lambda received, rows, splits_WW: equal_splits.uneven_exchange_backward(received, splits_WW),
    ),
    equal_exchange=differentiable(
        equal_splits.equal_exchange,
        lambda received, rows, splits_WW, split: equal_splits.uneven_exchange_backward(received, splits_WW),
    ),
    as_batch=differentiable(choices.as_batch, lambda g_NnD, *_: [choices.as_batch_backward(g_NnD)]),
    round_robin_rows=differentiable(
        choices.round_robin_rows,
        lambda g_RD, x_TD, rank, **sizes: [choices.round_robin_rows_backward(len(x_TD), g_RD, rank, **sizes)],
    ),
)
