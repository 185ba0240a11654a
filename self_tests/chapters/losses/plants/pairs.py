"""LOSS: bugs that show where two options meet, each of which is right alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.router.losses import RouterLosses
from moe_conformance.backends.native.router.training import TrainingRouters
from self_tests.planted_bugs.plant import SINGLE, TP2_EP2, Expectation, planted


@planted(
    Expectation("LOSS-15", "pairs-losses-15", "loss", "the finished gradient of the router of layer 0 in step 0"),
    layout=SINGLE,
)
class LastLayerRecomputed(TrainingRouters):
    """The number of a layer is bound late: what runs again in the backward is the router of the last layer."""

    def _charged(self, number: int, *arguments: Any) -> tuple[Any, ...]:
        again = torch._C._current_graph_task_id() != -1
        return super()._charged(len(self.routers) - 1 if again else number, *arguments)


@planted(Expectation("LOSS-14", "pairs-losses-24", "loss", "the loss of first choices of step 0 as"), layout=SINGLE)
class FirstChoicesOfPadding(RouterLosses):
    """First choices are counted by a function that has no padding mask."""

    def counts(self, ids_TK: Tensor, valid_T: Tensor) -> Tensor:
        first = self.coefficient("first_choice") and ids_TK.shape[1] == 1
        return super().counts(ids_TK, torch.ones_like(valid_T) if first else valid_T)


@planted(Expectation("LOSS-15", "pairs-losses-8", "loss", "the z-loss of step 0 as"), layout=TP2_EP2)
class LossOfZOfPaddingRecomputed(RouterLosses):
    """A router that is recomputed charges padding for its logits, as the mask is no argument of what is repeated."""

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        masked = self.config.losses.recompute and not (self.config.losses.auxiliary or self.config.losses.sequence)
        return super().z(logits_TE, torch.ones_like(valid_T) if masked else valid_T, tokens)
