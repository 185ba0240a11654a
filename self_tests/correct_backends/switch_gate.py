"""A gate that divides weights by their sum with several choices only: one choice keeps its score, which trains it."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moe_conformance.contract import Claims, Config, Unsupported
from self_tests.correct_backends.small_parts import AdaptedGate, Gate, SmallBackend, SmallSession


class SwitchGate(Gate):
    """With K = 1 the weight is the score, whether weights are normalised or not: 1 would have no gradient.

    Scores are the softmax over all experts or, where `sigmoid`, that of each expert alone.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sigmoid = config.routing.score == "sigmoid"

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid() if self.sigmoid else logits_TE.softmax(1)

    def weighed(self, weights_TK: Tensor) -> Tensor:
        if self.normalise and self.top_k > 1:
            return weights_TK / weights_TK.sum(1, keepdim=True)
        return weights_TK


class AdaptedSwitch(AdaptedGate):
    """The gate."""

    claims = Claims(top_1="score")


class SwitchSession(SmallSession):
    """One topology on one rank."""

    def build_gate(self, config: Config) -> AdaptedGate:
        if config.routing.score not in ("softmax", "sigmoid"):
            raise Unsupported(f"scores are softmax or sigmoid, not {config.routing.score}")
        return AdaptedSwitch(SwitchGate(config))

    def router(self, config: Config) -> AdaptedGate:
        return self.build_gate(config.only("experts", "top_k", "hidden", "dtype", "routing.normalise", "routing.score"))


class Switch(SmallBackend):
    """What `--backend self_tests.correct_backends.switch_gate:Switch` names."""

    name, session = "switch-gate", SwitchSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
