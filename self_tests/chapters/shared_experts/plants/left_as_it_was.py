"""EXCH and GRAD: bugs of whole layers that change what is not theirs: inputs, outputs, and gradients once returned."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.layer import Layer
from self_tests.planted_bugs.plant import Expectation, planted


@planted(Expectation("EXCH-08", "layer-even", "run", "the backend changed its input upstream on rank 0"))
class UpstreamCleared(Layer):
    """The memory of the upstream gradient is cleared as soon as it was read; all gradients are right."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(_read_and_cleared)
        return y


def _read_and_cleared(gradient: Tensor) -> Tensor:
    read = gradient.clone()
    gradient.zero_()
    return read


@planted(Expectation("EXCH-11", "layer-even", "run", "changed", ", and left it so after the step"))
class DrawsForNothing(Layer):
    """A layer without dropout draws its mask all the same."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(x.shape[:-1])
        return super().forward(x)


@planted(
    Expectation("EXCH-32", "shared-in-flight-uneven", "combine", "the output of microbatch 0 on rank 0 was overwritten")
)
class LayerLendsItsOutput(Layer):
    """The output of the next microbatch is written over that of the last one, as into one buffer for all."""

    lent: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.lent is not None:
            n = min(len(y), len(self.lent))
            self.lent.data[:n] = y.data[:n]
        self.lent = y
        return y


@planted(Expectation("GRAD-07", "layer-in-flight-uneven", "gradient", "of x on rank 0, microbatch 0, was overwritten"))
class GradientOfTheLayerRecycled(Layer):
    """The memory of a gradient that was returned is cleared when the next backward begins."""

    latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._clear(x))
        return y

    def _clear(self, x: Tensor) -> None:
        if self.latest is not None and self.latest.grad is not None:
            self.latest.grad.zero_()
        self.latest = x
