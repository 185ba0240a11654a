"""Resolve settings by torchtitan: build the configs of an MoE module, and the module from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from moe_conformance.backends.torchtitan.layer import moe_config
from moe_conformance.contract import Config, Settings, Unsupported, VersionLimit

_MAPPED = {"experts", "top_k", "groups", "groups_chosen", "shared_experts", "extra"}


class ConfigRules:
    """Builds an MoE module without an exchange. What concerns parallelism is set where a whole model is, not here."""

    def __init__(self, config: Config) -> None:
        """Keep the sizes of a module."""
        self._config = config

    @property
    def resolved(self) -> Mapping[str, str]:
        """What is built."""
        return {"rules": "MoE.Config"}

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        """Return none: the options of a module have no limits on versions."""
        del asked
        return ()

    def resolve(self, asked: Settings) -> Settings:
        """Build the module, and read its settings."""
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

        others = {f.name: f.default for f in fields(Settings) if f.name not in _MAPPED}
        if odd := [f"{name}={getattr(asked, name)!r}" for name in others if getattr(asked, name) != others[name]]:
            raise Unsupported(f"torchtitan's MoE module has no option {', '.join(odd)}")
        if asked.experts is None:
            raise Unsupported("a torchtitan model without experts has no MoE module")
        dispatcher = LocalTokenDispatcher.Config(num_experts=asked.experts, top_k=asked.top_k)
        shared = replace(self._config.shared, ffn=(self._config.ffn,) * asked.shared_experts)
        module = moe_config(replace(self._config, shared=shared), 1, dispatcher)
        module.num_experts = module.routed_experts.inner_experts.num_experts = asked.experts
        router = module.router
        module.router = type(router)(
            num_experts=asked.experts,
            gate=replace(router.gate, out_features=asked.experts),
            top_k=asked.top_k,
            num_expert_groups=asked.groups,
            num_limited_groups=asked.groups_chosen,
            **dict(asked.extra),
        )
        built = module.build()
        width = 0 if built.shared_experts is None else len(built.shared_experts.w1.weight)
        return Settings(
            experts=len(built.router.gate.weight),
            top_k=built.router.top_k,
            groups=built.router.num_expert_groups,
            groups_chosen=built.router.num_limited_groups,
            shared_experts=width // self._config.ffn,
        )

    def build(self, asked: Settings, layers: int) -> Any:
        """Refuse: there is no change to build for."""
        del asked, layers
        raise Unsupported("torchtitan has no way to change the configuration of layers that are built")

    def change(self, built: Any, to: Settings) -> None:
        """Never called."""

    def shown(self, built: Any) -> Sequence[Settings]:
        """Never called."""
        del built
        return ()
