"""ROUTE: bugs in scores, selection and weights, and where a router computes in a wider dtype than its tokens have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Routed
from self_tests.planted_bugs.plant import SINGLE, TP2_EP2, Expectation, planted

# ---- selection -----------------------------------------------------------------------------------------------------


@planted(Expectation("ROUTE-01", "route-softmax", "route", "rank 0 token 0 selected", "instead of", "margin -0."))
class BestPassedOver(Router):
    """The choice begins at the second best."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        return super()._select(scores_TE.scatter(1, scores_TE.argmax(1, keepdim=True), -torch.inf))


@planted(
    Expectation("ROUTE-01", "route-softmax", "route", "rank 0 token 0 selected [", "is not 2 different experts of 8")
)
class BestTwice(Router):
    """The best expert is not masked out before the next is looked for."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        return super()._select(scores_TE)[:, :1].repeat(1, self.config.top_k)


@planted(
    Expectation("ROUTE-01", "route-near-ties", "route", "rank 0 token", "margin -0.0"),
    Expectation("ROUTE-02", "route-softmax", "route", "likely cause: it was computed with the precision of bfloat16"),
    Expectation(
        "ROUTE-11", "route-wide-float32", "route", "the logits of rank 0", "computed with the precision of bfloat16"
    ),
    real="pytorch/torchtitan commit ab5ed59f8 (#2389)",
)
class GateInBfloat16(Router):
    """The logits are computed in bfloat16 and look like float32 afterwards."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.bfloat16(), self.router_ED.bfloat16()).to(self.wide)


@planted(Expectation("ROUTE-01", "route-near-ties", "route", "rank 0 token", "margin -0.0"))
class ChoiceInBfloat16(Router):
    """The choice is made by scores that were rounded to bfloat16; the weights are not."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        return super()._select(scores_TE.bfloat16())


@planted(
    Expectation("ROUTE-04", "route-groups-top2", "route", "likely cause: the groups were scored by max"),
    real="vllm-project/vllm PR #13474",
)
class GroupsByTheirBest(Router):
    """A group is worth its best expert where its best two were asked for."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        best_TG = choice_TE.reshape(-1, groups, self.config.experts // groups).amax(2)
        shut_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, best_TG.topk(chosen, dim=1).indices, False)
        return choice_TE.masked_fill(shut_TG.repeat_interleave(self.config.experts // groups, dim=1), -torch.inf)


@planted(
    Expectation("ROUTE-04", "route-groups-top2", "route", "likely cause: experts of unselected groups had the score 0"),
    real="vllm-project/vllm PR #13474",
)
class ClosedGroupsAtZero(Router):
    """Experts of closed groups count as 0, and that beats a negative score."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        masked_TE = super()._mask_groups(choice_TE, groups, chosen)
        return masked_TE.masked_fill(masked_TE == -torch.inf, 0.0)


@planted(
    Expectation("ROUTE-09", "route-softmax", "route", "rank 0 reports the load", "as its tokens selected"),
    real="deepspeedai/DeepSpeed commit 5a2e705b8 (#5156)",
)
class LoadOfFirstChoices(Router):
    """The load counts first choices alone."""

    def forward(self, x: Tensor) -> Routed:
        routed = super().forward(x)
        return replace(routed, counts_E=torch.bincount(routed.routing.ids_TK[:, 0], minlength=self.config.experts))


@planted(
    Expectation("ROUTE-09", "route-softmax", "route", "rank 0 reports the load", "as its tokens selected"),
    real="pytorch/torchtitan commit 2bfcdd8e1 (#1593)",
)
class LoadOfRecompute(Router):
    """A forward that is computed again is counted again."""

    def forward(self, x: Tensor) -> Routed:
        first, again = super().forward(x), super().forward(x)
        return replace(again, counts_E=first.counts_E + again.counts_E)


# ---- weights -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("ROUTE-02", "route-softmax", "route", "likely cause: the weights were the raw logits"),
    real="sgl-project/sglang PR #35160",
)
class RawLogits(Router):
    """The softmax is taken on the way to normalised weights only; without, logits are returned as weights."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return super()._scores(logits_TE) if self.config.routing.normalise else logits_TE


@planted(
    Expectation("ROUTE-02", "route-softmax-topk", "route", "softmax over all experts"),
    real="NVIDIA/Megatron-LM issue #955",
)
class SoftmaxBeforeTheChoice(Router):
    """A softmax that was asked for over the chosen experts is taken over all of them."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config.changed({"routing.score": config.routing.score.removesuffix("_topk")}), device)


class BiasedRouter(Router):
    """Native's router, for plants in the balancing bias: zero where there is none."""

    @property
    def _bias(self) -> Tensor | float:
        return 0.0 if self.balance_bias is None else self.balance_bias


@planted(
    Expectation("ROUTE-03", "route-sigmoid-biased", "route", "likely cause: the weights included the expert bias"),
    real="NVIDIA/Megatron-LM commit 4ca43093f8, mended by eec34ff3ae (!3209)",
)
class BiasInWeights(BiasedRouter):
    """The balancing bias is added in place to the scores that become weights."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(scores_TE + self._bias, ids_TK)


@planted(
    Expectation("ROUTE-03", "route-sigmoid-biased", "route", "likely cause: the expert bias was added to the logits"),
    real="NVIDIA/Megatron-LM commit 4ca43093f8, mended by eec34ff3ae (!3209)",
)
class BiasOnLogits(BiasedRouter):
    """The balancing bias is added in front of the score function, not behind it."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return super()._logits(x_TD) + self._bias

    def _select(self, scores_TE: Tensor) -> Tensor:
        return super()._select(scores_TE - self._bias)  # native adds it here


@planted(
    Expectation("ROUTE-05", "route-softmax-normalised", "route", "likely cause: the weights were not normalised"),
    real="pytorch/torchtitan commit 93a236ccd (#1419)",
)
class NotNormalised(Router):
    """Scores are returned without division by their sum."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config.changed({"routing.normalise": False}), device)


@planted(
    Expectation("ROUTE-02", "route-softmax", "route", "likely cause: the weights were normalised"),
    real="flashinfer-ai/flashinfer PR #2889",
)
class AlwaysNormalised(Router):
    """The flag that asks for normalisation is dropped on the way and always true."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config.changed({"routing.normalise": True}), device)


@planted(Expectation("ROUTE-05", "route-small-scores", "route", "weight"))
class SumNoLessThanEpsilon(Router):
    """The sum of the chosen scores, which may be smaller, is taken for 1e-9 at least, not only guarded against zero."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        if not self.config.routing.normalise:
            return super()._weights(scores_TE, ids_TK)
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(1e-9) * self.config.routing.scale


@planted(Expectation("ROUTE-05", "route-sigmoid-normalised-scaled", "route", "divided by the sum over all experts"))
class NormalisedOverAll(Router):
    """Scores are divided by their sum over all experts, not over the chosen."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        if not self.config.routing.normalise:
            return super()._weights(scores_TE, ids_TK)
        return (scores_TE / scores_TE.sum(1, keepdim=True)).gather(1, ids_TK) * self.config.routing.scale


@planted(
    Expectation("ROUTE-06", "route-softmax-scaled", "route", "likely cause: the weights were scaled twice"),
    real="vllm-project/vllm PRs #24119, #45037",
)
class ScaledTwice(Router):
    """The scaling factor is folded into the weights, and multiplied once more."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(scores_TE, ids_TK) * self.config.routing.scale


@planted(
    Expectation("ROUTE-06", "route-softmax-scaled", "route", "likely cause: the weights were not scaled"),
    real="sgl-project/sglang-jax PR #1282",
)
class ScaledIfNormalised(Router):
    """The multiplication stands in the branch that normalises."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config if config.routing.normalise else config.changed({"routing.scale": 1.0}), device)


# ---- gradients -----------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "ROUTE-07",
        "route-softmax-normalised",
        "gradient",
        "likely cause: the sum of the normalisation was treated as a constant",
    )
)
class DenominatorDetached(Router):
    """No gradient flows through the sum that normalises."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = super()._weights(scores_TE, ids_TK)
        if not self.config.routing.normalise:
            return weights_TK
        sum_T1 = scores_TE.gather(1, ids_TK).sum(1, keepdim=True)
        return weights_TK * sum_T1 / sum_T1.detach()


@planted(Expectation("ROUTE-07", "route-softmax", "gradient", "dx of rank 0 is None"))
class InputDetached(Router):
    """The router sees a copy of x without history."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return super()._logits(x_TD.detach())


@planted(
    Expectation("ROUTE-08", "route-softmax", "finish", "only the tokens of", "the gradient of router on rank 0 is"),
    real="pytorch/torchtitan commit de329200b (#2416)",
    layout=TP2_EP2,
)
class NotReducedOverTp(GradientFinisher):
    """Tensor parallel ranks keep the router gradients of their own tokens."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        return super()._summed(gradient, tuple(name for name in replicas if name != "tp"))


@planted(
    Expectation(
        "ROUTE-08",
        "route-softmax",
        "finish",
        "it contains only the tokens of its own rank (it was not reduced over ranks)",
    )
)
class RouterNotReduced(GradientFinisher):
    """The router is left out of the reduction."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        return gradient if "tp" in replicas else super()._summed(gradient, replicas)


@planted(Expectation("ROUTE-01", "route-in-flight", "run", "raised in forward:1", "scores is in use"))
class RaisesEverySecondTime(Router):
    """A buffer of scores is claimed by every other forward and freed by the next, which raises."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        self.claimed = not getattr(self, "claimed", False)
        if not self.claimed:
            raise RuntimeError("the buffer of scores is in use")
        return super()._select(scores_TE)


@planted(
    Expectation("ROUTE-11", "route-wide-float64", "route", "the weights", "computed with the precision of float32")
)
class ScoresInFloat32(Router):
    """The gate multiplies in float64, as it is asked to, and the scores are always computed in float32."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return super()._scores(logits_TE.float()).to(self.wide)


@planted(
    Expectation("ROUTE-11", "layer-wide-router-even-bfloat16", "combine", "y of rank 0 is torch.float32"), layout=SINGLE
)
class WideBehindTheRouter(Layer):
    """Rows are multiplied by weights of the router's dtype, and stay in that."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.config.router_dtype is None else y.to(torch.promote_types(y.dtype, self.config.router_dtype))


@planted(Expectation("ROUTE-08", "route-softmax", "finish", "0.500 x the expected value"), layout=TP2_EP2)
class RouterDividedByTp(GradientFinisher):
    """Router gradients are averaged over tensor parallel ranks, whose tokens are other ones."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        summed = super()._summed(gradient, replicas)
        return summed / self.topology.sizes["tp"] if "tp" in replicas else summed
