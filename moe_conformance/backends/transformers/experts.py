"""Experts of a model, sharded by the library: whole experts over ep, their replicas by FSDP2 over edp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from moe_conformance.backends.fsdp_windows import local
from moe_conformance.backends.transformers.model import model_with, reduction_of, shard
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.router import ONE_HEAD
from moe_conformance.contract import Activation, Config, Delivery, Named, Read, Unsupported

GROUPED = "grouped_mm of torch"  # for which the library has products in a loop
_PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_FUNCTIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "squared_relu": "relu2",
}  # fmt: skip
_GPT_OSS = Activation(limit=7.0, slope=1.702, offset=1.0)  # limit and slope are options, the offset is none


class ShardedExperts:
    """Qwen3-MoE's experts, or those of GPT-OSS, which have biases.

    Every backward reduces, as the library's training does without further settings.
    """

    def __init__(self, config: Config, placement: Placement, implementation: str, *, grouped: bool = True) -> None:
        """Build all E experts, keep this rank's N, and let the library shard these over their replicas.

        Without `grouped` they run as with a torch that has no grouped product.
        """
        self._grouped = grouped
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard

        built, model_config = _built(config)
        model_config._experts_implementation = implementation
        module: Any = built(model_config).to(placement.device, config.dtype)
        self._module, self._placement = module, placement
        mesh = placement.expert_mesh
        self._style, self._ep_mesh = EpDispatchExpertsParallel(), mesh["ep"]
        for name in [name for name in _PARAMETERS if hasattr(module, name)] if mesh["ep"].size() > 1 else ():
            MoEParamShard(Shard(0), shards_expert_dim=True).shard_param(module, name, self._ep_mesh)
        self._experts_forward = module.forward
        module.forward = self._on_local_parameters
        self._model = model_with(module, "layers.0.mlp.experts", model_config)
        shard(self._model, placement)

    def _on_local_parameters(self, *given: Tensor) -> Tensor:
        with self._style.context_around_forward(self._module, self._ep_mesh), self._torch():
            out: Tensor = self._experts_forward(*given)
        return out

    def _torch(self) -> AbstractContextManager[object]:
        """Return a context in which the library finds a grouped product in torch, or none."""
        from transformers.integrations import moe

        return nullcontext() if self._grouped else patch.object(moe, "_can_use_grouped_mm", lambda *_: False)

    def _optional(self) -> str:
        """Return what the library's own test says of the grouped product, where it is asked for."""
        from transformers.integrations import moe

        weight = local(self._module.gate_up_proj)
        with self._torch():
            found = self._module.config._experts_implementation == "grouped_mm" and moe._can_use_grouped_mm(
                weight[0], weight, torch.zeros(1)
            )
        return GROUPED if found else "none"

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, how it multiplies, how its parameters are placed, and what reduces gradients."""
        weight = self._module.gate_up_proj
        return {
            "experts": type(self._module).__name__.removeprefix("FSDP"),
            "experts implementation": self._module.config._experts_implementation,
            "optional": self._optional(),
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
            "reduction": reduction_of(self._model),
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the weighted output; N stands for another rank's expert, as the implementations write it."""
        ids_RJ = torch.where(delivery.ids_RJ < 0, self._placement.held, delivery.ids_RJ)
        out_RD: Tensor = self._model(delivery.rows_RD, ids_RJ, delivery.weights_RJ)
        return out_RD

    @property
    def module(self) -> nn.Module:
        """The model of one module, which holds the parameters."""
        model: nn.Module = self._model
        return model

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the three matrices of every expert in this rank's shard, and its biases."""
        windows = gpt_oss_windows if hasattr(self._module, "down_proj_bias") else expert_windows
        return windows(self._module, self._placement, read)


def _built(config: Config) -> tuple[Any, Any]:
    """Return the class of experts for the config, and the config of its model."""
    if config.expert_biases == "none":
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        activation = config.activation
        if activation != Activation(activation.function):
            raise Unsupported(f"Qwen3-MoE's experts are gated and cut nothing: not {activation}")
        return Qwen3MoeExperts, Qwen3MoeConfig(
            hidden_size=config.hidden,
            moe_intermediate_size=config.ffn,
            num_experts=config.experts,
            hidden_act=_FUNCTIONS[activation.function],
            **ONE_HEAD,
        )
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if config.expert_biases != "all" or config.activation != _GPT_OSS:
        raise Unsupported(f"experts with biases are adapted from GPT-OSS: not {config.activation}")
    return GptOssExperts, GptOssConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_local_experts=config.experts,
        **ONE_HEAD,
    )


def gpt_oss_windows(module: Any, placement: Placement, read: Read) -> Iterator[Named]:
    """Yield the windows on the experts of this rank's shard: (D, 2 F) with gate and up in turn, and (F, D)."""
    first = _first(placement)
    for n, gate_up in enumerate(read(local(module.gate_up_proj))):
        yield Named("gate", first + n, gate_up[:, ::2].T)
        yield Named("up", first + n, gate_up[:, 1::2].T)
    for n, gate_up in enumerate(read(local(module.gate_up_proj_bias))):
        yield Named("bias_gate", first + n, gate_up[::2])
        yield Named("bias_up", first + n, gate_up[1::2])
    for n, down in enumerate(read(local(module.down_proj))):
        yield Named("down", first + n, down.T)
    for n, bias in enumerate(read(local(module.down_proj_bias))):
        yield Named("bias", first + n, bias)


def _first(placement: Placement) -> int:
    """Return the first expert of this rank's shard: of its N experts FSDP2 keeps one chunk per replica."""
    edp = placement.topology.ranks("edp")
    chunk = -(-placement.held // len(edp))
    return placement.first + edp.index(placement.topology.rank) * chunk


def expert_windows(module: Any, placement: Placement, read: Read) -> Iterator[Named]:
    """Yield the windows on the experts of this rank's shard; gate and up lie in one parameter."""
    first = _first(placement)
    for n, gate_up in enumerate(read(local(module.gate_up_proj))):
        gate, up = gate_up.chunk(2)
        yield Named("gate", first + n, gate)
        yield Named("up", first + n, up)
    for n, down in enumerate(read(local(module.down_proj))):
        yield Named("down", first + n, down)
