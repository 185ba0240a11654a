"""Calls the second oracle of capacity as the recipe of its golden calls the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from self_tests.chapters.capacity.second import drops, limits, receive_budget
from self_tests.chapters.exchange.golden import deliveries
from self_tests.goldens.second_oracles import arrays, differentiable, second_oracle, tensors, with_tensors

weights_after_drop = differentiable(
    lambda ids_TK, weights_TK, kept_TK, **how: drops.after_drop(ids_TK, weights_TK, kept_TK, **how)[1],
    lambda g_TK, ids_TK, weights_TK, kept_TK, **how: [drops.after_drop_backward(weights_TK, kept_TK, g_TK, **how)],
)


@with_tensors
def after_drop(ids_TK: Any, weights_TK: Any, kept_TK: Any, **how: Any) -> SimpleNamespace:
    """Ids, and weights with their gradient."""
    new_ids_TK, _ = drops.after_drop(*arrays((ids_TK, weights_TK, kept_TK)), **how)
    return SimpleNamespace(
        ids_TK=tensors(new_ids_TK), weights_TK=weights_after_drop(ids_TK, weights_TK, kept_TK, **how)
    )


ORACLE = second_oracle(limits, drops, receive_budget, deliveries=deliveries, after_drop=after_drop)
