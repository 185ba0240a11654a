"""Calls the second oracle of forcing as the recipe of its golden calls the first."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from self_tests.chapters.capacity.second import limits
from self_tests.chapters.forcing.second import draws, hot, routes
from self_tests.chapters.routing.golden import gate_of
from self_tests.chapters.routing.second.routes import largest_first
from self_tests.goldens.second_oracles import arrays, differentiable, second_oracle, tensors, with_tensors


class LossView(NamedTuple):
    """Logits with the gradient that passes through them, and the counted experts in an order."""

    logits_TE: Any
    ids_TK: Any


logits_of_views = differentiable(
    lambda own_TE, options: [view.logits_TE for view in routes.loss_views(own_TE, **options)],
    lambda upstream, own_TE, options: [np.sum(upstream, axis=0)],  # of each it passes as it is
)


@with_tensors
def loss_views(own_TE: Any, **options: Any) -> list[LossView]:
    """What a loss may see; forced experts are in the order of their slots, others by their logits."""
    views = routes.loss_views(arrays(own_TE), **arrays(options))
    forced_TK = options.get("forced_ids_TK")
    found = []
    for n, (logits_TE, view) in enumerate(zip(logits_of_views(own_TE, options), views, strict=True)):
        if n and forced_TK is not None:
            ids = [[e for e in row if e in chosen] for row, chosen in zip(forced_TK.tolist(), view.chosen, strict=True)]
        else:
            rows = zip(view.logits_TE.tolist(), view.chosen, strict=True)
            ids = [largest_first(row, sorted(chosen), len(chosen)) for row, chosen in rows]
        ids_TK = np.array(ids, dtype=np.int64).reshape(len(own_TE), options["top_k"])
        found.append(LossView(logits_TE, tensors(ids_TK)))
    return found


def gate(ids_TK: Any, how: Any) -> Any:
    """The gate whose weights forced experts get."""
    return gate_of(ids_TK.shape[1], **how)


ORACLE = second_oracle(
    routes,
    hot,
    draws,
    loads=limits.loads,
    forced_weights=differentiable(
        lambda logits_TE, ids_TK, **how: routes.forced_weights(logits_TE, ids_TK, gate(ids_TK, how)),
        lambda g_TK, logits_TE, ids_TK, **how: [
            routes.forced_weights_backward(logits_TE, ids_TK, gate(ids_TK, how), g_TK)
        ],
    ),
    straight_through=differentiable(routes.straight_through, lambda g_TE, own_TE, forced_TE: [g_TE]),
    loss_views=loss_views,
    mean_overload=lambda loads, blocks: float(hot.mean_overload(loads, blocks)),
)
