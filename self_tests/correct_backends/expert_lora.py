"""Experts fine-tuned by low-rank additions (LoRA): their own weights are frozen, the additions begin at 0."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.contract import Claims, Config
from self_tests.correct_backends.small_parts import AdaptedExperts, SmallBackend, SmallSession, SwiGLU, share

RANK, SCALE = 4, 2.0


class LowRank(nn.Module):
    """What is added to the products with a stack of weights (N, out, in): scale * B (A x), B = 0 at first."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        N, out, into = weight.shape
        self.a = nn.Parameter(torch.randn(N, RANK, into, dtype=weight.dtype) / into**0.5)
        self.b = nn.Parameter(torch.zeros(N, out, RANK, dtype=weight.dtype))

    def forward(self, n: int, rows: Tensor) -> Tensor:
        added: Tensor = SCALE * F.linear(F.linear(rows, self.a[n]), self.b[n])
        return added


class TunedExperts(SwiGLU):
    """Frozen experts with an addition to each of their three products."""

    def __init__(self, ids: range, config: Config) -> None:
        super().__init__(ids, config)
        self.requires_grad_(False)
        self.lora1, self.lora3, self.lora2 = (LowRank(weight) for weight in (self.w1, self.w3, self.w2))

    def one(self, n: int, rows: Tensor) -> Tensor:
        gate: Tensor = F.linear(rows, self.w1[n]) + self.lora1(n, rows)
        up = F.linear(rows, self.w3[n]) + self.lora3(n, rows)
        inner = F.silu(gate) * up
        out: Tensor = F.linear(inner, self.w2[n]) + self.lora2(n, inner)
        return out


class AdaptedTuned(AdaptedExperts):
    """The experts, which say that their own weights are frozen."""

    claims = Claims(frozen="experts")


class TunedSession(SmallSession):
    """One topology on one rank."""

    def build_experts(self, config: Config) -> AdaptedExperts:
        return AdaptedTuned(TunedExperts(share(config.experts, self.ep), config))


class Tuned(SmallBackend):
    """What `--backend self_tests.correct_backends.expert_lora:Tuned` names."""

    name, session = "expert-lora", TunedSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
