"""ROUTE: bugs of routers that compute in a wider dtype than their tokens have."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.router.routing import Router
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


@planted(
    Expectation("ROUTE-11", "route-wide-float64", "route", "the weights", "computed with the precision of float32")
)
class ScoresInFloat32(Router):
    """The gate multiplies in float64, as it is asked to, and the scores are always computed in float32."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return super()._scores(logits_TE.float()).to(self.wide)


@planted(
    Expectation("ROUTE-11", "layer-wide-router-even-bfloat16", "combine", "y of rank 0 is torch.float32"), layout=SINGLE
)
class WideBehindTheRouter(Layer):
    """Rows are multiplied by weights of the router's dtype, and stay in that."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.config.router_dtype is None else y.to(torch.promote_types(y.dtype, self.config.router_dtype))
