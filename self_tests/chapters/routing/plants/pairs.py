"""ROUTE and DROP: bugs of routers that show where two options meet, each of which is right alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.router.routing import Router
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted


@planted(Expectation("ROUTE-08", "pairs-router-33", "gradient", "the gradient of router on rank 0"), layout=SINGLE)
class TiesTurnedWhereRecomputed(Router):
    """Of equal scores another expert is selected where a forward runs again."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            return super()._select(scores_TE)
        return scores_TE.shape[1] - 1 - super()._select(scores_TE.flip(1))


@planted(
    Expectation("DROP-09", "pairs-layer-20", "combine", "rank 0 token 0 of microbatch 1 kept 1 of 2 slots"), layout=EP2
)
class NothingDroppedInEvaluation(Router):
    """Where no gradient is recorded, slots are not dropped by weight, which took a sort."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        kept_TK = super()._keep(ids_TK, weights_TK, room)
        alone = not torch.is_grad_enabled() and self.config.capacity.drop_policy == "weights"
        return ids_TK >= 0 if alone else kept_TK
