"""The routers of a model with the loss that the library computes of all their logits, for a causal model to add.

S positions of B sequences, D hidden, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from moe_conformance.backends.fsdp_windows import whole_window
from moe_conformance.backends.shared_batch import SharedBatch
from moe_conformance.backends.transformers.model import model_with, reduction_of, shard
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.router import MODELS, model_config, model_of
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Trained, Unsupported

_WITH_LOSS = ("qwen3_moe", "gpt_oss")  # of those that `model_of` names


def require_trained(config: Config, cp: int) -> None:
    """Refuse losses and layouts that the library does not have.

    Raises:
        Unsupported: it does not.
    """
    losses, model = config.losses, model_of(config)
    others = [name for name in ("sequence", "global_batch", "first_choice", "z") if getattr(losses, name)]
    if others:
        raise Unsupported(f"transformers has no loss {', '.join(others)}: load_balancing_loss_func is the only one")
    if model not in _WITH_LOSS:
        raise Unsupported(f"the model with that router, {model}, has no loss")
    if losses.per_token or losses.recompute:
        raise Unsupported("transformers divides no gradients by tokens here, and recomputes whole layers, not routers")
    if cp > 1:
        raise Unsupported(f"cp = {cp}: transformers knows of no ranks with other positions of the same sequences")


class _Routers(nn.Module):
    """The routers of the layers of a model, under their names in it."""

    def __init__(self, routers: list[nn.Module], config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model_with(router, "mlp.gate", config) for router in routers)
        self.config = config

    def forward(self, *x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [layer(x_SBD) for layer, x_SBD in zip(self.layers, x, strict=True)]


class TrainingRouters:
    """L routers, by FSDP2 over the batches, which reduces in every backward."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build the routers, and let the library shard them."""
        model = model_of(config)
        modelling = import_module(f"transformers.models.{model}.modeling_{model}")
        requested = model_config(model, config)
        requested.router_aux_loss_coef = config.losses.auxiliary
        self._loss_of: Any = modelling.load_balancing_loss_func
        self._config, self._tp = config, placement.topology.group("tp")
        routers = [getattr(modelling, MODELS[model][0])(requested) for _ in range(config.losses.layers)]
        self._model: Any = _Routers(routers, requested).to(placement.device, config.dtype)
        shard(self._model, placement)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the routers, the loss, and what reduces gradients."""
        gate = self._model.layers[0].mlp.gate
        return {
            "router": type(gate).__name__.removeprefix("FSDP"),
            "loss": self._loss_of.__qualname__,
            "reduction": reduction_of(self._model),
        }

    @property
    def claims(self) -> Claims:
        """Fractions are of tokens, for each of the K choices."""
        return Claims(loss_fractions="tokens")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield this rank's part of the weight of every router."""
        for number, layer in enumerate(self._model.layers):
            for window in whole_window("router", layer.mlp.gate.weight, read):
                yield Named(window.name, number, window.view, window.shard)

    def train(self, mode: bool = True) -> None:
        """Switch the model."""
        self._model.train(mode)

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Nothing is kept of a step: the caller scales what is returned."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route the tokens of the batch that tensor ranks share, and compute the loss where the model trains."""
        rows = [x_SBD.reshape(-1, x_SBD.shape[-1]) for x_SBD in x]
        batch = SharedBatch(len(rows[0]), self._tp, rows[0].device) if self._tp.size() > 1 else None
        mask_T = None if padding_mask_T is None else ~padding_mask_T
        if batch is not None:
            rows = [batch.of_all(x_RD) for x_RD in rows]
            mask_T = None if mask_T is None else batch.gather(mask_T.long())
        made = self._model(*rows)
        loss = None
        if self._model.training and torch.is_grad_enabled() and self._config.losses.auxiliary:
            E, K = self._config.experts, self._config.top_k
            loss = self._model.config.router_aux_loss_coef * self._loss_of(
                tuple(logits_TE for logits_TE, _, _ in made), E, K, mask_T
            )
        return Trained(tuple(self._own(routed, batch) for routed in made), loss)

    def _own(self, routed: tuple[Tensor, Tensor, Tensor], batch: SharedBatch | None) -> Routed:
        logits_TE, weights_TK, ids_TK = routed
        if batch is not None:
            logits_TE, weights_TK, ids_TK = batch.take(logits_TE), batch.local_rows(weights_TK), batch.take(ids_TK)
        return Routed(Routing(ids_TK, weights_TK, self._config.experts), logits_TE)

    def finish(self, tokens: int) -> None:
        """Nothing is left to do: FSDP2 has reduced in every backward."""

    def report(self) -> None:
        """Return nothing: the library returns the loss with the output of the model."""
        return None
