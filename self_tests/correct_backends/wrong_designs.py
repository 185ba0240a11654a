"""Designs of this folder with a mistake, or with a claim that is not true: each must be detected."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Claims, Config, Delivery, Routing
from self_tests.correct_backends.all_reduced_outputs import Reduced, ReducedExchange, ReducedSession
from self_tests.correct_backends.expert_lora import AdaptedTuned, Tuned, TunedSession
from self_tests.correct_backends.replicated_experts import BalancedExchange, Replicated, ReplicatedSession
from self_tests.correct_backends.scaled_gradients import Scaled, ScaledExchange, ScaledSession
from self_tests.correct_backends.small_parts import (
    AdaptedExperts,
    AdaptedGate,
    Gate,
    PairExchange,
    SwiGLU,
    gradients,
    share,
)
from self_tests.correct_backends.switch_gate import AdaptedSwitch, Switch, SwitchGate, SwitchSession

# ---- replicas ------------------------------------------------------------------------------------------------


class _ToAll(BalancedExchange):
    """Every pair is sent a second time, with the weight 0, to the other copy of its expert."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_TJ = torch.cat([routing.ids_TK, torch.where(self._copied(routing.ids_TK), routing.ids_TK, -1)], 1)
        weights_TJ = torch.cat([routing.weights_TK, torch.zeros_like(routing.weights_TK)], 1)
        return super().dispatch(x, Routing(ids_TJ, weights_TJ, routing.experts))

    def turns(self, ids_TK: Tensor) -> Tensor:
        K = ids_TK.shape[1] // 2
        return super().turns(ids_TK) + torch.arange(2).repeat_interleave(K)

    def _copied(self, ids_TK: Tensor) -> Tensor:
        return (ids_TK >= 0) & (self.copies_E[ids_TK.clamp_min(0)] > 1)


class _Unsaid(BalancedExchange):
    """The placement is not claimed."""

    claims = Claims()


class _ToAllSession(ReplicatedSession):
    def build_exchange(self, config: Config) -> BalancedExchange:
        return _ToAll(config, self.ep)


class _UnsaidSession(ReplicatedSession):
    def build_exchange(self, config: Config) -> BalancedExchange:
        return _Unsaid(config, self.ep)


class _OwnGradients(ReplicatedSession):
    """Every copy of an expert keeps the gradient of the tokens that came to it."""

    def finish_experts(self, experts: Any) -> None:
        for gradient in gradients(experts):
            dist.all_reduce(gradient, group=self.topology.group("edp"))


class ToAllReplicas(Replicated):
    """Rows reach both copies of an expert."""

    session = _ToAllSession


class ReplicasUnsaid(Replicated):
    """Copies of an expert on several ranks, and no claim."""

    session = _UnsaidSession


class ReplicasApart(Replicated):
    """Gradients of copies are not added up."""

    session = _OwnGradients


# ---- scaled gradients ----------------------------------------------------------------------------------------


class _ScaledUnsaid(ScaledExchange):
    claims = Claims()


class _NeverUndone(ScaledExchange):
    """What the backward of combine divides by is not multiplied again in that of dispatch."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return PairExchange.dispatch(self, x, routing)


class _NeverScaled(_NeverUndone):
    """Claims to scale and does not."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return PairExchange.combine(self, rows, handle)


class _ScaledUnsaidSession(ScaledSession):
    def build_exchange(self, config: Config) -> ScaledExchange:
        return _ScaledUnsaid(config, self.ep)


class _NeverUndoneSession(ScaledSession):
    def build_exchange(self, config: Config) -> ScaledExchange:
        return _NeverUndone(config, self.ep)


class _NeverScaledSession(ScaledSession):
    def build_exchange(self, config: Config) -> ScaledExchange:
        return _NeverScaled(config, self.ep)


class ScaledUnsaid(Scaled):
    """The scale is not claimed."""

    session = _ScaledUnsaidSession


class NeverUndone(Scaled):
    """The gradients of tokens are divided by ep."""

    session = _NeverUndoneSession


class NeverScaled(Scaled):
    """The scale is claimed, and there is none."""

    session = _NeverScaledSession


# ---- outputs by an all-reduce --------------------------------------------------------------------------------


class _ReducedUnsaid(ReducedExchange):
    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        super().__init__(config, group)
        self.claims = Claims(wire="all", handed="tokens", padding="group_max", alignment=1)


class _SaysReduced(PairExchange):
    claims = Claims(combined="all_reduced")


class _ReducedUnsaidSession(ReducedSession):
    def build_exchange(self, config: Config) -> ReducedExchange:
        return _ReducedUnsaid(config, self.ep)


class _SaysReducedSession(SwitchSession):
    def build_exchange(self, config: Config) -> PairExchange:
        return _SaysReduced(config, self.ep)


class ReducedUnsaid(Reduced):
    """The all-reduce is not claimed."""

    session = _ReducedUnsaidSession


class SaysReduced(Switch):
    """Pairs are sent back, and an all-reduce is claimed."""

    session = _SaysReducedSession


# ---- one choice ----------------------------------------------------------------------------------------------


class _SwitchUnsaidSession(SwitchSession):
    def build_gate(self, config: Config) -> AdaptedGate:
        return AdaptedGate(SwitchGate(config))


class _WeighsOne(SwitchGate):
    def weighed(self, weights_TK: Tensor) -> Tensor:
        return Gate.weighed(self, weights_TK)


class _WeighsOneSession(SwitchSession):
    def build_gate(self, config: Config) -> AdaptedGate:
        return AdaptedSwitch(_WeighsOne(config))


class SwitchUnsaid(Switch):
    """That one choice keeps its score is not claimed."""

    session = _SwitchUnsaidSession


class WeighsOne(Switch):
    """It is claimed, and the weight is 1."""

    session = _WeighsOneSession


# ---- frozen experts ------------------------------------------------------------------------------------------


class _TunedUnsaidSession(TunedSession):
    def build_experts(self, config: Config) -> AdaptedExperts:
        return AdaptedExperts(super().build_experts(config).module)


class _TrainsSession(TunedSession):
    def build_experts(self, config: Config) -> AdaptedExperts:
        return AdaptedTuned(SwiGLU(share(config.experts, self.ep), config))


class TunedUnsaid(Tuned):
    """That the experts are frozen is not claimed."""

    session = _TunedUnsaidSession


class Trains(Tuned):
    """It is claimed, and they are trained."""

    session = _TrainsSession
