"""Parameters and their gradients are float32, whatever the tokens are: a forward computes with rounded copies."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Config
from self_tests.correct_backends.small_parts import (
    AdaptedExperts,
    AdaptedGate,
    Gate,
    SmallBackend,
    SmallSession,
    SwiGLU,
    share,
)


class RoundedExperts(SwiGLU):
    """Experts that compute in the dtype of their rows; the backward of a cast returns float32 gradients."""

    def one(self, n: int, rows: Tensor) -> Tensor:
        w1, w3, w2 = (each[n].to(rows.dtype) for each in (self.w1, self.w3, self.w2))
        return F.linear(F.silu(F.linear(rows, w1)) * F.linear(rows, w3), w2)


def stored(config: Config) -> Config:
    """Return the config with the dtype of the parameters."""
    return replace(config, dtype=torch.promote_types(config.dtype, torch.float32))


class MasterSession(SmallSession):
    """One topology on one rank."""

    def build_experts(self, config: Config) -> AdaptedExperts:
        return AdaptedExperts(RoundedExperts(share(config.experts, self.ep), stored(config)))

    def build_gate(self, config: Config) -> AdaptedGate:
        return AdaptedGate(Gate(stored(config)))


class Masters(SmallBackend):
    """What `--backend self_tests.correct_backends.float32_masters:Masters` names."""

    name, session = "float32-masters", MasterSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
