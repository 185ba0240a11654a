"""GRAD, DROP: whole layers of the K and the scores of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.contract import Config, Delivery, Routing
from self_tests.planted_bugs.plant import Expectation, planted


@planted(Expectation("GRAD-18", "layer-top-1-uneven", "combine", "y"), real="Llama-4 applies the weight to the input")
class OneSlotUnweighted(Layer):
    """With one slot the weight is left to the experts, which do not apply it."""

    def _dispatched(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.config.top_k == 1:
            routing = Routing(routing.ids_TK, torch.ones_like(routing.weights_TK), routing.experts)
        return super()._dispatched(x, routing)


@planted(Expectation("GRAD-18", "layer-top-5-softmax-topk-uneven", "combine", "y"))
class SoftmaxOfAllInLayers(Layer):
    """The router of a whole layer takes the softmax of all logits where that of the selected ones is asked for."""

    def __init__(self, config: Config, *parts: Any) -> None:
        super().__init__(config, *parts)
        if config.routing.score == "softmax_topk":
            self.router.config = config.changed({"routing.score": "softmax"})


@planted(Expectation("GRAD-18", "layer-top-6-sqrtsoftplus-uneven", "combine", "y"))
class SixSlotsNormalisedByFour(Layer):
    """The weights of a token are divided by the sum of the first four."""

    def _dispatched(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        weights_TK = routing.weights_TK
        if self.config.routing.normalise:
            weights_TK = weights_TK / weights_TK[:, :4].sum(1, keepdim=True) * self.config.routing.scale
        return super()._dispatched(x, Routing(routing.ids_TK, weights_TK, routing.experts))


@planted(Expectation("GRAD-18", "layer-top-3-normalised-uneven-float16", "combine", "y"))
class NoRoomInFloat16(Layer):
    """The routed part is scaled by 2^16 and back, for which float16 has no room."""

    def _routed(self, delivery: Delivery, handle: Any) -> Tensor:
        return super()._routed(delivery, handle) * 2.0**16 * 2.0**-16


@planted(Expectation("DROP-10", "dropping-bare-uneven", "combine", "token"))
class DroppedTokensPassThrough(Layer):
    """Without shared experts the output for a token that lost all its slots is the token."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        lost = (y == 0).all(-1, keepdim=True)
        return torch.where(lost, x, y) if self.shared is None else y
