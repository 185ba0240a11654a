"""Calls the second oracle of orders as the recipe of its golden calls the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from self_tests.chapters.permute import second
from self_tests.chapters.permute.second import Row
from self_tests.goldens.second_oracles import differentiable, second_oracle


class Rows(NamedTuple):
    """The columns of rows, an array each."""

    source: Any
    token: Any
    slot: Any
    expert: Any


def expert_major(ids_by_rank: Sequence[Any], experts: Sequence[int], *, multiple: int = 1, **how: bool) -> Rows:
    """The rows of a rank's experts."""
    rows = second.segments(ids_by_rank, experts, multiple, **how)
    return Rows(*(np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in Rows._fields))


def in_order(rows: Rows) -> dict[int, bool]:
    """Whether the rows of each expert are in order."""
    columns = (rows.expert, rows.source, rows.token, rows.slot)
    return second.ascending([Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)])


def reordered(values_TK: Any, order_T: Any, slots_TK: Any = None) -> Any:
    """Tokens in another order, and their slots too if orders of these are given."""
    if slots_TK is None:
        rows = second.tokens_in_order(values_TK.tolist(), order_T.tolist())
    else:
        rows = second.slots_in_order(values_TK.tolist(), order_T.tolist(), slots_TK.tolist())
    return np.reshape(np.array(rows, dtype=values_TK.dtype), values_TK.shape)


def reordered_backward(g_TK: Any, values_TK: Any, order_T: Any, slots_TK: Any = None) -> list[Any]:
    """Upstream gradients go to the places that their values came from."""
    T, K = values_TK.shape
    places = np.arange(T * K).reshape(T, K)
    came_from = reordered(places, order_T, slots_TK)
    gradient_TK = np.zeros((T, K))
    for g, place in zip(g_TK.flat, came_from.flat, strict=True):
        gradient_TK[divmod(int(place), K)] = g
    return [gradient_TK]


def by(carry: Any) -> Any:
    """Carry rows, given as an array, by expert or by source."""
    return lambda rows_RD, counts_WN: np.reshape(carry(rows_RD.tolist(), counts_WN), rows_RD.shape)


ORACLE = second_oracle(
    legal_counts=second.counts_are_legal,
    segment_starts=second.starts,
    padding_rows=second.is_padding,
    Rows=Rows,
    expert_major=expert_major,
    in_order=in_order,
    reorder_tokens=differentiable(reordered, reordered_backward),
    reorder_slots=differentiable(reordered, reordered_backward),
    relabel=lambda ids_TK, new_E: np.reshape(
        np.array(second.renamed(ids_TK.tolist(), new_E.tolist()), dtype=np.int64), ids_TK.shape
    ),
    relabel_parameters=lambda parameters, new_E: second.renamed_parameters(parameters, new_E.tolist()),
    gather=differentiable(
        second.gathered,
        lambda g_RD, x_TD, index_R: [second.gathered_backward(len(x_TD), index_R, g_RD)],
    ),
    scatter=differentiable(
        second.scattered,
        lambda g_TD, out_RD, index_R, weights_R, T: [*second.scattered_backward(out_RD, index_R, weights_R, g_TD)],
    ),
    reorder_positions=second.positions,
    to_expert_major=differentiable(
        by(second.by_expert), lambda g_RD, rows_RD, counts_WN: [by(second.by_source)(g_RD, counts_WN)]
    ),
    to_source_major=differentiable(
        by(second.by_source), lambda g_RD, rows_RD, counts_WN: [by(second.by_expert)(g_RD, counts_WN)]
    ),
)
