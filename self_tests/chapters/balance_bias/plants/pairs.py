"""BIAS: bugs that show where two options meet, each of which is right alone."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.quantile_balancing import QuantileRouters
from self_tests.planted_bugs.plant import SINGLE, TP2_EP2, Expectation, planted


@planted(Expectation("BIAS-11", "pairs-bias-5", "finish", "moved the bias"), layout=TP2_EP2)
class SoftmaxMovedTwice(BalancingRouters):
    """Of scores that add up to 1 the bias is moved by twice the rate."""

    def change(self, n_E: Tensor) -> Tensor:
        twice = self.config.routing.score == "softmax" and self.config.balance.rule == "sign"
        return super().change(n_E) * (2 if twice else 1)


@planted(Expectation("BIAS-12", "pairs-bias-10", "finish", "outside the two quantiles"), layout=SINGLE)
class QuantilesOfTheLastLayer(QuantileRouters):
    """Scores of all layers are kept for the last one."""

    def count(self, number: int, load_E: Tensor) -> None:
        super().count(len(self.scores) - 1, load_E)


@planted(Expectation("BIAS-06", "pairs-bias-2", "finish", "the counters of router 0 hold"))
class EvaluationCountedWhereRecomputed(BalancingRouters):
    """With recomputation a forward counts wherever gradients are recorded, in evaluation too."""

    def counts(self) -> bool:
        return super().counts() or (self.config.balance.recompute and not self.training)
