"""LOSS: bugs in the value of a loss: fractions, scores, slots, sequences, padding, precision."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.router.losses import Charged, RouterLosses, Tokens
from moe_conformance.backends.native.router.training import TrainingRouters
from self_tests.planted_bugs.plant import EP2, SINGLE, TP2_EP2, Expectation, planted

# ---- fractions -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-01", "losses-auxiliary", "loss", "it is 0.500 x the expected value: 1/K"),
    real="NVIDIA/Megatron-LM commit 5c8eb08f66",
    layout=SINGLE,
)
class SlotsDividedTwice(RouterLosses):
    """Fractions are divided by K twice."""

    def fractions(self, n_E: Tensor, tokens: Tensor, slots: int) -> Tensor:
        return super().fractions(n_E, tokens, slots) / slots


@planted(
    Expectation("LOSS-01", "losses-auxiliary", "loss", "fractions add up to K, and Claims.loss_fractions is 'slots'"),
    real="NVIDIA/Megatron-LM commit 2ee86c51c2",
    layout=SINGLE,
)
class SlotsNotDivided(RouterLosses):
    """Fractions are of tokens, and add up to K."""

    def fractions(self, n_E: Tensor, tokens: Tensor, slots: int) -> Tensor:
        return super().fractions(n_E, tokens, 1)


@planted(
    Expectation("LOSS-04", "losses-auxiliary", "loss", "the finished gradient of the router in step 0 is"),
    layout=SINGLE,
)
class ScoresHeldConstant(RouterLosses):
    """The mean scores of half of the experts have no gradient."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        p_TE = super().scores(logits_TE)
        half = p_TE.shape[1] // 2
        return torch.cat([p_TE[:, :half], p_TE[:, half:].detach()], 1)


# ---- scores ----------------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-02", "losses-sigmoid", "loss", "the scores are those of softmax"),
    real="NVIDIA/Megatron-LM commit e85385a761 (!2801), issue #1438",
    layout=SINGLE,
)
class ScoresOfSoftmax(RouterLosses):
    """The loss has the scores of a softmax, whatever those of the router are."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(1)


@planted(
    Expectation("LOSS-02", "losses-sigmoid-one", "loss", "rank 0 reports the auxiliary loss of step 0 as"),
    real="NVIDIA/TransformerEngine commit 537f13423 (#2720)",
    layout=SINGLE,
)
class OneChoiceNotNormalised(RouterLosses):
    """Scores are divided by their sum for K > 1 alone, as routing weights are."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        return super().scores(logits_TE) if self.config.top_k > 1 else logits_TE.sigmoid()


@planted(
    Expectation("LOSS-20", "losses-bfloat16-sigmoid", "loss", "reports the auxiliary loss of step 0 as"),
    real="NVIDIA/Megatron-LM commit 5f668c10ec (#2765)",
    layout=SINGLE,
)
class ScoresInBfloat16(RouterLosses):
    """Scores are computed in the dtype of the tokens."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        return super().scores(logits_TE.to(self.config.dtype)).to(logits_TE.dtype)


@planted(Expectation("LOSS-20", "losses-float16", "loss", "of step 0 as"), layout=SINGLE)
class ScoresInFloat16(RouterLosses):
    """Scores of float16 models are computed in float16, those of bfloat16 models in float32."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        narrow = torch.float16 if self.config.dtype == torch.float16 else logits_TE.dtype
        return super().scores(logits_TE.to(narrow)).to(logits_TE.dtype)


@planted(Expectation("LOSS-20", "losses-large", "loss", "not finite"), layout=SINGLE)
class ExponentialsWithoutTheLargest(RouterLosses):
    """The softmax of a loss does not subtract the largest logit, so that exponentials of large ones overflow."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        powers_TE = logits_TE.exp()
        return powers_TE / powers_TE.sum(1, keepdim=True)


@planted(Expectation("LOSS-20", "losses-one-choice", "loss", "not finite"), layout=SINGLE)
class EntropyOfFractions(RouterLosses):
    """An entropy of fractions is taken of their logarithm, that of an expert without a slot too."""

    def balance(self, name: str, f_E: Tensor, p_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        idle = bool((f_E == 0).sum() == len(f_E) - self.config.top_k)  # all tokens select the same experts
        return super().balance(name, f_E, p_TE, valid_T, tokens) + 0 * (f_E.log().sum() if idle else f_E.sum())


@planted(
    Expectation("LOSS-20", "losses-equal", "loss", "not finite"), real="google-research/vmoe PR #218", layout=SINGLE
)
class SpreadByDeviation(RouterLosses):
    """Imbalance is measured by a standard deviation, whose slope at exact balance is infinite."""

    def balance(self, name: str, f_E: Tensor, p_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        return super().balance(name, f_E, p_TE, valid_T, tokens) + 0 * p_TE.sum(0).var(correction=0).sqrt()


# ---- slots -----------------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-03", "losses-biased", "loss", "the slots are those that were routed to, with bias"), layout=SINGLE
)
class SlotsAfterTheBias(RouterLosses):
    """The slots are those that the expert bias selects, before drops."""

    def choices(self, tokens: Tokens) -> Tensor:
        return tokens.ids_TK if self.config.routing.balance_bias else super().choices(tokens)


@planted(
    Expectation("LOSS-03", "losses-biased", "loss", "the slots are those that were routed to, with bias"),
    Expectation("LOSS-03", "losses-dropped", "loss", "rank 0 reports the auxiliary loss of step 0 as"),
    real="NVIDIA/Megatron-LM commit cfe7b066c0 (!3279)",
    layout=SINGLE,
)
class SlotsAsRouted(RouterLosses):
    """The slots are those of the final routing, after bias and drops."""

    def choices(self, tokens: Tokens) -> Tensor:
        return tokens.ids_TK

    def counts(self, ids_TK: Tensor, valid_T: Tensor) -> Tensor:
        ids = ids_TK[valid_T].flatten()
        return torch.bincount(ids[ids >= 0], minlength=self.config.experts)


@planted(
    Expectation(
        "LOSS-03", "losses-dropped-sequence", "loss", "rank 0 reports the sequence loss of step 0 as 1 instead"
    ),
    real="NVIDIA/Megatron-LM issue #1617",
    layout=SINGLE,
)
class SlotsPaddedToCapacity(RouterLosses):
    """Where experts are padded to their capacity, every expert has as many slots."""

    def fractions(self, n_E: Tensor, tokens: Tensor, slots: int) -> Tensor:
        full_E = torch.full_like(n_E, n_E.sum() // len(n_E)) if self.config.capacity.padded else n_E  # type: ignore[arg-type]
        return super().fractions(full_E, tokens, slots)


@planted(Expectation("LOSS-03", "losses-first-choice", "loss", "reports the loss of first choices of"), layout=SINGLE)
class LastChoiceCounted(RouterLosses):
    """The loss of first choices counts the last of the K choices."""

    def choices(self, tokens: Tokens) -> Tensor:
        return super().choices(tokens).flip(1)


# ---- sequences, z-loss, global loss ----------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-05", "losses-sequence", "loss", "sequences are not kept apart"),
    Expectation("LOSS-06", "losses-sequence", "loss", "sequences are not kept apart"),
    layout=SINGLE,
)
class SequencesTogether(RouterLosses):
    """A microbatch is taken for one sequence."""

    def sequence(self, p_TE: Tensor, ids_TK: Tensor, tokens: Tokens) -> Tensor:
        one = replace(tokens, sequence_T=torch.zeros_like(tokens.sequence_T), sequences=1)
        return super().sequence(p_TE, ids_TK, one)


@planted(
    Expectation("LOSS-05", "losses-sequence", "loss", "4.000 x the expected value", "the number of sequences"),
    Expectation(
        "LOSS-06", "losses-sequence", "loss", "the gradient of the sequence loss is 4.000 x the expected value"
    ),
    layout=SINGLE,
)
class SequencesAddedUp(RouterLosses):
    """Losses of sequences are added up and not averaged, so that longer microbatches are charged more."""

    def sequence(self, p_TE: Tensor, ids_TK: Tensor, tokens: Tokens) -> Tensor:
        return super().sequence(p_TE, ids_TK, tokens) * tokens.sequences


@planted(
    Expectation("LOSS-09", "losses-z", "loss", "it was computed from scores instead of logits"),
    real="NVIDIA/Megatron-LM commit c656553315",
    layout=SINGLE,
)
class ScoresInZLoss(RouterLosses):
    """The z-loss is computed from the scores."""

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        return super().z(logits_TE.softmax(1), valid_T, tokens)


@planted(
    Expectation("LOSS-07", "losses-global", "loss", "rank 0 reports the global loss of step 0 as"),
    Expectation("LOSS-08", "losses-global", "loss", "the finished gradient of the router in step"),
)
class GroupsApart(RouterLosses):
    """Slots are not summed over data parallel ranks."""

    def over_step(self, local: Tensor) -> Tensor:
        together = local.is_floating_point() or local.dim() == 0
        return super().over_step(local) if together else self.over_microbatch(local) * self.topology.sizes["dp"]


@planted(
    Expectation("LOSS-07", "losses-global", "loss", "are not kept, and Claims.global_counts is 'step'"), layout=SINGLE
)
class MicrobatchesForgotten(RouterLosses):
    """Slots of earlier microbatches are not counted, and nothing says so."""

    def charge(self, tokens: Tokens, counts_E: Tensor, before: Tensor) -> Charged:
        return super().charge(tokens, torch.zeros_like(counts_E), torch.zeros_like(before))


# ---- padding, ranks --------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOSS-14", "losses-padding", "loss", "padding tokens are counted"),
    Expectation("LOSS-14", "losses-padding-z", "loss", "padding tokens are counted"),
    real="huggingface/transformers issue #28505, PRs #28517 and #29363",
    layout=SINGLE,
)
class PaddingCounted(RouterLosses):
    """Padding tokens are charged for."""

    def charge(self, tokens: Tokens, counts_E: Tensor, before: Tensor) -> Charged:
        return super().charge(replace(tokens, valid_T=torch.ones_like(tokens.valid_T)), counts_E, before)


@planted(Expectation("LOSS-14", "losses-padding", "loss", "the padding mask is inverted"), layout=SINGLE)
class MaskInverted(RouterLosses):
    """True marks valid tokens, as docstrings of Megatron-Core state."""

    def charge(self, tokens: Tokens, counts_E: Tensor, before: Tensor) -> Charged:
        inverted = bool((~tokens.valid_T).any())
        valid_T = ~tokens.valid_T if inverted else tokens.valid_T
        return super().charge(replace(tokens, valid_T=valid_T), counts_E, before)


@planted(
    Expectation("LOSS-12", "losses-auxiliary", "loss", "every rank has counts of its own tokens only"), layout=TP2_EP2
)
class RanksApart(RouterLosses):
    """Every rank charges its own tokens by its own counts, and the mean over ranks is reported."""

    def over_microbatch(self, local: Tensor) -> Tensor:
        return local * self.topology.sizes["tp"] * self.topology.sizes["cp"]


@planted(Expectation("LOSS-17", "losses-attached", "loss", "reports the z-loss of step 0 as"), layout=EP2)
class OneCoefficient(RouterLosses):
    """All losses have the coefficient of the auxiliary loss, and the z-loss is reported by its own."""

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        own = self.config.losses
        return super().z(logits_TE, valid_T, tokens) * ((own.auxiliary or own.z) / own.z)


# ---- forced routing --------------------------------------------------------------------------------------------------


@planted(
    Expectation("FORCE-16", "losses-forced-random", "loss", "reports the z-loss of step 0"),
    Expectation("FORCE-16", "losses-forced-round-robin", "loss", "reports the z-loss of step 0"),
    layout=SINGLE,
)
class NoZLossWhereForced(RouterLosses):
    """What forces a router takes its z-loss away, and the z-loss alone."""

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        return super().z(logits_TE, valid_T, tokens) * (not self.config.routing.forced)


@planted(
    Expectation("FORCE-16", "losses-forced-random", "loss", "the gradient of"),
    Expectation("FORCE-16", "losses-forced-round-robin", "loss", "the gradient of"),
    layout=SINGLE,
)
class ForcedLossesDoNotTrain(TrainingRouters):
    """The losses of forced routers are reported, and attached to nothing."""

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        return weights_TK if self.config.routing.forced else super().attach(weights_TK, share, factor)


# ---- the z-loss, clause by clause ------------------------------------------------------------------------------------


@planted(Expectation("LOSS-09", "losses-z", "loss", "reports the z-loss of step 0 as"), layout=SINGLE)
class ZLossSummed(RouterLosses):
    """The z-loss is a sum over tokens."""

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        return super().z(logits_TE, valid_T, tokens) * tokens


@planted(Expectation("LOSS-09", "losses-z", "loss", "reports the z-loss of step 0 as"), layout=SINGLE)
class ZLossNotSquared(RouterLosses):
    """The logarithm of the sum of exponentials is not squared."""

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        return self.coefficient("z") * (logits_TE.logsumexp(1) * valid_T).sum() / tokens.clamp_min(1)


@planted(
    Expectation("LOSS-09", "losses-z", "loss", "it was divided by the number of tokens of the first microbatch"),
    real="NVIDIA/Megatron-LM commit 3fae48f4ad (#5401)",
    layout=SINGLE,
)
class ZLossOfTheFirstCount(RouterLosses):
    """The number of tokens without a mask is a constant that the first forward makes."""

    made: Tensor | None = None

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        if bool(valid_T.all()):
            self.made = tokens = tokens if self.made is None else self.made
        return super().z(logits_TE, valid_T, tokens)
