"""GRAD-12, GRAD-13: bugs in the norm of the gradient, and in clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.training.trainer import GradientNorm, Trainer
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, Expectation, planted


@planted(
    Expectation("GRAD-12", "train-adamw", "finish", "experts are counted 2 times in it: ep or edp"),
    Expectation("GRAD-13", "train-sgd-clipped", "finish", "the norm has expert gradients 2 times: ep or edp"),
    real="NVIDIA/Megatron-LM commit 7461c81bfe (#6489)",
    layout=EP2_EDP2,
)
class ExpertNormOverTheDenseGroup(GradientNorm):
    """The squares of expert gradients are summed over all ranks as if no rank had a replica of another's experts."""

    def copies(self, part: Replicated) -> int:
        return 1 if isinstance(part, Experts) else super().copies(part)


@planted(
    Expectation("GRAD-12", "train-adamw", "finish", "ranks report different norms of the gradient of step 0"),
    real="NVIDIA-NeMo/Automodel issue #3816",
    layout=EP2,
)
class NormOfItsOwnExperts(GradientNorm):
    """A rank has the experts in its norm that it holds, and not those of other ranks."""

    def __call__(self, parts: Sequence[Replicated]) -> Tensor:
        return torch.stack([self.squares(part) for part in parts]).sum().sqrt()


@planted(
    Expectation("GRAD-13", "train-sgd-clipped", "finish", "clipped by the mean of the ranks' norms"),
    Expectation("GRAD-12", "train-adamw", "finish", "likely cause: it is the mean of the ranks' norms"),
    real="DeepSpeed 0.19.8, docs/findings/deepspeed.md, DS-41",
    layout=EP2,
)
class MeanOfNorms(GradientNorm):
    """Ranks add up the squares of what they hold, and take the mean of their norms."""

    def __call__(self, parts: Sequence[Replicated]) -> Tensor:
        own = torch.stack([self.squares(part) for part in parts]).sum().sqrt()
        return self.over_ranks(own) / self.topology.group("world").size()


@planted(
    Expectation("GRAD-12", "train-adamw", "finish", "it was taken before gradients were summed over ranks"),
    layout=EP2_EDP2,
)
class NormBeforeFinishing(Trainer):
    """The norm is taken before gradients are finished."""

    def finished_norm(self) -> Tensor:
        norm = self.norm(self.parts)
        self.finish()
        return norm


@planted(
    Expectation("GRAD-13", "train-sgd-clipped", "finish", "clipped by norms of their own"),
    real="NVIDIA/Megatron-LM commit abf10f8590 (issue #785)",
    layout=EP2,
)
class ClippedApart(GradientNorm):
    """Dense and expert gradients are clipped by a norm of their own each."""

    def clip(self, parts: Sequence[Replicated], norm: Tensor, largest: float) -> None:
        for of_experts in (False, True):
            group = [part for part in parts if isinstance(part, Experts) == of_experts]
            super().clip(group, self(group), largest)


@planted(
    Expectation("GRAD-13", "train-sgd-clipped", "finish", "expert", "1/ep"),
    layout=EP2,
)
class ExpertsClippedFurther(GradientNorm):
    """The factor of expert gradients is divided by ep once more."""

    def factor_of(self, part: Replicated, factor: Tensor) -> Tensor:
        return factor / self.topology.sizes["ep"] if isinstance(part, Experts) else factor
