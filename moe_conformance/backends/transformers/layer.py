"""Whole MoE blocks of models, with their shared experts, under the library's expert and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_conformance.backends.fsdp_windows import require_one_bias, require_parts, shared_windows, whole_window
from moe_conformance.backends.shared_batch import SharedBatch
from moe_conformance.backends.transformers.experts import expert_windows
from moe_conformance.backends.transformers.model import model_with, plan_of, reduction_of, shard
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.router import WEIGHTS, model_config, model_of
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Named, Read, Unsupported, refusals


class _Block(NamedTuple):
    """The names of a model's block, and of the shared experts in it."""

    name: str
    shared: str | None


_BLOCKS: Mapping[str, _Block] = {
    "deepseek_v2": _Block("DeepseekV2Moe", "shared_experts"),
    "deepseek_v3": _Block("DeepseekV3MoE", "shared_experts"),
    "dots3_note": _Block("Dots3NoteTextMoE", "shared_experts"),
    "lara_mini": _Block("LaraMiniSparseMoeBlock", "shared_expert"),
    "qwen2_moe": _Block("Qwen2MoeSparseMoeBlock", "shared_expert"),
    "qwen3_moe": _Block("Qwen3MoeSparseMoeBlock", None),
}


def block_of(config: Config) -> str:
    """Return the model whose block has the requested layer; refuse if none has."""
    model = _block_of(config)
    if config.shared.bias:
        if model != "deepseek_v2":
            raise Unsupported(f"the shared experts of {model} have no biases: not shared.bias=True")
        require_one_bias(config.shared.ffn)
    return model


def _block_of(config: Config) -> str:
    router = model_of(config)
    if not config.shared.ffn or config.shared.gate:
        if router != "qwen3_moe" or bool(config.shared.ffn) != config.shared.gate:
            raise Unsupported(f"no block is adapted to the router of {router} with shared.gate={config.shared.gate}")
        return "qwen2_moe" if config.shared.ffn else "qwen3_moe"
    of_width = not sum(config.shared.ffn) % config.ffn  # some models make as many of the routed ones' width
    if router == "qwen3_moe" and not config.routing.normalise and (of_width or config.shared.bias):
        router = "deepseek_v2"
    elif router == "qwen3_moe" and not config.shared.bias:
        router = "lara_mini"
    elif router == "deepseek_v3" and not of_width:
        router = "dots3_note"
    if router not in _BLOCKS or _BLOCKS[router].shared is None:
        raise Unsupported(f"no block is adapted to the router of {router} with shared experts that have no gate")
    if router == "deepseek_v2" and not of_width:
        raise Unsupported(
            f"{router} has shared experts of the routed ones' width {config.ffn}, not {config.shared.ffn}"
        )
    if find_spec(f"transformers.models.{router}") is None:
        raise Unsupported(f"this version of transformers has no model {router}")
    return router


class ModelLayer:
    """The block of a model, its experts over ep and all of it by FSDP2 over the batches, placed by the library.

    Several shared experts are one of their total width. Biases of their gate and up projections stay zero.
    """

    def __init__(self, config: Config, placement: Placement, implementations: tuple[str, str]) -> None:
        """Build the block, and let the library install its expert parallelism and shard it.

        Raises:
            Unsupported: no block is what is asked for, or the windows would not be parts of parameters.
        """
        ep_implementation, experts_implementation = implementations
        model = block_of(config)
        self._config, self._placement, self._names = config, placement, _BLOCKS[model]
        requested = model_config(model, config)
        requested._experts_implementation = experts_implementation
        package = f"transformers.models.{model}.modeling_{model}"
        block: Any = getattr(import_module(package), self._names.name)(requested).to(placement.device)
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().to(config.dtype)))
        if config.shared.bias:
            for projection in (block.shared_experts.gate_proj, block.shared_experts.up_proj):
                nn.init.zeros_(projection.bias)  # one switch gives biases to all three projections
        self._block, self._model = block, model_with(block, "layers.0.mlp", requested)
        self._seen = WeightsSeen(block.gate, WEIGHTS)
        sizes = placement.topology.sizes
        if sizes["tp"] > 1 and any("shared_experts" in name for name in requested.base_model_tp_plan):
            raise Unsupported(f"tp = {sizes['tp']} splits the shared experts of {model}: not adapted")
        require_parts(config.shared.ffn, placement.batches)
        if sizes["ep"] > 1:
            self._install(ep_implementation)
        shard(self._model, placement)

    def _install(self, implementation: str) -> None:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        ep_mesh, tp_mesh = self._placement.expert_mesh["ep"], self._placement.tp_mesh
        with refusals(ValueError, match="needs every rank of the expert group to hold the same batch"):
            apply_expert_parallelism(self._model, ep_mesh, tp_mesh, plan_of(self._model, "ep"), implementation)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts, how the experts are placed, what reduces gradients, and the dtype of scores."""
        block, weight = self._block, self._block.experts.gate_up_proj
        shared = "none" if self._names.shared is None else type(getattr(block, self._names.shared)).__name__
        return {
            "layer": type(block).__name__,
            "experts implementation": block.experts.config._experts_implementation,
            "shared experts": shared,
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
            "reduction": reduction_of(self._model),
        }

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return y; the block takes [batch, sequence, D], and tensor ranks share a batch."""
        x_TD = x.reshape(-1, x.shape[-1])
        group = self._placement.topology.group("tp")
        if group.size() == 1:
            y: Tensor = self._model(x if x.dim() == 3 else x[None])
            return y.reshape(x.shape)
        batch = SharedBatch(len(x_TD), group, x.device)
        return batch.local_rows(self._model(batch.of_all(x_TD)[None])[0]).reshape(x.shape)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router, the experts of this rank's shard, and of the shared ones the rows that it holds."""
        block = self._block
        yield from whole_window("router", block.gate.weight, read)
        if self._config.routing.balance_bias:
            yield Named("balance_bias", None, read(block.gate.e_score_correction_bias))
        yield from expert_windows(block.experts, self._placement, read)
        if self._names.shared is None:
            return
        shared = getattr(block, self._names.shared)
        gate_up_FD = (shared.gate_proj.weight, shared.up_proj.weight)
        yield from shared_windows(gate_up_FD, shared.down_proj, self._config.shared.ffn, read)
        if self._config.shared.gate:
            yield from whole_window("shared_score", block.shared_expert_gate.weight, read)
