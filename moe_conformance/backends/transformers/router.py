"""The routers of models, each for the rule of routing that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from moe_conformance.backends.fsdp_windows import whole_window
from moe_conformance.backends.transformers.model import model_with, reduction_of, shard
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Unsupported

WEIGHTS = 1  # of what every router returns: logits, weights, ids
ONE_HEAD: Mapping[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}  # which divides every hidden size


def model_of(config: Config) -> str:
    """Return the model whose router has the requested routing; refuse if none has."""
    routing = config.routing
    if config.gate_bias and routing.score != "softmax_topk":
        raise Unsupported(f"no router with a gate bias is adapted to score = {routing.score!r}")
    if routing.score == "sigmoid" and (routing.groups is None or routing.group_score == "top2_sum"):
        _require_two_in_a_group(config, "deepseek_v3")
        return "deepseek_v3"
    if routing.score == "sqrtsoftplus" and routing.normalise and routing.groups is None:
        return "deepseek_v4"
    plain = not (routing.normalise or routing.balance_bias)
    if routing.score == "softmax_topk" and plain and routing.groups is None and routing.scale == 1:
        return "gpt_oss"
    if routing.score == "softmax" and plain and (routing.groups is None or routing.group_score == "max"):
        return "deepseek_v2" if routing.groups or routing.scale != 1 else "qwen3_moe"
    if routing.score == "softmax" and not routing.balance_bias and routing.groups is None and routing.scale == 1:
        return "qwen3_moe"
    if routing.score == "softmax" and not routing.balance_bias and routing.group_score == "top2_sum":
        _require_two_in_a_group(config, "mistral4")
        return "mistral4"
    requested = {name: getattr(routing, name) for name in ("score", "normalise", "scale", "groups", "balance_bias")}
    requested |= {"group_score": routing.group_score} if routing.groups else {}
    raise Unsupported("no router is adapted to " + ", ".join(f"{name}={value!r}" for name, value in requested.items()))


def _require_two_in_a_group(config: Config, model: str) -> None:
    if config.experts < 2 * (config.routing.groups or (1,))[0]:
        raise Unsupported(f"the router of {model} needs two experts in a group: {config.experts} in all")


def _grouped(config: Config) -> dict[str, Any]:
    """Return the fields of a config that has groups always, of one for a router without."""
    return {
        "n_routed_experts": config.experts,
        "norm_topk_prob": config.routing.normalise,
        "routed_scaling_factor": config.routing.scale,
        "n_group": config.routing.groups[0] if config.routing.groups else 1,
        "topk_group": config.routing.groups[1] if config.routing.groups else 1,
    }


# What a model calls its router and its config, and the fields of the config beside hidden_size and num_experts_per_tok.
_Fields = Callable[[Config], dict[str, Any]]
MODELS: Mapping[str, tuple[str, str, _Fields]] = {
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        lambda config: {
            "n_routed_experts": config.experts,
            "routed_scaling_factor": config.routing.scale,
            "topk_method": "group_limited_greedy" if config.routing.groups else "greedy",
            "n_group": config.routing.groups[0] if config.routing.groups else None,
            "topk_group": config.routing.groups[1] if config.routing.groups else None,
        },
    ),
    "deepseek_v3": ("DeepseekV3TopkRouter", "DeepseekV3Config", _grouped),
    "dots3_note": ("Dots3NoteTextTopkRouter", "Dots3NoteTextConfig", _grouped),
    "deepseek_v4": (
        "DeepseekV4TopKRouter",
        "DeepseekV4Config",
        lambda config: {
            "n_routed_experts": config.experts,
            "routed_scaling_factor": config.routing.scale,
            "scoring_func": "sqrtsoftplus",
        },
    ),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig", lambda config: {"num_local_experts": config.experts}),
    "lara_mini": (
        "LaraMiniTopKRouter",
        "LaraMiniConfig",
        lambda config: {"num_experts": config.experts, "norm_topk_prob": config.routing.normalise},
    ),
    "mistral4": ("Mistral4TopkRouter", "Mistral4Config", _grouped),
    "qwen2_moe": (
        "Qwen2MoeTopKRouter",
        "Qwen2MoeConfig",
        lambda config: {"num_experts": config.experts, "norm_topk_prob": config.routing.normalise},
    ),
    "qwen3_moe": (
        "Qwen3MoeTopKRouter",
        "Qwen3MoeConfig",
        lambda config: {"num_experts": config.experts, "norm_topk_prob": config.routing.normalise},
    ),
}

_SHARED: Mapping[str, _Fields] = {
    "deepseek_v2": lambda config: {
        "n_shared_experts": sum(config.shared.ffn) // config.ffn,
        "mlp_bias": config.shared.bias,
    },
    "deepseek_v3": lambda config: {"n_shared_experts": sum(config.shared.ffn) // config.ffn},
    "dots3_note": lambda config: {
        "n_shared_experts": 1,
        "shared_experts_intermediate_size": sum(config.shared.ffn),
    },
    "lara_mini": lambda config: {"shared_expert_intermediate_size": sum(config.shared.ffn)},
    "qwen2_moe": lambda config: {"shared_expert_intermediate_size": sum(config.shared.ffn)},
}


def model_config(model: str, config: Config) -> Any:
    """Return the model's config for a router, experts and shared experts."""
    _, config_class, fields = MODELS[model]
    widths = {"moe_intermediate_size": config.ffn} | (_SHARED[model](config) if model in _SHARED else {})
    return getattr(import_module(f"transformers.models.{model}.configuration_{model}"), config_class)(
        hidden_size=config.hidden, num_experts_per_tok=config.top_k, **ONE_HEAD, **fields(config), **widths
    )


_IN_FLOAT32 = (
    "deepseek_v2",
    "deepseek_v3",
    "dots3_note",
    "lara_mini",
)  # models whose routers cast tokens and weight before they multiply them


def require_dtype(config: Config, model: str) -> None:
    """Refuse a dtype that the router of a model does not compute in: none has an option for it.

    Raises:
        Unsupported: it computes in another.
    """
    if config.router_dtype not in (None, torch.float32 if model in _IN_FLOAT32 else None):
        raise Unsupported(f"the router of {model} has no option to compute in {config.router_dtype}")


class ModelRouter:
    """One router. Its balance bias stays in float32, as the models keep it; a gate bias not asked for stays zero."""

    def __init__(self, config: Config, model: str, device: torch.device, placement: Placement | None) -> None:
        """Build the router of a model from the model's own config, and let the library shard it where it is placed."""
        modelling = import_module(f"transformers.models.{model}.modeling_{model}")
        requested = model_config(model, config)
        router: Any = getattr(modelling, MODELS[model][0])(requested).to(device)
        for name, parameter in list(router.named_parameters()):
            setattr(router, name, nn.Parameter(parameter.detach().to(config.dtype)))
        self._router, self._biased, self._gate_biased = router, config.routing.balance_bias, config.gate_bias
        self._seen = WeightsSeen(router, WEIGHTS)
        self._model, self.placed = model_with(router, "layers.0.mlp.gate", requested), placement is not None
        if placement is not None:
            shard(self._model, placement)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, the dtype of its weight, and what reduces its gradients."""
        router = self._router
        name = type(router).__name__.removeprefix("FSDP")
        return {"router": name, "gate": str(router.weight.dtype), "reduction": reduction_of(self._model)}

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def __call__(self, x: Tensor) -> Routed:
        """Return what the router passes to the experts; it counts no load."""
        logits_TE, weights_TK, ids_TK = self._model(x.reshape(-1, x.shape[-1]))
        return Routed(Routing(ids_TK, weights_TK, logits_TE.shape[1]), logits_TE)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield this rank's part of the weight, and the biases of the config."""
        yield from whole_window("router", self._router.weight, read)
        if self._gate_biased:
            yield from whole_window("gate_bias", self._router.bias, read)
        if self._biased:
            yield Named("balance_bias", None, read(self._router.e_score_correction_bias))
