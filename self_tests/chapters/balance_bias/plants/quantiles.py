"""BIAS: bugs of balance biases that are set to quantiles of the step's scores."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from torch import Tensor

from moe_conformance.backends.native.router.quantile_balancing import QuantileRouters
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted

_OUTSIDE = "outside of what gives every expert its share"


@planted(
    Expectation("BIAS-12", "bias-quantile", "finish", _OUTSIDE, "every rank takes quantiles of its own tokens"),
    layout=EP2,
)
class QuantilesOfOneRank(QuantileRouters):
    """Every rank takes quantiles of the scores of its own tokens."""

    def gathered(self, own_VE: Tensor) -> Tensor:
        return own_VE


@planted(
    Expectation("BIAS-12", "bias-quantile-padding", "finish", _OUTSIDE, "padding tokens are counted"), layout=SINGLE
)
class QuantilesOfPadding(QuantileRouters):
    """Scores of padding are kept as those of other tokens."""

    def valid(self, scores_TE: Tensor, padding_mask_T: Tensor | None) -> Tensor:
        return scores_TE


@planted(Expectation("BIAS-12", "bias-quantile", "finish", _OUTSIDE, "the last microbatch alone"), layout=SINGLE)
class QuantilesOfTheLastMicrobatch(QuantileRouters):
    """The scores of a microbatch take the place of those before it."""

    def count(self, number: int, load_E: Tensor) -> None:
        super().count(number, load_E)
        self.scores[number] = self.scores[number][-1:]


@planted(Expectation("BIAS-12", "bias-quantile", "finish", _OUTSIDE), layout=SINGLE)
class OneTokenTooMany(QuantileRouters):
    """The share is taken for K + 1 slots of a token."""

    def balanced(self, scores_VE: Tensor, bias_E: Tensor) -> Tensor:
        V, E = scores_VE.shape
        cutoff_V = (scores_VE + bias_E).sort(1, descending=True).values[:, self.config.top_k]
        over_VE = (scores_VE - cutoff_V[:, None]).sort(0, descending=True).values
        return -over_VE[min(V - 1, (self.config.top_k + 1) * V // E)]
