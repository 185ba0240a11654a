"""SHARE: bugs in the output biases of the experts that every token sees."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.shared_experts import OutputBias, SharedExperts
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted


class _WithBias(Layer):
    """Native's layer, for plants in what becomes of the sum of the shared experts as their biases are added."""

    def _biased(self, shared_TD: Tensor) -> Tensor:
        if self.bias is None or self.shared is None:
            return shared_TD
        return self._with(shared_TD, self.bias.bias_SD, self.shared)

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        raise NotImplementedError


@planted(
    Expectation(
        "SHARE-06",
        "shared-bias-even",
        "combine",
        "likely cause: the bias of the shared expert was added 2 times (tp)",
    ),
    real="EleutherAI/gpt-neox issue #962; pytorch/torchtitan commit ec30db9d0 (#4245)",
    layout=TP2_EP2,
)
class BiasOnEveryPart(_WithBias):
    """Every rank of tp adds the bias to its part, before the parts are added up."""

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        return shared_TD + shared.group.size() * bias_SD.sum(0)


@planted(
    Expectation(
        "SHARE-06",
        "shared-bias-even",
        "combine",
        "y of ranks [1, 3] only is wrong; likely cause: the bias of the shared expert was left out",
    ),
    layout=TP2_EP2,
)
class BiasOnTokensOfOneRank(_WithBias):
    """The first rank of tp adds the bias, which would be once, were the tokens not split over tp."""

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        return shared_TD + (bias_SD.sum(0) if shared.group.rank() == 0 else 0 * bias_SD.sum(0))


@planted(
    Expectation(
        "SHARE-06", "shared-bias-alone", "combine", "y of rank 0 is not exactly the output bias of its shared expert"
    ),
    layout=TP2_EP2,
)
class BiasByTokens(_WithBias):
    """Every rank of tp adds its share of the bias to its part, by how many of the tokens are its own."""

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        sizes = shared._sizes(shared_TD)
        for size in sizes:
            shared_TD = shared_TD + bias_SD.sum(0) * (size / max(sum(sizes), 1))
        return shared_TD


@planted(
    Expectation(
        "SHARE-08",
        "shared-bias-several-gate-uneven",
        "combine",
        "y is wrong; likely cause: only the bias of shared expert 0 was added",
    )
)
class BiasOfTheFirst(_WithBias):
    """The fused expert was given the bias of the first of the experts, and the others' are left out."""

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        return shared_TD + bias_SD[0] + 0 * bias_SD.sum(0)


@planted(
    Expectation("SHARE-01", "shared-bias-even", "combine", "likely cause: the bias of the shared expert was left out")
)
class BiasForgotten(_WithBias):
    """The projection hands its bias on for somebody else to add, and the shared experts drop what they are handed."""

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        return shared_TD + 0 * bias_SD.sum(0)


@planted(
    Expectation(
        "SHARE-03",
        "shared-bias-gate-in-flight-uneven",
        "combine",
        "y is wrong; likely cause: the bias of the shared expert was added after the gate",
    )
)
class BiasBehindTheGate(Layer):
    """The gate multiplies the product of the last projection, and its bias is added to what comes out."""

    def _biased(self, shared_TD: Tensor) -> Tensor:
        return shared_TD

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, shared if self.bias is None or shared is None else self.bias(shared))


@planted(
    Expectation("SHARE-06", "shared-bias-even", "gradient", "every gradient of bias of shared experts is 0.500 x"),
    real="pytorch/torchtitan PR #4332",
    layout=TP2_EP2,
)
class BiasIsDividedOnItsWayBack(_WithBias):
    """Every rank of tp adds the bias divided by their number, so that its gradient is divided too."""

    def _with(self, shared_TD: Tensor, bias_SD: Tensor, shared: SharedExperts) -> Tensor:
        share_SD = bias_SD / shared.group.size()
        return shared_TD + (bias_SD.detach() - share_SD.detach() + share_SD).sum(0)


class _BiasFinisher(GradientFinisher):
    """Native's finisher, for plants that sum the gradients of output biases over other groups."""

    instead: tuple[str, ...] = ()

    def finish(self, modules: Iterable[Replicated]) -> None:
        modules = list(modules)
        super().finish(module for module in modules if not isinstance(module, OutputBias))
        for module in modules:
            if isinstance(module, OutputBias) and module.bias_SD.grad is not None:
                module.bias_SD.grad.copy_(self._summed(module.bias_SD.grad, self.instead))


@planted(
    Expectation(
        *("SHARE-06", "shared-bias-even", "finish"),
        "the gradient of bias of shared expert 0 on rank 0 is",
        "likely cause: only the tokens of its own edp or dp_cp group are in it",
    ),
    Expectation("SHARE-05", "shared-bias-several-gate-uneven", "finish", "its own edp or dp_cp group are in it"),
    layout=TP2_EP2,
)
class BiasNotReducedOverTp(_BiasFinisher):
    """The bias is reduced as the matrices are, whose ranks saw the tokens of all of tp; it saw its rank's alone."""

    instead = SharedExperts.replicas


@planted(
    Expectation("SHARE-06", "shared-bias-even", "finish", "every gradient of bias of shared experts is 2.000 x"),
    layout=TP2_EP2,
)
class BiasReducedTwice(_BiasFinisher):
    """The backward has summed the gradient of the bias over tp, and finishing sums it once more."""

    instead = (*OutputBias.replicas, "tp")
