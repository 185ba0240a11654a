"""LOSS: bugs in how losses are attached, scaled, recomputed, added over layers and reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.router.losses import Charged, RouterLosses, Tokens
from moe_conformance.backends.native.router.training import TrainingRouters
from moe_conformance.contract import Trained
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import EP2, SINGLE, TP2_EP2, Expectation, planted

CP2 = Layout(4, cp=2, ep=2)

# ---- scales ----------------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-12", "losses-auxiliary", "loss", "the gradient of the auxiliary loss is 2.000 x", ": tp or"),
    Expectation("LOSS-12", "losses-z", "loss", "the gradient of the z-loss is 2.000 x the expected value"),
    real="NVIDIA/Megatron-LM commit cac8d1a3f0",
    layout=TP2_EP2,
)
class OncePerTensorRank(TrainingRouters):
    """Every tp rank attaches the gradient of the whole loss."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        return super().factor(name, tokens) * self.topology.sizes["tp"]


@planted(
    Expectation("LOSS-12", "losses-auxiliary", "loss", "the gradient of the auxiliary loss is 0.500 x", "1/cp"),
    real="NVIDIA/Megatron-LM commit f6e0d425a5 (#2237)",
    layout=CP2,
)
class ContextRanksIgnored(TrainingRouters):
    """The main loss is multiplied by cp before gradients are averaged, and the losses are not."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        return super().factor(name, tokens) / self.topology.sizes["cp"]


@planted(
    Expectation("LOSS-13", "losses-per-token-auxiliary", "loss", "the auxiliary loss is 0.500 x", "1/tp"),
    real="NVIDIA/Megatron-LM commit 9ef8a2a420 (#5047)",
    layout=TP2_EP2,
)
class TokensOfOneRank(TrainingRouters):
    """A loss enters with the number of tokens of this rank's shard."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        shards = self.topology.sizes["tp"] * self.topology.sizes["cp"]
        return super().factor(name, tokens) / (shards if self.config.losses.per_token else 1)


@planted(
    Expectation("LOSS-13", "losses-per-token-auxiliary", "loss", "the gradient of the auxiliary loss is 0.063 x"),
    real="NVIDIA/Megatron-LM commit 87d9d2506a (!2851)",
    layout=SINGLE,
)
class TokensLeftOut(TrainingRouters):
    """Gradients are divided by the tokens of the step, and losses enter as if they were not."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        factor = super().factor(name, tokens)
        return factor / tokens.clamp_min(1) if self.config.losses.per_token else factor


@planted(
    Expectation(
        "LOSS-13", "losses-per-token-sequence", "loss", "0.250 x the expected value", "1/the number of sequences"
    ),
    real="NVIDIA/Megatron-LM commit e3fe5508c9 (#5798)",
    layout=SINGLE,
)
class PositionsForTokens(RouterLosses):
    """The sequence loss enters with the number of positions, not with that of tokens."""

    def charge(self, tokens: Tokens, counts_E: Tensor, before: Tensor) -> Charged:
        charged = super().charge(tokens, counts_E, before)
        weight = dict(charged.weight)
        if "sequence" in weight:
            weight["sequence"] = weight["sequence"] // tokens.sequences
        return replace(charged, weight=weight)


@planted(
    Expectation("LOSS-11", "losses-auxiliary", "loss", "2.000 x the expected value", "the number of microbatches"),
    Expectation("LOSS-11", "losses-z", "loss", "the gradient of the z-loss is 2.000 x the expected value"),
    layout=SINGLE,
)
class MicrobatchesAddUp(TrainingRouters):
    """Losses are not divided by the number of microbatches, and nothing says so."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        return super().factor(name, tokens) * (1 if self.config.losses.per_token else self.microbatches)


@planted(
    Expectation("LOSS-11", "losses-z", "loss", "are summed over", "and Claims.loss_gradients is 'mean'"),
    Expectation("LOSS-08", "losses-global", "loss", "are summed over", "and Claims.loss_gradients is 'mean'"),
)
class SummedSilently(TrainingRouters):
    """Losses are summed over microbatches and data parallel groups, and claimed to be averaged."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        return torch.full_like(super().factor(name, tokens), self.scale)


@planted(Expectation("LOSS-08", "losses-global", "loss", "the gradient of the global loss is 0.500 x", "1/dp"))
class GlobalLossDividedAgain(TrainingRouters):
    """The global loss, whose scores are a mean over data parallel ranks, is divided by their number again."""

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        again = self.topology.sizes["dp"] if name == "global_batch" and not self.config.losses.per_token else 1
        return super().factor(name, tokens) / again


# ---- attaching -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-04", "losses-auxiliary", "loss", "the gradient of the auxiliary loss is zero"),
    real="NVIDIA/Megatron-LM commit 15e75b0890",
    layout=SINGLE,
)
class AttachedToIds(TrainingRouters):
    """Losses are attached to the integer ids, which no backward passes."""

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        return weights_TK


class _Upstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.saved_tensors[0] * gradients[0].abs().mean(), None


@planted(
    Expectation("LOSS-10", "losses-attached", "loss", "the finished gradient of the router in step 1 is"), layout=SINGLE
)
class ScaledByUpstream(TrainingRouters):
    """The gradient of an attached loss is multiplied by what comes from above."""

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        attached: Tensor = _Upstream.apply(weights_TK, share, factor)  # type: ignore[no-untyped-call]
        return attached


@planted(
    Expectation("LOSS-10", "losses-attached", "loss", "a loss was added to them instead of attached"), layout=SINGLE
)
class AddedToWeights(TrainingRouters):
    """A loss is added to the routing weights and taken away again, which costs bits."""

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        attached = super().attach(weights_TK, share, factor)
        return attached + share.detach() - share.detach()


@planted(
    Expectation("LOSS-10", "losses-attached", "loss", "the gradient of all losses together is 2.000 x"), layout=SINGLE
)
class AttachedAndReturned(TrainingRouters):
    """Losses are attached, and returned for the caller to add."""

    def forward(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        self.returned: list[Tensor] = []
        trained = super().forward(x, padding_mask_T)
        return replace(trained, loss=torch.stack(self.returned).sum()) if self.returned else trained

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        self.returned.append(share)
        return super().attach(weights_TK, share, factor)


@planted(
    Expectation("LOSS-10", "losses-attached", "loss", "the finished gradient of the router in step 2 is", "0.250 x"),
    layout=SINGLE,
)
class ScaleIgnored(TrainingRouters):
    """The scale of the main loss is not applied to the losses."""

    def begin_step(self, microbatches: int, scale: float) -> None:
        super().begin_step(microbatches, 1.0)


# ---- recomputation, evaluation, layers, reports ----------------------------------------------------------------------


@planted(Expectation("LOSS-15", "losses-recomputed", "loss", "0.500 x the expected value"), layout=SINGLE)
class RecomputedAndCounted(TrainingRouters):
    """A report is divided by the number of forwards, and one that runs again in the backward is one more."""

    def _charged(self, *arguments: Any) -> Any:
        self.ran = getattr(self, "ran", 0) + 1
        return super()._charged(*arguments)

    def report(self) -> Mapping[str, Tensor]:
        self.charged, self.ran = self.ran, 0
        return super().report()


@planted(
    Expectation("LOSS-15", "losses-recomputed", "loss", "2.000 x the expected value"),
    layout=SINGLE,
    real="NVIDIA/Megatron-LM commit e6d56d6828 (!2574)",
)
class RecomputedAndReported(TrainingRouters):
    """A loss is added to the report by the forward, and once more where it runs again in the backward."""

    def _charged(self, *arguments: Any) -> Any:
        if (shares := getattr(self, "reported", None)) is not None:
            self.note(shares)
        return super()._charged(*arguments)

    def _train(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Any:
        self.reported: Mapping[str, Tensor] | None = None
        return super()._train(number, x, padding_mask_T)

    def note(self, shares: Mapping[str, Tensor]) -> None:
        super().note(shares)
        self.reported = shares


@planted(
    Expectation("LOSS-15", "losses-recomputed", "loss", "the finished gradient of the router in step"), layout=SINGLE
)
class RecomputedWithoutMask(TrainingRouters):
    """The forward that runs again in the backward has no padding mask."""

    def _charged(self, number: int, x: Tensor, padding_mask_T: Tensor | None, *more: Any) -> Any:
        ended = self.config.losses.recompute and getattr(self, "forwards_ended", False)
        return super()._charged(
            number,
            x,
            torch.zeros_like(padding_mask_T) if ended and padding_mask_T is not None else padding_mask_T,
            *more,
        )

    def _train(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Any:
        self.forwards_ended = False
        routed = super()._train(number, x, padding_mask_T)
        self.forwards_ended = True
        return routed


@planted(
    Expectation("LOSS-16", "losses-evaluation", "loss", "in which no forward trains; expected: nothing"),
    Expectation("LOSS-16", "losses-evaluation", "loss", "forwards in evaluation or without gradients were counted"),
    real="NVIDIA/Megatron-LM commit 650ae4178e",
    layout=SINGLE,
)
class ChargedInEvaluation(TrainingRouters):
    """Losses are computed and reported in evaluation as well."""

    def charges(self) -> bool:
        return True


@planted(
    Expectation("LOSS-18", "losses-layers", "loss", "rank 0 reports the auxiliary loss of step 0 as"),
    real="huggingface/transformers issues #28255, #31464",
    layout=SINGLE,
)
class LayersMixed(RouterLosses):
    """Slots of all layers are counted together."""

    before_E: Tensor | None = None

    def counts(self, ids_TK: Tensor, valid_T: Tensor) -> Tensor:
        n_E = super().counts(ids_TK, valid_T)
        mixed_E = n_E if self.before_E is None or self.config.losses.layers == 1 else (n_E + self.before_E) // 2
        self.before_E = n_E
        return mixed_E


@planted(
    Expectation("LOSS-18", "losses-layers", "loss", "the finished gradient of the router of layer 0 in"), layout=EP2
)
class LastLayerAlone(TrainingRouters):
    """Only the losses of the last layer are trained."""

    number = 0

    def _train(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Any:
        self.number = number
        return super()._train(number, x, padding_mask_T)

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        last = self.number == len(self.routers) - 1
        return super().attach(weights_TK, share, factor) if last else weights_TK


@planted(Expectation("LOSS-19", "losses-layers", "loss", "layers with a router over all layers"), layout=SINGLE)
class MeanOverAllLayers(TrainingRouters):
    """A report is divided by the number of all layers, also of those without a router."""

    def mean(self, name: str, share: Tensor) -> Tensor:
        losses = self.config.losses
        return super().mean(name, share) * losses.layers / (losses.layers + losses.dense_layers)


@planted(
    Expectation("LOSS-19", "losses-attached", "loss", "rank 0 reports the auxiliary loss of step 1 as"), layout=SINGLE
)
class ReportsPileUp(TrainingRouters):
    """A report does not begin anew after another."""

    def report(self) -> Mapping[str, Tensor]:
        kept = dict(self.sums)
        means = super().report()
        self.sums = kept
        return means


@planted(
    Expectation("LOSS-19", "losses-attached", "loss", "it has the coefficient in it, and Claims.reported_losses is"),
    layout=EP2,
)
class CoefficientReported(TrainingRouters):
    """A report has the coefficient in it, and nothing says so."""

    def mean(self, name: str, share: Tensor) -> Tensor:
        return super().mean(name, share) * self.losses.coefficient(name)


@planted(
    Expectation("LOSS-16", "losses-evaluation", "loss", "forwards in evaluation or without gradients were counted"),
    layout=SINGLE,
)
class ChargedInWarmUp(TrainingRouters):
    """A forward without gradients is charged in training mode, as that of a warm-up."""

    def charges(self) -> bool:
        return self.training


@planted(
    Expectation("LOSS-16", "losses-evaluation", "loss", "rank 0"),
    layout=SINGLE,
)
class EvaluationInTheCounts(TrainingRouters):
    """Evaluation reports no loss, and its slots are in the counts of the global loss."""

    def forward(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        if not self.charges():
            self.counts_LE = self.counts_LE + 4 * (torch.arange(self.config.experts) == 0)
            self.tokens_L = self.tokens_L + 2
        return super().forward(x, padding_mask_T)
