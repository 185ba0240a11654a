"""ROUTE: bugs of routers that show where logits are huge, masked, or no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Named, Read, Routed
from self_tests.planted_bugs.plant import Expectation, planted


@planted(Expectation("ROUTE-14", "extreme-softmax", "route", "has the weights [nan", "1e+30"))
class SoftmaxNotShifted(Router):
    """Exponentials are taken of the logits as they are, and overflow."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        powers_TE = logits_TE.exp()
        return powers_TE / powers_TE.sum(1, keepdim=True)


@planted(Expectation("ROUTE-14", "extreme-sigmoid", "route", "has the weights [nan"))
class SumOfNothingDivides(Router):
    """Weights are divided by their sum, also where all the chosen scores underflow."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / weights_TK.sum(1, keepdim=True) * self.config.routing.scale


@planted(
    Expectation("ROUTE-14", "masked-softmax-of-chosen", "route", "selected [", "-inf"),
    Expectation("ROUTE-14", "masked-softmax", "route", "selected [", "-inf"),
    real="vllm-project/vllm PR #13474",
)
class MaskedAtZero(Router):
    """What is masked counts as 0 instead of minus infinity, and beats what is below zero."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return super()._logits(x_TD).masked_fill(super()._logits(x_TD) == -torch.inf, 0.0)


@planted(Expectation("ROUTE-14", "extreme-sqrtsoftplus", "gradient", "the gradient of the tokens", "is not finite"))
class SlopeOfTheRoot(Router):
    """The root of a score that underflows has an infinite slope, and infinity times zero is no number."""

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return (-torch.nn.functional.logsigmoid(-logits_TE)).sqrt()


@planted(Expectation("ROUTE-15", "spoilt-nan-softmax", "route", "rank 0 token 0 selected [8, 8]"))
class NobodyIsTheBest(Router):
    """The best expert is searched by comparing, which NaN never wins, and the search ends behind the last one."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        ids_TK = super()._select(scores_TE)
        return ids_TK.masked_fill(scores_TE.isnan().any(1, keepdim=True), self.config.experts)

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(scores_TE, ids_TK.clamp_max(self.config.experts - 1))


@planted(Expectation("ROUTE-15", "spoilt-nan-softmax-of-chosen", "route", "in a batch with a non-finite token", "nan"))
class ShiftedByTheBatch(Router):
    """The largest logit of the whole batch is subtracted from all of them."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        return logits_TE - logits_TE.max() if logits_TE.numel() else logits_TE


@planted(Expectation("ROUTE-15", "spoilt-nan-sigmoid", "run", "raised in forward:0", "there is no router here"))
class RefusesAll(Router):
    """Whatever it is given is refused, so that what is spoilt is refused as well."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        """Raise."""
        raise ValueError("there is no router here")


@planted(
    Expectation(
        "ROUTE-15", "spoilt-nan-softmax", "run", "an internal error instead of refusing a logit", "AttributeError"
    )
)
class StumblesOverNaN(Router):
    """A table of the largest scores has no entry for NaN, and what it returns is used all the same."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        known: dict[bool, Tensor] = {} if bool(scores_TE.isnan().any()) else {True: scores_TE}
        return super()._select(known.get(True).clone())  # the bug


@planted(
    Expectation("ROUTE-15", "spoilt-nan-softmax", "route", "in a batch with a non-finite token or in the next batch")
)
class RemembersTheLargest(Router):
    """The largest logit so far is kept from batch to batch and told apart from nothing, so that NaN stays."""

    largest = 0.0

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = super()._weights(scores_TE, ids_TK) + 0.0 * self.largest
        self.largest = float(scores_TE.sum()) if scores_TE.numel() else 0.0
        return weights_TK


@planted(Expectation("ROUTE-01", "extreme-sqrtsoftplus", "route", "selected [", "its logits are"))
class LogitsAreClipped(Router):
    """Logits are kept within 50 of zero, so that nothing overflows, and larger ones are all alike."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return super()._logits(x_TD).clamp(-50.0, 50.0)


@planted(Expectation("ROUTE-01", "extreme-softmax", "route", "selected [", "its logits are"))
class UnderflowFlattens(Router):
    """Scores below 1e-6 count as zero in the choice, and lower ids win over better experts there."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        return super()._select(torch.where(scores_TE < 1e-6, 0.0, scores_TE))


@planted(Expectation("ROUTE-02", "extreme-softmax", "route", "has the weights", "its logits are"))
class EpsilonInEveryScore(Router):
    """A small number is added to each score, not to their sum, so that no weight is zero."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(scores_TE + 1e-4, ids_TK)


@planted(Expectation("ROUTE-07", "extreme-softmax", "gradient", "rank 0 token 0 has the gradient", "expected"))
class ScaledByTheLargest(Router):
    """Gradients are divided by the largest logit of the batch, so that nothing overflows, and not multiplied again."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        if logits_TE.requires_grad and logits_TE.numel():
            most = logits_TE.detach().abs().max().clamp_min(1.0)
            logits_TE.register_hook(lambda gradient_TE: gradient_TE / most)
        return logits_TE


@planted(
    Expectation("ROUTE-14", "extreme-softmax", "route", "the weight of the router is not yielded by 'named' on rank 0")
)
class NamedUntilItRuns(Router):
    """From its first forward on the router has no name, so that nobody finds its gradient."""

    ran = False

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        """Route, and be nobody."""
        self.ran = True
        return super().forward(x, padding_mask_T)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield nothing after a forward."""
        if not self.ran:
            yield from super().named(read)


@planted(Expectation("ROUTE-14", "masked-softmax", "route", "the ids of rank 0 are torch.float32"))
class IdsAreFloats(Router):
    """Ids are handed over as floating point numbers, as they went through a matrix of scores."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        """Route as ever, with ids of another type."""
        routed = super().forward(x, padding_mask_T)
        return replace(routed, routing=replace(routed.routing, ids_TK=routed.routing.ids_TK.float()))


class NarrowRouter(Router):
    """A router that computes in the dtype of its tokens, as it may, and hands its weights on in float32."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        self.wide = config.dtype

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(scores_TE, ids_TK).float()


class Narrow(Native):
    """Native, whose router computes in bfloat16 where tokens are bfloat16."""

    session_class = NativeSession.building(NarrowRouter)
