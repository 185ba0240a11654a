"""Correct ways to resolve settings, other than native's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.deferred import WeightGradients
from moe_conformance.backends.native.layer.overlapped_pass import LayerPass
from moe_conformance.backends.native.layer.overlapped_step import OverlappedStep
from moe_conformance.contract import Claims, Config, Settings, Unsupported, VersionLimit
from moe_conformance.contract import OverlappedStep as Step


class _OneAfterTheOther(OverlappedStep):
    """The step without overlap: deferred gradients are computed while those of the inputs are sent."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, overlap="no")

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = []
        with self._putting_off():
            for x_TD, upstream_TD in zip(xs, upstreams, strict=True):
                passes = self._passes_of_all()
                ys.append(self._in_turn(self._forward(x_TD, passes)))
                self._in_turn(self._backward(x_TD, upstream_TD, passes))
        return ys


class _Honouring(ConfigRules):
    def runs(self, s: Settings) -> None:
        none = replace(s, recompute="none", recompute_method=None, recompute_layers=None, recompute_modules=())
        super().runs(replace(none if self.recomputes(s) else s, overlap=True))

    def recomputes(self, s: Settings) -> bool:
        return s.recompute == "full" or "moe" in s.recompute_modules

    def step_config(self, s: Settings) -> Config:
        return super().step_config(s).changed({"overlap.recompute_experts": self.recomputes(s)})

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        assert isinstance(step, OverlappedStep)
        return step if asked.overlap else _OneAfterTheOther(step.config, step.layers, LayerPass, WeightGradients)

    def overlap_exchange(self, s: Settings) -> None: ...

    def overlap_recomputation(self, s: Settings) -> None: ...

    def overlap_model(self, s: Settings) -> None: ...

    def deferral(self, s: Settings) -> None: ...

    def overlap_layout(self, s: Settings) -> None:
        super().overlap_layout(replace(s, virtual_stages=2))


class _Replacing(ConfigRules):
    def opened(self, asked: Settings) -> Settings:
        ran = asked
        if asked.overlap and (asked.ep == 1 or (asked.experts or 0) < 2 or asked.overlap_shared):
            ran = self.told(replace(ran, overlap=False), "overlap is off")
        if ran.overlap_shared and not ran.shared_experts:
            ran = self.told(replace(ran, overlap_shared=False), "overlap of shared experts is off")
        if asked.kernel and asked.dispatcher != "fused":
            ran = self.told(replace(ran, dispatcher="fused"), "the dispatcher is fused, for its kernel")
        if ran.kernel == "absent":
            ran = self.told(replace(ran, dispatcher="alltoall", kernel=None), "the dispatcher is alltoall")
        return ran

    def told(self, s: Settings, text: str) -> Settings:
        logging.getLogger(__name__).warning(text)
        warnings.warn("a warning of every build", stacklevel=2)
        return s


class _Refusing(ConfigRules):
    def opened(self, asked: Settings) -> Settings:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                return super().opened(asked)
            except UserWarning as warning:
                raise CannotBuild(str(warning)) from None


class _Fixed(ConfigRules):
    def change(self, built: list[Any], to: Settings) -> None:
        raise CannotBuild("layers cannot be changed")

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        if asked.versions:
            raise Unsupported("the versions that are installed count")
        return super().limits(asked)


class Honouring(Native):
    """Overlap and deferral go with everything, as long as there is something to overlap."""

    session_class = NativeSession.building(_Honouring)


class Replacing(Native):
    """What cannot be had is switched off or replaced as a whole, and logged every time."""

    session_class = NativeSession.building(_Replacing)


class Refusing(Native):
    """What has no effect is an error as well."""

    session_class = NativeSession.building(_Refusing)


class Fixed(Native):
    """Layers cannot be changed after building, and installed versions are those that count."""

    session_class = NativeSession.building(_Fixed)
