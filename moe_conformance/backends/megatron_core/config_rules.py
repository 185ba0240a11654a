"""Resolve settings by the library: build `TransformerConfig`, and on one rank the MoE layer of it."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional

from moe_conformance.backends.megatron_core import command_line, differences, library
from moe_conformance.backends.megatron_core.overlap import PLAIN, OverlappedStep
from moe_conformance.contract import Config, Settings, Topology, Unsupported, VersionLimit, refusals

_DISPATCHERS = {"fused": "flex"}
_NCCL_EP = ("moe_ncclep_static_shape", "moe_ncclep_zero_copy")  # one of them is there where NCCL EP is
_SCOPES = {"attention": "attn", "router": "moe_router"}
_OVERLAP, _DEFERRED_UNDER_GRAPH = ("torch", "2.6.0"), ("transformer-engine", "2.10.0")
# Of valid settings: what needs a package that is not installed, or a second rank.
_DOCUMENTED = "Flex token dispatcher requires TPxEP > 1|is not installed. Please install"


class ConfigRules:
    """Builds the config of a model of 12 layers, and one layer where neither ep nor pp is above 1.

    On the ranks of ep it builds the steps of a layer under the schedule that overlaps.
    """

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Keep the sizes of a layer, and the ranks."""
        self._config, self._topology, self._device = config, topology, device

    @property
    def resolved(self) -> Mapping[str, str]:
        """What is built."""
        found = f"validate_args where a graph holds deferred weights, as with TE {command_line.TRANSFORMER_ENGINE}"
        return {"rules": f"TransformerConfig, MoELayer; {found}", "shims": ", ".join(library.SHIMS)}

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        """Return the limits that `TransformerConfig` asserts."""
        needed = [_OVERLAP] if asked.overlap else []
        if command_line.checks(asked):
            stood_in = VersionLimit(
                "transformer-engine", command_line.TRANSFORMER_ENGINE, command_line.TRANSFORMER_ENGINE
            )
            return [*(VersionLimit(name, least, _installed(name)) for name, least in needed), stood_in]
        if asked.defer_weight_gradients and asked.capture is not None:
            needed.append(_DEFERRED_UNDER_GRAPH)
        return [VersionLimit(name, least, _installed(name)) for name, least in needed]

    def resolve(self, asked: Settings) -> Settings:
        """Build the config, and with ep = pp = 1 its MoE layer; return the settings of both."""
        if asked.versions:
            raise Unsupported("Megatron-Core reads the versions that are installed, and no others")
        if self._topology.sizes["world"] not in (1, asked.ep):
            raise Unsupported(f"the adapter resolves ep = {asked.ep} on one rank, or on {asked.ep}")
        found: AbstractContextManager[None] = nullcontext()
        if command_line.checks(asked):
            command_line.validate(asked, self._config.hidden, self._config.ffn)
            found = command_line.transformer_engine()
        with found:
            built = library.TransformerConfig(**self._fields(asked))
        layer = None
        if built.num_moe_experts is not None and asked.ep == asked.pp == 1:
            with refusals(AssertionError, ImportError, match=_DOCUMENTED):
                layer = self._layer(built)
        return self._read(asked, built, layer)

    def step(self, asked: Settings) -> OverlappedStep:
        """Build a model of one layer, and the schedule that overlaps it."""
        ran = self.resolve(asked)
        if reason := _not_run(ran, self._topology.sizes["ep"]):
            raise Unsupported(reason)
        accumulates = ran.accumulate_in_product and self._device.type == "cuda"
        fields = {**self._fields(ran), "num_layers": 1, "gradient_accumulation_fusion": accumulates, **dict(PLAIN)}
        built = library.TransformerConfig(**fields, expert_tensor_parallel_size=1)
        options = {
            "experts": ran.experts,
            "top_k": ran.top_k,
            "dtype": ran.dtype,
            "shared.ffn": (self._config.ffn,) * ran.shared_experts,
            "overlap.deferred_weights": ran.defer_weight_gradients,
        }
        return OverlappedStep(built, self._config.changed(options), self._topology, self._device)

    def _fields(self, asked: Settings) -> dict[str, Any]:
        """Return the fields of TransformerConfig."""
        ffn = self._config.ffn
        return {
            "num_layers": 12,  # of as many stages as are asked for
            "num_attention_heads": 1,
            "hidden_size": self._config.hidden,
            "ffn_hidden_size": ffn,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "add_qkv_bias": asked.attention_bias,
            "params_dtype": asked.dtype,
            "pipeline_dtype": asked.dtype,
            "bf16": asked.dtype == torch.bfloat16,
            "fp16": asked.dtype == torch.float16,
            "num_moe_experts": asked.experts,
            "moe_ffn_hidden_size": None if asked.experts is None else ffn,
            "moe_router_topk": asked.top_k,
            "moe_router_pre_softmax": True,  # K = 1 needs it
            "moe_router_num_groups": asked.groups,
            "moe_router_group_topk": asked.groups_chosen,
            "expert_model_parallel_size": asked.ep,
            "pipeline_model_parallel_size": asked.pp,
            "virtual_pipeline_model_parallel_size": asked.virtual_stages,
            "moe_token_dispatcher_type": _DISPATCHERS.get(asked.dispatcher, asked.dispatcher),
            **_kernel(asked),
            "overlap_moe_expert_parallel_comm": asked.overlap,
            "moe_shared_expert_intermediate_size": asked.shared_experts * ffn or None,
            "moe_shared_expert_overlap": asked.overlap_shared,
            "recompute_granularity": None if asked.recompute == "none" else asked.recompute,
            "recompute_method": asked.recompute_method,
            "recompute_num_layers": asked.recompute_layers,
            "recompute_modules": [*asked.recompute_modules] or None,
            "mtp_num_layers": asked.prediction_layers,
            "cuda_graph_impl": "none" if asked.capture is None else "transformer_engine",
            differences.CAPTURED: [_SCOPES.get(name, name) for name in asked.capture or ()],
            "fine_grained_activation_offloading": asked.offload_first_product,
            "offload_modules": ["expert_fc1"] if asked.offload_first_product else [],
            "delay_wgrad_compute": asked.defer_weight_gradients,
            "gradient_accumulation_fusion": asked.accumulate_in_product,
            "variable_seq_lengths": asked.packed,
            "perform_initialization": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **dict(asked.extra),
        }

    def _layer(self, built: Any) -> Any:
        """Build a layer; the product that accumulates is a CUDA extension, and is left out on a CPU."""
        of_layer = copy.copy(built)
        of_layer.gradient_accumulation_fusion &= self._device.type == "cuda"
        return differences.moe_layer(of_layer, 1).to(self._device)

    def _read(self, asked: Settings, built: Any, layer: Any) -> Settings:
        """Return the settings of the config, and those of the layer's router."""
        named = {value: name for name, value in _DISPATCHERS.items()}
        scopes = {value: name for name, value in _SCOPES.items()}
        dispatcher = built.moe_token_dispatcher_type
        captured = tuple(scopes.get(scope.name, scope.name) for scope in getattr(built, differences.CAPTURED))
        size = built.moe_shared_expert_intermediate_size
        return Settings(
            experts=built.num_moe_experts if layer is None else len(layer.router.weight),
            top_k=built.moe_router_topk if layer is None else layer.router.topk,
            groups=built.moe_router_num_groups,
            groups_chosen=built.moe_router_group_topk,
            ep=built.expert_model_parallel_size,
            pp=built.pipeline_model_parallel_size,
            virtual_stages=built.virtual_pipeline_model_parallel_size,
            dispatcher=named.get(dispatcher, dispatcher),
            kernel=asked.kernel if built.moe_flex_dispatcher_backend in ("hybridep", "ncclep") else None,
            dtype=built.params_dtype,
            overlap=built.overlap_moe_expert_parallel_comm,
            overlap_shared=built.moe_shared_expert_overlap,
            shared_experts=0 if size is None else size // self._config.ffn,
            recompute=built.recompute_granularity or "none",
            recompute_method=built.recompute_method,
            recompute_layers=built.recompute_num_layers,
            recompute_modules=tuple(built.recompute_modules) if asked.recompute_modules else (),
            prediction_layers=built.mtp_num_layers,
            capture=None if built.cuda_graph_impl == "none" else captured,
            offload_first_product=built.fine_grained_activation_offloading,
            defer_weight_gradients=built.delay_wgrad_compute,
            accumulate_in_product=built.gradient_accumulation_fusion,
            attention_bias=built.add_qkv_bias,
            packed=built.variable_seq_lengths,
        )

    def build(self, asked: Settings, layers: int) -> Any:
        """Refuse: there is no change to build for."""
        del asked, layers
        raise Unsupported("Megatron-Core has no way to change the configuration of layers that are built")

    def change(self, built: Any, to: Settings) -> None:
        """Never called."""

    def shown(self, built: Any) -> Sequence[Settings]:
        """Never called."""
        del built
        return ()


def _not_run(s: Settings, ep: int) -> str:
    """Return why the adapter has no step of settings that the library accepts, "" if it has one."""
    reasons = {
        "without overlap the adapter runs no step": not s.overlap,
        f"the ranks have ep = {ep} and one stage": s.ep != ep or s.pp > 1,
        "the flex dispatcher is judged of the backend megatron-core-flex": s.dispatcher == "fused",
        "a graph and offloading need a GPU and Transformer Engine": s.capture is not None or s.offload_first_product,
        "multi-token prediction needs an embedding, which the adapter's model has not": bool(s.prediction_layers),
        "the model's attention returns its input, and has no projections": s.attention_bias,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _kernel(asked: Settings) -> dict[str, str]:
    """Return the field of the kernel: the default is DeepEP's, others are HybridEP's and NCCL EP's ("freeing")."""
    if asked.kernel is None:
        return {}
    if asked.kernel == "freeing" and any(map(differences.has_field, _NCCL_EP)):
        return {"moe_flex_dispatcher_backend": "ncclep"}
    installed = library.token_dispatcher.hybrid_ep_dispatch is not None
    if asked.kernel == "freeing" or (asked.kernel == "present") != installed:
        raise Unsupported(f"HybridEP is {'installed' if installed else 'not installed'}: no kernel is {asked.kernel!r}")
    return {"moe_flex_dispatcher_backend": "hybridep"}


def _installed(library_name: str) -> str | None:
    try:
        return importlib.metadata.version(library_name)
    except importlib.metadata.PackageNotFoundError:
        return None
