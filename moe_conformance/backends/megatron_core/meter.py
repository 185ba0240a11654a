"""The tracker of overload factors, attached to MoE layers whose router is replaced by a given routing. D hidden.

Only the branch `dev` has it. Its training loop does not call the report: the caller of the library has to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.contract import Metered, MeteredPass, MeteredResults, Routing

_Running = tuple[Tensor, tuple[Tensor, Tensor], MeteredPass]  # y, the leaves that ask for gradients, and the forward


class _Writer:
    """Takes what a TensorBoard writer takes."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.steps: set[int] = set()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name] = value
        self.steps.add(step)


class LoadMeter:
    """MoE layers of a model, by number, and the tracker in which they record."""

    def __init__(self, build: Callable[[int], Any]) -> None:
        """Build the first layer; the others when a pass asks for them.

        The library has one tracker for a process. A process with two models has to set that of the model at work.
        """
        self._tracker = library.moe_logging.MoEOverloadFactorTracker()
        self._build, self._layers, self._on = build, dict[int, Any](), True
        self._running: dict[tuple[int, int], _Running] = {}
        self._use()
        self._layer(0)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The tracker and the dispatcher."""
        return {
            "load meter": type(self._tracker).__qualname__,
            "dispatcher": type(self._layers[0].token_dispatcher).__qualname__,
            "capacity factor": str(self._layers[0].config.moe_expert_capacity_factor),
            "shims": "; ".join(library.SHIMS) or "none",
        }

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        return tuple(self._layers[0].local_expert_indices)

    def switch(self, on: bool) -> None:
        """Set the option of all layers."""
        self._on = on
        for layer in self._layers.values():
            layer.config.log_moe_overload_factor = on

    def report(self, number: int) -> Metered:
        """Let the tracker report to a writer, with values of layers; a caller asks only where the option is set."""
        self._use()
        writer = _Writer()
        if self._on:
            self._tracker.report(iteration=number, writer=writer, per_layer_logging=True)
        return Metered(writer.values, next(iter(writer.steps), number))

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run the passes through the layers; a step is given up by the tracker's own `clear`."""
        self._use()
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for metered in passes:
            if metered.kind == "abandon":
                self._running.clear()
                self._tracker.clear()
            elif metered.kind == "backward":
                gradients += self._backward(*self._running.pop(_place(metered)))
            else:
                outputs.append(self._forward(metered))
        return MeteredResults(tuple(outputs), tuple(gradients))

    def _use(self) -> None:
        library.moe_logging.set_moe_overload_factor_tracker(self._tracker)

    def _layer(self, number: int) -> Any:
        if number not in self._layers:
            layer = self._build(number + 1)  # the library counts from 1
            layer.config.log_moe_overload_factor = self._on
            for parameter in layer.experts.parameters():
                torch.nn.init.constant_(parameter, 0.5)
            self._layers[number] = layer
        return self._layers[number]

    def _forward(self, metered: MeteredPass) -> Tensor:
        assert metered.x is not None
        assert metered.weights_TK is not None
        asks = metered.kind == "forward"
        leaves = (metered.x.detach().requires_grad_(asks), metered.weights_TK.detach().requires_grad_(asks))
        layer = self._routed(metered, leaves[1])
        layer.train(metered.kind != "evaluation")
        layer.moe_layer_recompute = metered.recomputed  # what recompute_modules=["moe"] sets
        with torch.set_grad_enabled(metered.kind != "evaluation"):
            x = leaves[0] if leaves[0].dim() == 3 else leaves[0].unsqueeze(1)
            y: Tensor = layer(x)[0].reshape(metered.x.shape)
        if asks:
            self._running[_place(metered)] = y, leaves, metered
        return y.detach()

    def _backward(self, y: Tensor, leaves: tuple[Tensor, Tensor], forward: MeteredPass) -> list[Tensor]:
        self._routed(forward, leaves[1])  # if the forward is repeated, it routes as before
        torch.autograd.backward(y, forward.upstream)
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def _routed(self, metered: MeteredPass, weights_TK: Tensor) -> Any:
        """Return the layer of a pass, with the given routing in the place of its router's."""
        assert metered.ids_TK is not None
        layer = self._layer(_place(metered)[0])
        routing = Routing(metered.ids_TK, weights_TK, layer.config.num_moe_experts)
        layer.route = lambda *_: routing.dense()  # weights, map
        return layer


def _place(metered: MeteredPass) -> tuple[int, int]:
    assert metered.layer is not None
    return metered.layer, metered.microbatch
