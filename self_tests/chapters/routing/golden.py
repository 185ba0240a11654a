"""Calls the second oracle of routing as the recipe of its golden calls the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from self_tests.chapters.routing.second import routes
from self_tests.chapters.routing.second.routes import Gate, Limit
from self_tests.goldens.second_oracles import arrays, differentiable, second_oracle, tensors, with_tensors


def limit_of(groups: tuple[int, int] | None, group_score: Any = "top2_sum") -> Limit | None:
    """The limit of groups, if there is one."""
    return None if groups is None else Limit(*groups, group_score)


def gate_of(
    top_k: int,
    *,
    score: Any,
    bias_E: Any = None,
    groups: tuple[int, int] | None = None,
    group_score: Any = "top2_sum",
    **how: Any,
) -> Gate:
    """The gate of a router with these settings."""
    bias = None if bias_E is None else tuple(bias_E.tolist())
    return Gate(top_k, score, bias, limit_of(groups, group_score), **how)


weights_of_routes = differentiable(
    lambda logits_TE, ids_TK, gate: routes.route(logits_TE, gate)[1],
    lambda g_TK, logits_TE, ids_TK, gate: [routes.gradient(logits_TE, ids_TK, gate, g_TK)],
)


@with_tensors
def route(logits_TE: Any, *, top_k: int, **settings: Any) -> SimpleNamespace:
    """Ids, and weights with their gradient."""
    gate = gate_of(top_k, **settings)
    ids_TK, _ = tensors(routes.route(arrays(logits_TE), gate))
    return SimpleNamespace(ids_TK=ids_TK, weights_TK=weights_of_routes(logits_TE, ids_TK, gate))


def margins(logits_TE: Any, ids_TK: Any, *, top_k: int, **settings: Any) -> Any:
    """The margin of every token, of the second oracle's choice if none is given."""
    gate = gate_of(top_k, **settings)
    ids_TK = routes.route(logits_TE, gate)[0] if ids_TK is None else ids_TK
    choices = [routes.choice_values(row, gate) for row in logits_TE.tolist()]
    chosen = zip(choices, ids_TK.tolist(), strict=True)
    return np.array([routes.margin_of_token(values, ids, gate.limit) for values, ids in chosen])


ORACLE = second_oracle(route=route, margins=margins)
