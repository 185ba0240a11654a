"""Resolve settings by DeepSpeed: build an MoE layer on one rank. The only other kernel of its exchange is Tutel's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from moe_conformance.backends.deepspeed import library
from moe_conformance.backends.deepspeed.placement import Placement, build
from moe_conformance.contract import Config, Settings, Unsupported, VersionLimit

_MAPPED = {"experts", "top_k", "dispatcher", "kernel", "extra"}


class ConfigRules:
    """Builds a layer of experts that compute nothing."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Keep the sizes of a layer."""
        self._config, self._placement = config, placement

    @property
    def resolved(self) -> Mapping[str, str]:
        """What is built."""
        return {"rules": "MoE"}

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        """Return none: the library documents none for a layer."""
        del asked
        return ()

    def resolve(self, asked: Settings) -> Settings:
        """Build the layer, and read its settings. The fused exchange is that of Tutel, if it is installed."""
        others = {field.name: field.default for field in fields(Settings) if field.name not in _MAPPED}
        if odd := [f"{name}={getattr(asked, name)!r}" for name in others if getattr(asked, name) != others[name]]:
            raise Unsupported(f"DeepSpeed's MoE layer has no option {', '.join(odd)}")
        if asked.experts is None:
            raise Unsupported("a DeepSpeed model without experts has no MoE layer")
        installed = "present" if library.sharded_moe.TUTEL_INSTALLED else "absent"
        exchange = asked.dispatcher, asked.kernel
        if exchange not in (("alltoall", None), ("fused", installed)):
            raise Unsupported(
                f"Tutel is {installed}, and there is no dispatcher {exchange[0]!r} of kernel {exchange[1]!r}"
            )
        layer = build(
            self._config.changed({"experts": asked.experts, "top_k": asked.top_k}),
            self._placement,
            nn.Identity(),
            use_tutel=exchange[0] == "fused",
            **dict(asked.extra),
        ).deepspeed_moe
        fused = layer.use_tutel
        return Settings(
            experts=len(layer.gate.wg.weight),
            top_k=layer.gate.k,
            dispatcher="fused" if fused else "alltoall",
            kernel="present" if fused else None,
        )

    def build(self, asked: Settings, layers: int) -> Any:
        """Refuse: there is no change to build for."""
        del asked, layers
        raise Unsupported("DeepSpeed has no way to change the configuration of layers that are built")

    def change(self, built: Any, to: Settings) -> None:
        """Never called."""

    def shown(self, built: Any) -> Sequence[Settings]:
        """Never called."""
        del built
        return ()
