"""The counts and records of a step's load: overload factors, tokens per expert, recorded routes. D hidden, E experts.

Only the branch `dev` has overload factors. Its training loop does not call the report: its caller has to.
All versions count tokens per expert for the balance bias, and record routes for a replay: both in the router, which is
given logits that lead to the routing of a pass. Where a pass has empty slots or no tokens, the routing is put into the
place of the router's, and nothing is known of its counter and record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import differences, library
from moe_conformance.contract import Metered, MeteredPass, MeteredResults, Routing

_NOT_SELECTED = -50.0  # a logit below those of all selected experts, which are weights in [0, 1)

# Of TransformerConfig: the counter needs the bias, and the bias the sigmoid.
OPTIONS = (
    ("moe_router_score_function", "sigmoid"),
    ("moe_router_enable_expert_bias", True),
    ("moe_enable_routing_replay", True),
)

_Running = tuple[Tensor, tuple[Tensor, Tensor], MeteredPass]  # y, the leaves that ask for gradients, and the forward


def has_factors() -> bool:
    """Whether this version has a tracker of overload factors."""
    return differences.has_field("log_moe_overload_factor")


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
        self._tracker = library.moe_logging.MoEOverloadFactorTracker() if has_factors() else None
        self._build, self._layers, self._on = build, dict[int, Any](), True
        self._running: dict[tuple[int, int], _Running] = {}
        self._trace: dict[tuple[int, int], Tensor] | None = {}  # None: a pass went around the router
        self._use()
        self._layer(0)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The tracker and the dispatcher."""
        return {
            "load meter": type(self._tracker).__qualname__ if self._tracker is not None else "none",
            "counter": "local_tokens_per_expert of the router, for its balance bias",
            "trace": "RouterReplay",
            "dispatcher": type(self._layers[0].token_dispatcher).__qualname__,
            "capacity factor": str(self._layers[0].config.moe_expert_capacity_factor),
            "shims": "; ".join(library.SHIMS) or "none",
        }

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        return tuple(self._layers[0].local_expert_indices)

    def switch(self, on: bool) -> None:
        """Set the options of all layers: what MoELayer and TopKRouter ask in every forward."""
        self._on = on
        for layer in self._layers.values():
            self._set(layer)

    def _set(self, layer: Any) -> None:
        layer.router.enable_expert_bias = self._on
        if self._tracker is not None:
            layer.config.log_moe_overload_factor = self._on

    def report(self, number: int) -> Metered:
        """Let the tracker report to a writer, with values of layers; a caller asks only where the option is set."""
        self._use()
        writer = _Writer()
        if self._on and self._tracker is not None:
            self._tracker.report(iteration=number, writer=writer, per_layer_logging=True)
        values = None if self._tracker is None else writer.values
        return Metered(values, next(iter(writer.steps), number), *self._routed_of_step())

    def _routed_of_step(self) -> tuple[Tensor | None, Mapping[tuple[int, int], Tensor] | None]:
        """Return the counter and the records since the last report, and begin anew, as `finalize_model_grads` does."""
        counters = [layer.router.local_tokens_per_expert for layer in self._layers.values()]
        counts_E, trace, self._trace = torch.stack(counters).sum(0).long(), self._trace, {}
        for counter_E in counters:
            counter_E.zero_()
        return (counts_E, trace) if trace is not None else (None, None)

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run the passes through the layers; a step is given up by the tracker's own `clear`."""
        self._use()
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for metered in passes:
            if metered.kind == "abandon":
                self._running.clear()
                self._trace = None  # the router's counter has no way to forget
                if self._tracker is not None:
                    self._tracker.clear()
            elif metered.kind == "backward":
                gradients += self._backward(*self._running.pop(_place(metered)))
            else:
                outputs.append(self._forward(metered))
        return MeteredResults(tuple(outputs), tuple(gradients))

    def _use(self) -> None:
        if self._tracker is not None:
            library.moe_logging.set_moe_overload_factor_tracker(self._tracker)

    def _layer(self, number: int) -> Any:
        if number not in self._layers:
            layer = self._build(number + 1)  # the library counts from 1
            self._set(layer)
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
            if self._on:
                layer.router.router_replay.set_router_replay_action(library.RouterReplayAction.RECORD)
            y: Tensor = layer(x)[0].reshape(metered.x.shape)
            layer.router.router_replay.clear_router_replay_action()
        if self._on and self._trace is not None:
            self._trace[_place(metered)] = layer.router.router_replay.recorded_topk_idx.clone()
        if asks:
            self._running[_place(metered)] = y, leaves, metered
        return y.detach()

    def _backward(self, y: Tensor, leaves: tuple[Tensor, Tensor], forward: MeteredPass) -> list[Tensor]:
        self._routed(
            forward, leaves[1]
        ).train()  # if the forward is repeated, it routes as before, also after evaluation
        torch.autograd.backward(y, forward.upstream)
        if any(leaf.grad is None for leaf in leaves):
            raise RuntimeError("a backward gave no gradient of the hidden states, or of the weights")
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def _routed(self, metered: MeteredPass, weights_TK: Tensor) -> Any:
        """Return the layer of a pass, with the given routing in the place of its router's logits, or of its routing."""
        ids_TK = metered.ids_TK
        assert ids_TK is not None
        layer = self._layer(_place(metered)[0])
        experts = layer.config.num_moe_experts
        vars(layer).pop("route", None)
        if len(ids_TK) and bool((ids_TK >= 0).all()):
            logits_TE = weights_TK.new_full((len(ids_TK), experts), _NOT_SELECTED).scatter(1, ids_TK, weights_TK)
            layer.router.gating = lambda x: logits_TE.reshape(*x.shape[:-1], experts)
        else:
            routing, self._trace = Routing(ids_TK, weights_TK, experts), None
            layer.route = lambda *_: routing.dense()  # weights, map
        return layer


def _place(metered: MeteredPass) -> tuple[int, int]:
    assert metered.layer is not None
    return metered.layer, metered.microbatch
