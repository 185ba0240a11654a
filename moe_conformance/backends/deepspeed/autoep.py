"""AutoEP's MoE layer, which takes the place of a model's block, and its exchange around the given experts.

T tokens, K slots, E experts, N experts of this rank, D hidden, F intermediate size, R rows received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe_conformance.backends.deepspeed import library
from moe_conformance.backends.deepspeed.placement import Placement
from moe_conformance.contract import Activation, Claims, Config, Delivery, ExpertFn, Routing, Unsupported

# The names of a block of transformers: of routed experts alone, of shared ones, and of these with a gate.
_OF_BLOCK: Mapping[str, Any] = {
    "moe_module_name": "mlp",
    "model_family": "qwen3_moe",
    "router_name": "gate",
    "experts_name": "experts",
    "expert_storage": "fused_3d",
    "expert_w1_name": "gate_up_proj",
    "expert_w2_name": "down_proj",
    "expert_w3_name": None,
    "return_router_logits": False,
    "router_logits_capture_target": "none",
    "router_logits_capture_index": None,
    "router_logits_capture_layer_name": None,
}


class Shared(nn.Module):
    """The shared experts of a model, which AutoEP calls as they are: one SwiGLU of the total width."""

    def __init__(self, config: Config) -> None:
        """Build the three projections, the last with a bias if it is asked for."""
        super().__init__()
        D, F = config.hidden, sum(config.shared.ffn)
        self.gate, self.up = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=config.shared.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, (..., D)."""
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """The block of a model, in the model's dtype but for the balance bias, of which AutoEP makes its layer."""

    def __init__(self, config: Config) -> None:
        """Make the parameters of all E experts."""
        super().__init__()
        E, D, F = config.experts, config.hidden, config.ffn
        self.gate = nn.Linear(D, E, bias=config.gate_bias)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * F, D))
        self.experts.down_proj = nn.Parameter(torch.zeros(E, D, F))
        if config.shared.ffn:
            self.shared_experts = Shared(config)
        if config.shared.gate:
            self.shared_expert_gate = nn.Linear(D, 1, bias=False)
        self.to(config.dtype)
        if config.routing.balance_bias:
            self.gate.register_buffer("e_score_correction_bias", torch.zeros(E))


def autoep_layer(config: Config, placement: Placement, device: torch.device, **settings: Any) -> Any:
    """Return AutoEP's layer in place of a block, on this rank.

    Raises:
        Unsupported: the experts cannot be placed, or this version has not what is asked for.
    """
    placement.held(config.experts)
    asked = {
        **_OF_BLOCK, **_activation(config.activation), **_routing(config), "num_experts": config.experts,
        "top_k": config.top_k, "hidden_size": config.hidden, "ffn_hidden_size": config.ffn, "score_apply": "post",
        "gate_bias": config.gate_bias, "has_shared_experts": bool(config.shared.ffn),
        "shared_experts_name": "shared_experts" if config.shared.ffn else "",
        "shared_experts_gate_name": "shared_expert_gate" if config.shared.gate else "",
    }  # fmt: skip
    known = {field.name for field in fields(library.auto_ep_layer.MoELayerSpec)}
    if missing := sorted(asked.keys() - known):
        raise Unsupported(f"this version of AutoEP has no {', '.join(missing)}")
    options = library.auto_ep_layer.AutoEPConfig(
        enabled=True, autoep_size=placement.ep, use_grouped_mm=False, **settings
    )
    layer = library.auto_ep_layer.AutoEPMoELayer(
        library.auto_ep_layer.MoELayerSpec(**asked), Block(config).to(device), placement.ep, placement.ep_rank, options
    )
    layer.set_deepspeed_parallelism()
    return layer


def _activation(asked: Activation) -> Mapping[str, Any]:
    """Return the fields that name an activation; none for SwiGLU, which needs none.

    Raises:
        Unsupported: AutoEP has no such activation.
    """
    if asked == Activation():
        return {}
    if asked == Activation("gelu_tanh"):
        return {"expert_activation": "geglu_tanh"}
    if asked.limit is not None and asked == Activation(limit=asked.limit):
        return {"expert_activation": "swiglu_clamped", "expert_activation_limit": asked.limit}
    if asked.limit is not None and asked == Activation(limit=asked.limit, slope=asked.slope, offset=1.0):
        oai = {"expert_activation_alpha": asked.slope, "expert_activation_limit": asked.limit}
        return {"expert_activation": "swiglu_oai"} | oai
    raise Unsupported(f"AutoEP's experts have SwiGLU, also clamped or as in GPT-OSS, and GeGLU by tanh: not {asked}")


def _routing(config: Config) -> Mapping[str, Any]:
    """Return the fields of the router.

    Raises:
        Unsupported: AutoEP's router has no such rule.
    """
    routing = config.routing
    if routing.forced:
        raise Unsupported(f"no router of DeepSpeed forces routes: not {routing.forced}")
    if routing.score not in ("softmax", "sigmoid"):
        raise Unsupported(f"AutoEP's router scores by softmax or sigmoid, not {routing.score}")
    fields = {"score_func": routing.score, "route_norm": routing.normalise, "route_scale": routing.scale}
    if routing.groups is None:
        return fields
    if routing.group_score == "topk_sum":
        raise Unsupported("AutoEP's router ranks groups by their best or two best experts, not by topk_sum")
    groups, chosen = routing.groups
    limited = {"num_expert_groups": groups, "num_limited_groups": chosen, "group_score_func": routing.group_score}
    return {**fields, **limited}


class _GivenRouter(nn.Module):
    """Replaces the router, and returns the routing of the call with the library's count of it."""

    routing: Routing

    def forward(self, x_TD: Tensor, expert_bias: None) -> tuple[Tensor, Tensor, Tensor]:
        ids_TK, E = self.routing.ids_TK, self.routing.experts
        return self.routing.weights_TK, ids_TK, library.auto_ep_layer.count_tokens_per_expert(ids_TK, E)


class _GivenExperts(nn.Module):
    """Replaces the experts: receives rows by expert and their numbers, and computes the function of the call."""

    expert: ExpertFn

    def forward(self, rows_RD: Tensor, counts_N: Tensor) -> Tensor:
        return self.expert(Delivery.grouped(rows_RD, counts_N))


class AutoEPExchange:
    """AutoEP's layer without its router and experts; it takes any T, also packed."""

    said: Mapping[str, str] = MappingProxyType({})  # further words for what was built

    def __init__(self, config: Config, placement: Placement, device: torch.device, **settings: Any) -> None:
        """Build it; the library multiplies what the experts give by weights, or what they are given."""
        self.local_experts = tuple(placement.held(config.experts))
        at = "pre" if config.weights_applied == "input" else "post"
        self.layer = autoep_layer(config, placement, device, score_apply=at, **settings)
        self._router, self._experts = _GivenRouter(), _GivenExperts()
        self.layer.router, self.layer.experts = self._router, self._experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, the size of its group, what moves rows, and where weights are applied."""
        how = {"transport": self._transport, "weights": self.layer.score_apply}
        return {**resolved(self.layer), **how, **self.said}

    @property
    def claims(self) -> Claims:
        """Rows of an expert are padded, also of one that has none; DeepEP sends a token once to a rank."""
        at: Literal["input", "combine"] = "input" if self.layer.score_apply == "pre" else "combine"
        if self._transport == "deepep":
            return Claims(wire="tokens", weights_at=at)
        return Claims(multiple=library.TOKEN_GROUP_ALIGN_SIZE_M, weights_at=at)

    @property
    def _transport(self) -> str:
        """The name of what moves rows; 0.19.6 has one such transport, without a name."""
        return str(getattr(self.layer, "comm_backend", "comm"))

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Run the layer, which takes [batch, sequence, D]."""
        self._router.routing, self._experts.expert = routing, expert
        y: Tensor = self.layer(x.reshape(1, -1, x.shape[-1]))
        return y.reshape(x.shape)


def resolved(layer: Any) -> dict[str, str]:
    """The class of a layer, and the size of its group."""
    return {"layer": type(layer).__qualname__, "ep ranks": str(layer.ep_size), "shims": library.SHIMS}
