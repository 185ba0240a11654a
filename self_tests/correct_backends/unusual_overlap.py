"""Steps of several microbatches that do not overlap: those that say so must pass, and `ClaimsMore` must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.layer.overlapped_step import OverlappedStep
from moe_conformance.contract import Claims, Config, Unsupported


class _AllForwardsFirst(OverlappedStep):
    @property
    def resolved(self) -> Mapping[str, str]:
        return {**super().resolved, "overlap": "no", "schedule": "all forwards first"}

    @property
    def claims(self) -> Claims:
        return replace(super().claims, overlap="no")

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = [self._through(x) for x in xs]
        for y, upstream in reversed(list(zip(ys, upstreams, strict=True))):
            torch.autograd.backward(y, upstream)
        return ys

    def _through(self, y: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(y)
        return y


class _Session(NativeSession.building(_AllForwardsFirst)):  # type: ignore[misc]
    def overlapped_step(self, config: Config) -> OverlappedStep:
        if config.overlap.deferred_weights or config.overlap.recompute_experts:
            raise Unsupported("gradients are computed where autograd reaches them")
        step: OverlappedStep = super().overlapped_step(config)
        return step


class AllForwardsFirst(Native):
    """All forwards run first, then all backwards, that of the last microbatch first; no exchange is in flight."""

    session_class = _Session


class _ClaimedEverywhere(OverlappedStep):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, overlap="yes")


class ClaimsMore(Native):
    """Claims overlap on every layout; with ep = 1 and etp > 1 it waits for each collective where it calls it."""

    session_class = NativeSession.building(_ClaimedEverywhere)
