"""EXCH: bugs that leave the grad mode of the process otherwise than they found it."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import Expectation, planted

_CHANGED = "rank 0 changed the grad mode, and left it so"


@planted(
    Expectation("EXCH-11", "own-inference-even", "run", _CHANGED),
    Expectation("EXCH-11", "shared-inference-even", "run", _CHANGED),
)
class FinishSwitchesGradientsOn(GradientFinisher):
    """Autograd is off for the sums over replicas and on afterwards, also for a trainer that had switched it off."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        torch.set_grad_enabled(False)
        super().finish(modules)
        torch.set_grad_enabled(True)


@planted(Expectation("EXCH-11", "inference-even", "run", _CHANGED))
class DispatchSwitchesGradientsOn(AllToAllExchange):
    """Autograd is on after every dispatch, also in a forward without gradients."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        dispatched = super().dispatch(x, routing)
        torch.set_grad_enabled(True)
        return dispatched


@planted(Expectation("EXCH-11", "shared-inference-even", "run", _CHANGED))
class LayerSwitchesGradientsOn(Layer):
    """A layer that switches autograd off for a moment switches it on again, whatever it was."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return super().forward(x)
