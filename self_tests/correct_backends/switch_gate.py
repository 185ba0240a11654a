"""A gate that divides weights by their sum with several choices only: one choice keeps its score, which trains it."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moe_conformance.contract import Config
from self_tests.correct_backends.small_parts import AdaptedGate, Gate, SmallBackend, SmallSession


class SwitchGate(Gate):
    """With K = 1 the weight is the score, whether weights are normalised or not: 1 would have no gradient."""

    def weighed(self, weights_TK: Tensor) -> Tensor:
        if self.normalise and self.top_k > 1:
            return weights_TK / weights_TK.sum(1, keepdim=True)
        return weights_TK


class SwitchSession(SmallSession):
    """One topology on one rank."""

    def build_gate(self, config: Config) -> AdaptedGate:
        return AdaptedGate(SwitchGate(config))


class Switch(SmallBackend):
    """What `--backend self_tests.correct_backends.switch_gate:Switch` names."""

    name, session = "switch-gate", SwitchSession
    judged: Mapping[int, int] = {1: 1, 2: 1, 4: 1}
