"""The gates of a model with their losses, which the library returns for the model to multiply and add.

S positions of B sequences, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.deepspeed.placement import Placement
from moe_conformance.backends.deepspeed.router import Gate
from moe_conformance.backends.shared_batch import SharedBatch
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Trained, Unsupported


def coefficient_of(config: Config, cp: int) -> float:
    """Return the coefficient of the one loss that a gate of so many choices has.

    Raises:
        Unsupported: another is asked for, or what the library has not.
    """
    losses, K = config.losses, config.top_k
    available = {1: ("auxiliary", "first_choice"), 2: ("first_choice",)}.get(K, ("auxiliary",))
    named = ("auxiliary", "sequence", "global_batch", "first_choice", "z")
    requested = [name for name in named if getattr(losses, name)]
    if odd := [name for name in requested if name not in available]:
        raise Unsupported(f"DeepSpeed's gate with top_k = {K} has no loss {', '.join(odd)}")
    if losses.per_token or losses.recompute:
        raise Unsupported("DeepSpeed divides no gradients by tokens, and recomputes whole layers, not their gates")
    if cp > 1:
        raise Unsupported(f"cp = {cp}: DeepSpeed's MoE layer knows of no ranks with other positions of its sequences")
    return float(sum(getattr(losses, name) for name in requested))


class TrainingRouters:
    """The gate of one MoE layer for each layer of the model, all layers in one engine."""

    def __init__(self, engine: Any, gates: Sequence[Gate], coefficient: float, placement: Placement) -> None:
        """Take the gates, and the coefficient of their loss."""
        self.engine, self._gates = engine, gates
        self._coefficient, self._tp = coefficient, placement.topology.group("tp")

    @property
    def resolved(self) -> Mapping[str, str]:
        """The gates."""
        return self._gates[0].resolved

    @property
    def claims(self) -> Claims:
        """What a gate claims; the engine divides by data parallel ranks, and a model by microbatches."""
        return self._gates[0].claims

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight of every gate."""
        for number, gate in enumerate(self._gates):
            for window in gate.named(read):
                yield Named(window.name, number, window.view)

    def train(self, mode: bool = True) -> None:
        """Switch the model."""
        self.engine.train(mode)

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Nothing is kept of a step: the caller scales what is returned."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route, and add up the losses in training, as a model does."""
        made = [self._route(gate, x_SBD, padding_mask_T) for gate, x_SBD in zip(self._gates, x, strict=True)]
        routed, losses = zip(*made, strict=True)
        trains = self.engine.training and torch.is_grad_enabled()
        loss = self._coefficient * torch.stack(losses).sum() if trains and self._coefficient else None
        return Trained(routed, loss)

    def _route(self, gate: Gate, x: Tensor, padding_mask_T: Tensor | None) -> tuple[Routed, Tensor]:
        """Route the tokens of all tensor ranks, as the library does, and return the routing of this rank's tokens."""
        if self._tp.size() == 1:
            return gate.route(x, padding_mask_T)
        x_TD = x.reshape(-1, x.shape[-1])
        batch = SharedBatch(len(x_TD), self._tp, x.device)
        mask_T = None if padding_mask_T is None else batch.gather(padding_mask_T.long()).bool()
        routed, loss = gate.route(batch.of_all(x_TD), mask_T)
        routing = routed.routing
        local_routing = Routing(batch.take(routing.ids_TK), batch.local_rows(routing.weights_TK), routing.experts)
        assert routed.logits_TE is not None  # a gate returns them
        return Routed(local_routing, batch.take(routed.logits_TE)), loss

    def finish(self, tokens: int) -> None:
        """Let the engine reduce gradients over data parallel ranks."""
        del tokens
        self.engine.allreduce_gradients()

    def report(self) -> None:
        """Return nothing: the library reports no loss."""
        return None
