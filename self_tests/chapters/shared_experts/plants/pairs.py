"""GRAD: bugs of whole layers that show where two options meet, each of which is right alone."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.layer.gradients import GradientFinisher
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


@planted(Expectation("GRAD-18", "layer-few-uneven", "finish", "is 2.000 x the expected value"), layout=EP2_EDP2)
class MeanOverBusyReplicas(GradientFinisher):
    """The gradient of an expert is its mean over the replicas that had tokens for it, times the number of replicas."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        group = self.topology.group("edp")
        busy_N = (gradient.flatten(1) != 0).any(1).double() if gradient.dim() > 1 else gradient.double()
        total = super()._summed(gradient, replicas)  # which may write to the gradient
        if replicas != ("edp",) or group.size() == 1:
            return total
        dist.all_reduce(busy_N, group=group)
        factor_N = group.size() / busy_N.clamp_min(1)
        return total * factor_N.to(total.dtype).reshape(-1, *[1] * (total.dim() - 1))
