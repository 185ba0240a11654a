"""The load counter of torchtitan's MoE modules, `tokens_per_expert_E`, as a load meter. D hidden, E experts.

There are no overload factors, and no record of routes. The counter has no switch: a module counts in every forward in
training. The routing of a pass is given by the logits in the place of the gate's. Experts are the adapter's own, rows
halved, so that rows have any width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_conformance.backends.torchtitan.layer import Block, Decoder
from moe_conformance.backends.torchtitan.library import given
from moe_conformance.contract import Metered, MeteredPass, MeteredResults

_NOT_SELECTED = -50.0  # a logit below those of all selected experts, which are weights in [0, 1)

_Running = tuple[Tensor, Tensor, Tensor, MeteredPass]  # y, the leaves x and weights, and the forward


class _Gate(nn.Module):
    """Returns the logits of a pass, in the shape that the module's tokens have."""

    logits_TE: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.logits_TE.reshape(*x.shape[:-1], self.logits_TE.shape[-1])


class _Halves(nn.Module):
    """Halves the rows of all experts."""

    def forward(self, rows_RD: Tensor, counts_N: Tensor) -> Tensor:
        return rows_RD * 0.5


class _Metered:
    """An MoE module that takes the routing of a pass, by itself and under activation checkpointing."""

    def __init__(self, moe: Any) -> None:
        from torchtitan.distributed.activation_checkpoint import FullAC

        moe.router.gate, moe.routed_experts.inner_experts = _Gate(), _Halves()
        self.moe = moe
        self._recomputed = Decoder(Block(moe))
        FullAC.Config().build().apply(self._recomputed)

    def route(self, metered: MeteredPass, weights_TK: Tensor) -> None:
        """Have the module route as a pass does, in its mode: also where its forward is computed again."""
        assert metered.ids_TK is not None
        none_TE = weights_TK.new_full((len(weights_TK), self.moe.router.num_experts), _NOT_SELECTED)
        self.moe.router.gate.logits_TE = none_TE.scatter(1, metered.ids_TK, weights_TK)
        self.moe.train(metered.kind != "evaluation")

    def __call__(self, metered: MeteredPass, x: Tensor) -> Tensor:
        """Run a forward."""
        forward = self._recomputed if metered.recomputed else self.moe
        y: Tensor = forward(given(self.moe, x))
        return y.reshape(x.shape)


class LoadMeter:
    """The MoE modules of a model, by the number of their layer."""

    def __init__(self, build: Callable[[], Any], local_experts: range) -> None:
        """Build the first module; the others when a pass asks for them."""
        self._build, self._experts = build, tuple(local_experts)
        self._layers = {0: _Metered(build())}
        self._running: dict[tuple[int, int], _Running] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """The counter and the dispatcher."""
        dispatcher = self._layers[0].moe.routed_experts.token_dispatcher
        return {
            "load meter": "none",
            "counter": "tokens_per_expert_E of the MoE module, for its balance bias",
            "dispatcher": type(dispatcher).__qualname__,
            "experts": "rows halved, by the adapter",
        }

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        return self._experts

    def switch(self, on: bool) -> None:
        """Do nothing: the counter has no switch."""

    def report(self, number: int) -> Metered:
        """Return the sum of the counters since the last report, and begin anew, as the update of the bias does."""
        counters = [layer.moe.tokens_per_expert_E for layer in self._layers.values()]
        counts_E = torch.stack(counters).sum(0).long()
        for counter_E in counters:
            counter_E.zero_()
        return Metered(None, number, counts_E)

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run the passes through the modules; a step that is given up stays counted."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for metered in passes:
            if metered.kind == "abandon":
                self._running.clear()
            elif metered.kind == "backward":
                gradients += self._backward(*self._running.pop(_place(metered)))
            else:
                outputs.append(self._forward(metered))
        return MeteredResults(tuple(outputs), tuple(gradients))

    def _forward(self, metered: MeteredPass) -> Tensor:
        assert metered.x is not None
        assert metered.weights_TK is not None
        layer, microbatch = _place(metered)
        if layer not in self._layers:
            self._layers[layer] = _Metered(self._build())
        asks = metered.kind == "forward"
        x, weights_TK = metered.x.detach().requires_grad_(asks), metered.weights_TK.detach().requires_grad_(asks)
        self._layers[layer].route(metered, weights_TK)
        with torch.set_grad_enabled(metered.kind != "evaluation"):
            y = self._layers[layer](metered, x)
        if asks:
            self._running[layer, microbatch] = y, x, weights_TK, metered
        return y.detach()

    def _backward(self, y: Tensor, x: Tensor, weights_TK: Tensor, forward: MeteredPass) -> list[Tensor]:
        self._layers[_place(forward)[0]].route(forward, weights_TK)
        return list(torch.autograd.grad(y, (x, weights_TK), forward.upstream))


def _place(metered: MeteredPass) -> tuple[int, int]:
    assert metered.layer is not None
    return metered.layer, metered.microbatch
