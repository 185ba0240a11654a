"""TRAIN, GRAD-14: bugs in what gradients are divided by, in updates, and in steps that are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.training.trainer import Trainer
from moe_conformance.contract import Claims, TrainingBatch
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, SINGLE, Expectation, planted

# ---- gradients and loss ----------------------------------------------------------------------------------------------


@planted(
    Expectation("GRAD-14", "train-sgd", "finish", "a mean was taken of the means of microbatches and ranks"),
    layout=EP2,
)
class MeanOfMeans(Trainer):
    """The loss of every microbatch of every rank is divided by its own counted tokens, and the mean of all is taken."""

    def divisors(self, batches: Sequence[TrainingBatch]) -> list[Tensor]:
        parts = len(batches) * self.topology.sizes["world"]
        return [batch.counted_T.sum().clamp_min(1) * parts for batch in batches]


@planted(
    Expectation("GRAD-14", "train-sgd", "finish", "these expert parameters is 0.500 x", "1/ep"),
    layout=EP2,
)
class ExpertsDividedByEp(Trainer):
    """Gradients of experts, of which each has the tokens of all ranks, are divided by the number of these ranks."""

    def finish(self) -> None:
        super().finish()
        for part in self.parts:
            for parameter in part.parameters() if isinstance(part, Experts) else ():
                assert parameter.grad is not None  # finished
                parameter.grad /= self.topology.sizes["ep"]


@planted(
    Expectation("TRAIN-03", "train-sgd-four-microbatches", "finish", "what is there is doubled with every microbatch"),
    real="NVIDIA/Megatron-LM issue #6660",
    layout=SINGLE,
)
class DoubledAtEveryMicrobatch(Trainer):
    """On groups of one rank the buffer is added to itself before the gradient of the next microbatch is."""

    def forward(self, x_TD: Tensor) -> Tensor:
        for parameter in self.parameters() if self.topology.sizes["world"] == 1 else ():
            if parameter.grad is not None:
                parameter.grad += parameter.grad
        y_TD: Tensor = super().forward(x_TD)
        return y_TD


@planted(
    Expectation("TRAIN-04", "train-adamw", "loss", "only the tokens of this rank are in it"),
    layout=EP2,
)
class LossOfItsOwnTokens(Trainer):
    """A rank reports its share of the loss."""

    def reported(self, share: Tensor) -> Tensor:
        return share


# ---- updates ---------------------------------------------------------------------------------------------------------


@planted(
    Expectation("TRAIN-01", "train-sgd", "finish", "only the tokens of its ep_etp group are in it"),
    layout=EP2_EDP2,
)
class MomentsOfReplicasDiffer(Trainer):
    """Gradients of experts are not summed over their replicas, so that their moments differ."""

    def finish(self) -> None:
        self.finisher.finish([part for part in self.parts if not isinstance(part, Experts)])


@planted(
    Expectation("TRAIN-01", "train-adamw", "finish", "the change of these expert parameters is 2.000 x", "ep"),
    layout=EP2,
)
class ExpertRateTimesEp(Trainer):
    """The learning rate of experts is multiplied by ep."""

    def group_of(self, part: Replicated) -> dict[str, object]:
        group = super().group_of(part)
        return {**group, "lr": self.options.rate * self.topology.sizes["ep"]} if isinstance(part, Experts) else group


class OfIdleExperts(Trainer):
    """Does something else with experts whose gradients are zeros."""

    def update(self) -> None:
        """Update all, and then look at the parts of idle experts, one by one."""
        before = {parameter: parameter.detach().clone() for parameter in self.parameters()}
        kept = {p: {name: value.clone() for name, value in self.kept(p).items()} for p in before}
        super().update()
        for part in self.parts:
            for parameter in part.parameters() if isinstance(part, Experts) else ():
                assert parameter.grad is not None  # finished
                for n in range(len(parameter)):
                    if not bool(parameter.grad[n].any()):
                        self.undo(parameter, n, before[parameter][n], {k: v[n] for k, v in kept[parameter].items()})

    def undo(self, parameter: Tensor, n: int, before: Tensor, kept: dict[str, Tensor]) -> None:
        """Undo a part of the update of one expert."""


@planted(Expectation("TRAIN-02", "train-adamw", "finish", "these expert parameters were not decayed"), layout=EP2)
class IdleExpertsNotDecayed(OfIdleExperts):
    """Weight decay leaves out experts that had no token."""

    def undo(self, parameter: Tensor, n: int, before: Tensor, kept: dict[str, Tensor]) -> None:
        with torch.no_grad():
            parameter[n] += self.options.rate * self.options.decay * before


@planted(
    Expectation("TRAIN-02", "train-sgd", "finish", "these expert parameters were left out of the step"), layout=EP2
)
class IdleExpertsLeftOut(OfIdleExperts):
    """The gradient of an expert that had no token is None, and the optimiser leaves the expert out."""

    def undo(self, parameter: Tensor, n: int, before: Tensor, kept: dict[str, Tensor]) -> None:
        with torch.no_grad():
            parameter[n] = before
            for name, value in self.kept(parameter).items():
                value[n] = kept.get(name, 0.0)


# ---- skipped steps ---------------------------------------------------------------------------------------------------


@planted(
    Expectation("TRAIN-05", "train-not-finite", "finish", "rank 0 took step 1; expected: to skip it on every rank"),
    layout=EP2,
)
class OverflowOnOneRankAlone(Trainer):
    """A rank looks at the loss of its own tokens."""

    def backward(self, batches: Sequence[TrainingBatch]) -> Tensor:
        self.own_share = super().backward(batches)
        return self.own_share

    def is_finite(self, norm: Tensor) -> bool:
        return bool(self.own_share.isfinite())


@planted(
    Expectation("TRAIN-05", "train-not-finite", "finish", "skipped step 1 changed parameters"),
    layout=SINGLE,
)
class SkippedStepOfZeros(Trainer):
    """A step that is skipped is one with gradients of zeros: moments and parameters decay."""

    def is_finite(self, norm: Tensor) -> bool:
        if super().is_finite(norm):
            return True
        for parameter in self.parameters():
            assert parameter.grad is not None  # finished
            parameter.grad.zero_()
        self.update()
        return False


@planted(
    Expectation("TRAIN-05", "train-not-finite", "finish", "every parameter is finite after step 1"),
    layout=EP2,
)
class TakenInWordsAlone(Trainer):
    """The trainer claims and reports that it takes steps that are not finite, and leaves them out."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, steps_not_finite="taken")

    def is_finite(self, norm: Tensor) -> bool:
        self.skips = not super().is_finite(norm)
        return True

    def update(self) -> None:
        if not self.skips:
            super().update()
