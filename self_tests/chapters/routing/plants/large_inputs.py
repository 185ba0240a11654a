"""ROUTE: bugs at large logits and sizes of real models, with no tokens, oblong groups, and options that meet."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Routed
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

# ---- large logits --------------------------------------------------------------------------------------------------


@planted(Expectation("ROUTE-02", "route-large-logits", "route", "nan instead of 1 at [0] (not finite)"))
class MaximumNotSubtracted(Router):
    """The softmax divides exponentials as they are, and those of large logits are infinite."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.config.routing.score != "softmax":
            return super()._scores(logits_TE)
        exp_TE = logits_TE.exp()
        return exp_TE / exp_TE.sum(1, keepdim=True)


@planted(
    Expectation("ROUTE-07", "route-large-logits-sqrtsoftplus", "gradient", "dx of rank 0 token 3 is nan instead of")
)
class SlopeOfRootInfinite(Router):
    """The square root of a softplus that underflows to zero has no finite slope, and the gradient is NaN."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.config.routing.score != "sqrtsoftplus":
            return super()._scores(logits_TE)
        return F.softplus(logits_TE).sqrt()


# ---- many experts, groups ------------------------------------------------------------------------------------------


@planted(Expectation("ROUTE-01", "route-many-experts", "route", "is not 8 different experts of 256"))
class IdsInInt8(Router):
    """Expert ids pass through signed bytes, and those above 127 become negative."""

    def forward(self, x: Tensor) -> Routed:
        routed = super().forward(x)
        ids_TK = routed.routing.ids_TK.to(torch.int8).long()
        return replace(routed, routing=replace(routed.routing, ids_TK=ids_TK))


@planted(Expectation("ROUTE-12", "route-ties", "route", "run with the tokens of rank 0 on every rank, rank 1 token"))
class TiesByRank(Router):
    """Every other rank takes the last of experts that score the same, where the others take the first."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if dist.get_rank() % 2 == 0 or self.config.routing.groups is not None:
            return super()._select(scores_TE)
        choice_TE = scores_TE.detach() if self.balance_bias is None else scores_TE.detach() + self.balance_bias
        return self.config.experts - 1 - choice_TE.flip(1).topk(self.config.top_k, dim=1).indices


@planted(Expectation("ROUTE-04", "route-groups-top2", "route", "rank 0 token 0 selected", "margin -inf"))
class GroupAxesExchanged(Router):
    """Scores are shaped to (experts of a group, groups): as if members of a group were far apart."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        apart_E = torch.arange(self.config.experts).reshape(-1, groups).T.flatten()
        return super()._mask_groups(choice_TE[:, apart_E], groups, chosen)[:, apart_E.argsort()]


@planted(Expectation("ROUTE-03", "route-sigmoid-biased-upwards", "route", "likely cause: the expert bias was left out"))
class PositiveBiasIgnored(Router):
    """The balancing bias only holds experts back, it never helps one."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.balance_bias is not None:
            scores_TE = scores_TE - self.balance_bias.clamp_min(0)  # native adds the whole of it
        return super()._select(scores_TE)


# ---- no tokens, two microbatches -----------------------------------------------------------------------------------


@planted(
    Expectation(
        "ROUTE-02", "route-rank-without-tokens", "run", "rank 1 raised in forward:0: RuntimeError", "0 elements"
    )
)
class ExpertsInferredFromSize(Router):
    """The logits are reshaped with a dimension to be inferred, and without tokens none can be."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return super()._scores(logits_TE.reshape(len(logits_TE), -1))


@planted(Expectation("ROUTE-09", "route-in-flight", "route", "rank 0 reports the load", "as its tokens selected"))
class LoadNeverReset(Router):
    """The load is added up over microbatches where that of each was asked for."""

    load_E: Tensor | int = 0

    def forward(self, x: Tensor) -> Routed:
        routed = super().forward(x)
        self.load_E = self.load_E + routed.counts_E
        return replace(routed, counts_E=self.load_E)


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
