"""The routers of a model with their losses, as schedules and trainer of Megatron-Core drive them. D hidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.backends.megatron_core.surfaces import Router
from moe_conformance.contract import Claims, Config, Losses, Named, Read, Trained, Unsupported

# By option of `Config.losses`: what the router's load balancing type is called, and its report.
_TYPES = {"auxiliary": "aux_loss", "sequence": "seq_aux_loss", "global_batch": "global_aux_loss"}
_REPORTS = {
    "load_balancing_loss": "auxiliary",
    "seq_load_balancing_loss": "sequence",
    "global_load_balancing_loss": "global_batch",
    "z_loss": "z",
}


def with_losses(config: Config) -> Config:
    """Return the config of every layer, with the fields of TransformerConfig that enable losses.

    Raises:
        Unsupported: Megatron-Core has no such loss.
    """
    losses = config.losses
    if losses.first_choice:
        raise Unsupported("Megatron-Core 0.16 has no loss of first choices")
    requested = {_TYPES[name]: getattr(losses, name) for name in _TYPES if getattr(losses, name)}
    extra: list[tuple[str, Any]] = [("num_layers", losses.layers + losses.dense_layers)]
    extra.append(("calculate_per_token_loss", losses.per_token))
    if requested:
        extra += [("moe_router_load_balancing_type", list(requested)), ("moe_aux_loss_coeff", list(requested.values()))]
    if losses.z:
        extra.append(("moe_z_loss_coeff", losses.z))
    return replace(config, extra=(*config.extra, *extra), losses=Losses())


class TrainingRouters:
    """One TopKRouter for each layer, each wrapped for the reduction of its gradients."""

    def __init__(self, layers: Sequence[Any], losses: Losses, cp: int) -> None:
        """Take the layers, whose numbers begin after the dense ones."""
        self._config, self._losses, self._cp = layers[0].config, losses, cp
        self._routers = [Router(layer, recomputed=losses.recompute) for layer in layers]
        self._microbatches = 1

    @property
    def resolved(self) -> Mapping[str, str]:
        """The routers, and their losses by the library's own names."""
        types = self._config.moe_router_load_balancing_type
        return {**self._routers[0].resolved, "load balancing": str(types)}

    @property
    def claims(self) -> Claims:
        """The tracker keeps the z-loss of a rank's tokens, and reduces all other losses."""
        return Claims(reported_z="own")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight of every router, and its expert bias if there is one."""
        for number, router in enumerate(self._routers):
            for window in router.named(read):
                yield Named(window.name, number, window.view)

    def train(self, mode: bool = True) -> None:
        """Switch the modules."""
        for router in self._routers:
            router.chunk.train(mode)

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Zero the gradient buffers, and let the schedule set the scale of losses."""
        self._microbatches = microbatches
        for router in self._routers:
            router.chunk.zero_grad_buffer()
        self._config.grad_scale_func = lambda loss: loss * scale
        library.schedules.forward_step_calc_loss(
            model=None,
            output_tensor=torch.zeros(1),
            loss_func=None,
            config=self._config,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=microbatches,
            forward_data_store=[],
            cp_group_size=self._cp,
            is_last_stage=True,
        )

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route; the losses are attached to the routing weights, and the z-loss to the logits."""
        pairs = zip(self._routers, x, strict=True)
        return Trained(tuple(router(x_SBD, padding_mask_T) for router, x_SBD in pairs))

    def finish(self, tokens: int) -> None:
        """Reduce gradients; a trainer passes the number of tokens where gradients are divided by it."""
        number = torch.tensor(tokens, dtype=torch.int) if self._losses.per_token else None
        library.finalize_model_grads([router.chunk for router in self._routers], number)

    def report(self) -> Mapping[str, Tensor]:
        """Let the tracker reduce, average and clear its losses."""
        found: dict[str, Tensor] = {}
        dense, layers = self._losses.dense_layers, self._losses.layers
        library.moe_utils.track_moe_metrics(
            1 / self._microbatches,
            iteration=0,
            total_loss_dict=found,
            num_layers=dense + layers,
            moe_layer_freq=[0] * dense + [1] * layers,
        )
        return {_REPORTS[name]: value for name, value in found.items()}
