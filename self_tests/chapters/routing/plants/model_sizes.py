"""ROUTE: routers of the sizes of real models, and combinations of options that others have one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.router.routing import Router
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


@planted(Expectation("ROUTE-01", "route-top-10-of-512-sigmoid-groups-topk-sum-bfloat16", "route", "rank 0"))
class RoomForScores(Router):
    """A buffer of scores has room for 384 experts."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        room_E = torch.arange(logits_TE.shape[1]) < 384
        return super()._scores(logits_TE).where(room_E, -torch.inf)


_BIASED_MAX = "route-top-4-of-60-softmax-topk-normalised-biased-groups-max-float64"


@planted(Expectation("ROUTE-04", _BIASED_MAX, "route", "the groups were scored without the expert bias"))
class BestOfAGroupWithoutBias(Router):
    """Where a group counts by its best expert, that expert is found without the bias."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, selected: int) -> Tensor:
        masked_TE = super()._mask_groups(choice_TE, groups, selected)
        if self.config.routing.group_score != "max" or self.balance_bias is None:
            return masked_TE
        bare_TE = super()._mask_groups(choice_TE - self.balance_bias, groups, selected)
        return choice_TE.masked_fill(bare_TE == -torch.inf, -torch.inf)


@planted(
    Expectation("ROUTE-03", "route-near-biases-bfloat16", "route", "the expert bias was rounded to torch.bfloat16"),
    layout=SINGLE,
)
class BiasOfTheTokens(Router):
    """The expert bias is added in the dtype of the tokens."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.balance_bias is not None:
            self.balance_bias.copy_(self.balance_bias.to(self.config.dtype))
        return super()._select(scores_TE)
