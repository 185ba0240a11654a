"""Make the library's TransformerConfig of the suite's Config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional

from moe_conformance.backends.megatron_core import differences, library
from moe_conformance.contract import Config, Unsupported, refusals

# Options and sections of Config that shape any surface; functions that stand alone know no fields of TransformerConfig.
FUNCTION = ("variant", "experts", "top_k", "hidden", "ffn", "dtype", "padding.packed")
LAYER = (*FUNCTION, "extra")
ROUTER = ("routing", "router_dtype", "jitter")  # of a router; forced: on random logits
GATE = ("gate_bias",)  # of a router alone: the switch is that of all biases
SHARED = ("shared",)  # of a whole layer
OF_EXPERTS = ("activation", "expert_biases")  # of experts, and of what is built for the same config
CAPACITY = (
    "capacity.factor",
    "capacity.drop_policy",
    "capacity.padded",
)  # of router and dispatcher; there is no minimum

# What TransformerConfig says where it refuses what can be asked of it here.
_REFUSED = "|".join(
    (
        "num_moe_experts must be non-negative",
        "should be (divisible by|smaller than) moe_router_num_groups",
        "Please use --moe-router-pre-softmax when topk is 1",
        "Expert bias for aux-loss-free routing only supports",
        "moe_expert_capacity_factor (only works with|must be set to use)",
        "moe_expert_rank_capacity_factor requires moe_flex_dispatcher_backend",
        "moe_shared_expert_overlap only works with alltoall( or flex)? token dispatcher",
        "Bias in Moe is only supported when ETP==1",
        "does not support variable sequence length",
        "fused permutation is not available|cannot import name 'fused_permute'",  # without Transformer Engine
        "overlap_moe_expert_parallel_comm",
        "Flex token dispatcher with deepep(/deepepv2)? backend does not support",
    )
)


def transformer_config(config: Config, sizes: Mapping[str, int]) -> Any:
    """Return the TransformerConfig of one MoE layer; `extra` holds fields of it, by the library's names.

    Raises:
        Unsupported: by the library where it refuses the combination, by the adapter where it has no way to say it.
    """
    if config.variant not in ("allgather", "alltoall"):
        raise Unsupported(f"the dispatcher {config.variant!r} is not adapted")
    extra = dict(config.extra)
    unknown = sorted(name for name in extra if not differences.has_field(name))
    if unknown:
        raise Unsupported(f"TransformerConfig has no field {', '.join(unknown)}")
    with refusals(ValueError, AssertionError, ImportError, match=_REFUSED):
        return library.TransformerConfig(
            **{
                "num_layers": 1,
                "num_attention_heads": sizes["tp"],  # there is no attention; tp must divide the heads
                "hidden_size": config.hidden,
                "ffn_hidden_size": config.ffn,
                "moe_ffn_hidden_size": config.ffn,
                "num_moe_experts": config.experts,
                "moe_router_topk": config.top_k,
                "moe_token_dispatcher_type": config.variant,
                "variable_seq_lengths": config.padding.packed,
                **_of_experts(config),
                "params_dtype": config.dtype,
                "bf16": config.dtype == torch.bfloat16,
                "fp16": config.dtype == torch.float16,
                "perform_initialization": False,  # the suite writes every parameter
                "tensor_model_parallel_size": sizes["tp"],
                # MoELayer needs it in training: the ranks of tp hold different tokens.
                "sequence_parallel": sizes["tp"] > 1 and not config.token_copies,
                "context_parallel_size": sizes["cp"],
                "pipeline_model_parallel_size": sizes["pp"],
                "pipeline_dtype": config.dtype,
                "expert_model_parallel_size": sizes["ep"],
                "expert_tensor_parallel_size": sizes["etp"],
                **_routing(config),
                **_shared(config),
                **extra,
            }
        )


def _of_experts(config: Config) -> dict[str, Any]:
    """Return the fields of the experts' function and biases."""
    activation = config.activation
    if config.expert_biases == "output":
        raise Unsupported("Megatron-Core has biases of all projections or of none, not expert_biases='output'")
    if activation.slope not in (1.0, 1.702):
        raise Unsupported(
            f"Megatron-Core has silu and quick_gelu, of slope 1.702, and not activation.slope={activation.slope}"
        )
    functions = {
        "silu": torch.nn.functional.silu if activation.slope == 1.0 else library.activations.quick_gelu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": library.activations.fast_gelu,
        "relu": torch.nn.functional.relu,
        "squared_relu": library.activations.squared_relu,
    }
    return {
        "gated_linear_unit": activation.gated,
        "activation_func": functions[activation.function],
        "activation_func_clamp_value": activation.limit,
        "glu_linear_offset": activation.offset,
        "add_bias_linear": config.expert_biases == "all" or config.gate_bias,
    }


def _shared(config: Config) -> dict[str, Any]:
    """Return the fields of shared experts: several are one of their total width."""
    if not config.shared.ffn:
        return {}
    return {
        "moe_shared_expert_intermediate_size": sum(config.shared.ffn),
        "moe_shared_expert_gate": config.shared.gate,
        "moe_shared_expert_overlap": config.shared.overlap,
        "add_bias_linear": config.shared.bias,  # the only switch for biases; shared experts refuse it
    }


def _routing(config: Config) -> dict[str, Any]:
    """Return the router's fields."""
    router_fields: dict[str, Any] = {
        "moe_router_dtype": _router_dtype(config),
        "moe_input_jitter_eps": config.jitter or None,
        "moe_router_score_function": _score(config),
        "moe_router_pre_softmax": _softmax_before_selection(config),
        "moe_router_topk_scaling_factor": config.routing.scale,
        "moe_router_enable_expert_bias": config.routing.balance_bias,
        "moe_expert_capacity_factor": config.capacity.factor,
        "moe_token_drop_policy": {"weights": "probs", "position": "position"}[config.capacity.drop_policy],
        "moe_pad_expert_input_to_capacity": config.capacity.padded,
        **_forced(config),
    }
    if config.routing.groups is not None:
        router_fields["moe_router_num_groups"], router_fields["moe_router_group_topk"] = config.routing.groups
        _check_group_score(config)
    return router_fields


def _forced(config: Config) -> dict[str, Any]:
    """Return the fields of forced logits."""
    forced: dict[str, Any] = {}
    for strategy, parameter in config.routing.forced:
        if strategy == "random":
            forced["moe_router_force_load_balancing"] = True
        elif strategy == "biased" and differences.has_field("moe_router_force_biased"):
            if parameter is None or "moe_router_force_biased" in forced:
                raise Unsupported("moe_router_force_biased is one deviation, and None is off")
            forced["moe_router_force_biased"] = parameter
        else:
            raise Unsupported(f"this version of Megatron-Core has no forced routing of the kind {strategy!r}")
    return forced


def _router_dtype(config: Config) -> str | None:
    """Return the library's name of the dtype of the router; None: that of the tokens."""
    names = {None: None, torch.float32: "fp32", torch.float64: "fp64"}
    if config.router_dtype not in names:
        raise Unsupported(f"Megatron-Core computes in float32 or float64 if asked, not in {config.router_dtype}")
    return names[config.router_dtype]


def _score(config: Config) -> str:
    """Return the library's name of the scores; a softmax is over all experts or over the selected ones."""
    if config.routing.score == "sqrtsoftplus" and not differences.has_score("sqrtsoftplus"):
        raise Unsupported("this version of Megatron-Core scores by softmax or sigmoid, not by sqrtsoftplus")
    return config.routing.score if config.routing.score in ("sigmoid", "sqrtsoftplus") else "softmax"


def _softmax_before_selection(config: Config) -> bool:
    """Whether the softmax is over all experts, or over the selected ones; refuses weights that Megatron-Core lacks.

    It has no switch for normalisation: weights of other scores are divided by their sum if and only if K > 1, those of
    a softmax never. A softmax over all experts that is then normalised over the selected experts is the softmax over
    these.
    """
    if config.routing.score == "softmax" and config.routing.normalise and config.routing.groups:
        raise Unsupported("normalised softmax with groups: Megatron-Core would then rank the groups by logits")
    score = config.routing.score
    if score in ("sigmoid", "sqrtsoftplus") and config.routing.normalise != (config.top_k > 1):
        raise Unsupported(
            f"Megatron-Core normalises {score} weights if and only if K > 1: "
            f"not normalise={config.routing.normalise} with K = {config.top_k}"
        )
    return config.routing.score == "softmax" and not config.routing.normalise


def _check_group_score(config: Config) -> None:
    """Refuse a group score other than the sum of the best K / selected groups, the only one that there is."""
    assert config.routing.groups is not None
    best, rest = divmod(config.top_k, config.routing.groups[1])
    known_as = {"topk_sum": best, "top2_sum": 2, "max": 1}
    if rest or not best:
        raise Unsupported(f"K = {config.top_k} is no multiple of the {config.routing.groups[1]} selected groups")
    if known_as[config.routing.group_score] != best:
        raise Unsupported(
            f"Megatron-Core ranks a group by its best {best} (K / selected groups) experts, "
            f"not by {config.routing.group_score}"
        )
