"""A routing as a map (T, E), and back to K slots per token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_conformance.backends.native.offered import Offered
from moe_conformance.contract import Config, Dense, Routing


class RoutingForms(Offered):
    """Writes the filled slots into a table, and reads the set places of a table in the order of experts.

    Implements: ROUTE-21.
    """

    surface = "routing_forms"

    def __init__(self, config: Config) -> None:
        """Take the number of slots that an indexed form has at least."""
        self.top_k = config.top_k

    @property
    def resolved(self) -> Mapping[str, str]:
        """How empty slots are marked."""
        return {"empty slots": "-1"}

    def to_dense(self, routing: Routing) -> Dense:
        """Return weights and map; an expert that a token has twice is refused.

        Raises:
            ValueError: a token has an expert twice.
        """
        token_P, slot_P = self._filled(routing.ids_TK)
        at_P = token_P, routing.ids_TK[token_P, slot_P]
        count_TE = torch.zeros(len(routing.ids_TK), routing.experts, dtype=torch.int64, device=token_P.device)
        count_TE = count_TE.index_put(at_P, torch.ones_like(token_P), accumulate=True)
        if bool((count_TE > 1).any()):
            raise ValueError(f"token {int((count_TE > 1).any(1).nonzero()[0])} has an expert twice")
        weights_TE = routing.weights_TK.new_zeros(count_TE.shape)
        return Dense(weights_TE.index_put(at_P, routing.weights_TK[token_P, slot_P]), count_TE > 0)

    def to_indices(self, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        """Return as many slots as the fullest token needs, K at least."""
        T, E = map_TE.shape
        K = max(self.top_k, int(map_TE.sum(1).max()) if T else 0)
        token_P, expert_P = map_TE.nonzero(as_tuple=True)
        slot_P = map_TE.cumsum(1)[token_P, expert_P] - 1
        ids_TK = torch.full((T, K), -1, device=map_TE.device).index_put((token_P, slot_P), expert_P)
        weights_TK = weights_TE.new_zeros(T, K).index_put((token_P, slot_P), weights_TE[token_P, expert_P])
        return Routing(ids_TK, weights_TK, E)

    def _filled(self, ids_TK: Tensor) -> tuple[Tensor, ...]:
        """Return tokens and slots of what is not empty."""
        return (ids_TK >= 0).nonzero(as_tuple=True)
