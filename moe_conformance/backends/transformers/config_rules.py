"""Resolve settings by transformers: build Qwen3-MoE on one rank, and change how its experts are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from moe_conformance.backends.transformers.router import ONE_HEAD
from moe_conformance.contract import Config, Settings, Unsupported, VersionLimit

_MAPPED = {"experts", "top_k", "extra"}
_IMPLEMENTATION = "experts_implementation"


class ConfigRules:
    """Builds the decoder of a model, without a vocabulary to speak of."""

    def __init__(self, config: Config) -> None:
        """Keep the sizes of a layer."""
        self._config = config

    @property
    def resolved(self) -> Mapping[str, str]:
        """What is built."""
        return {"rules": "Qwen3MoeModel"}

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        """Return none: the library documents none for these options."""
        del asked
        return ()

    def resolve(self, asked: Settings) -> Settings:
        """Build a model of one layer, and read its settings."""
        return self.shown(self.build(asked, 1))[0]

    def build(self, asked: Settings, layers: int) -> Any:
        """Build the model with the settings in its config; `extra` has options of `from_config`."""
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

        others = {field.name: field.default for field in fields(Settings) if field.name not in _MAPPED}
        if odd := [f"{name}={getattr(asked, name)!r}" for name in others if getattr(asked, name) != others[name]]:
            raise Unsupported(f"Qwen3-MoE has no option {', '.join(odd)}")
        if asked.experts is None:
            raise Unsupported("a model without experts has no MoE layer")
        if unknown := [name for name, _ in asked.extra if name != _IMPLEMENTATION]:
            raise Unsupported(f"a config takes any name, and no layer of it reads {', '.join(unknown)}")
        config = Qwen3MoeConfig(
            hidden_size=self._config.hidden,
            moe_intermediate_size=self._config.ffn,
            num_experts=asked.experts,
            num_experts_per_tok=asked.top_k,
            num_hidden_layers=layers,
            vocab_size=1,
            **ONE_HEAD,
        )
        return Qwen3MoeModel._from_config(config, **dict(asked.extra))

    def change(self, built: Any, to: Settings) -> None:
        """Set the implementation of experts, the one setting that a built model can change."""
        if to != Settings(extra=to.extra):
            raise Unsupported("transformers changes how the experts of a built model are computed, and nothing else")
        for _, name in to.extra:
            built.set_experts_implementation(name)

    def shown(self, built: Any) -> Sequence[Settings]:
        """Return the settings of every layer: those of its router, and those that its experts read in a forward."""
        return [_settings(block.mlp) for block in built.layers]


def _settings(mlp: Any) -> Settings:
    if not hasattr(mlp, "gate"):  # a dense layer, which the model builds of 0 experts
        return Settings(experts=None)
    implementation = mlp.experts.config._experts_implementation
    return Settings(experts=mlp.gate.num_experts, top_k=mlp.gate.top_k, extra=((_IMPLEMENTATION, implementation),))
