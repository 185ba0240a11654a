"""Finishes gradients between the last backward and the step.

The loss is the sum of the ranks' losses. An exchange sends an expert the gradients of all tokens of its
ep_etp group, so its replicas (edp) sum theirs and divide by nothing; a dense parameter saw this rank's tokens
only, and its replicas are all ranks of the pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.contract import Topology


class Replicated(nn.Module):
    """A module whose parameters are the same on all ranks of some groups, which meet in this rank alone."""

    replicas: ClassVar[tuple[str, ...]]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Have the gradient of a parameter of half precision accumulated in float32, and kept in it.

        Implements: GRAD-17.
        """
        if param is not None:
            wide = torch.promote_types(param.dtype, torch.float32)
            # Without this attribute, in older torch, a gradient has the dtype of its tensor, and GRAD-17 is not kept.
            param.grad_dtype = wide if hasattr(torch.Tensor, "grad_dtype") else param.dtype
        super().register_parameter(name, param)

    def after_reduction(self) -> None:
        """Called once the gradients are summed over the replicas; a module may keep a part of them alone."""


class GradientFinisher:
    """Sums the gradients of replicated parameters.

    Implements: COST-08.
    """

    def __init__(self, topology: Topology) -> None:
        """Keep the topology, whose groups it reduces over."""
        self.topology = topology

    def finish(self, modules: Iterable[Replicated]) -> None:
        """Leave in `grad` of every parameter that asks for one the sum over its replicas; absence counts as zeros.

        Absence may differ between replicas (a rank without a backward), so every replica takes part in the
        sum.

        Implements: GRAD-05, GRAD-06, GRAD-08, GRAD-11, GRAD-15, ROUTE-08, SHARE-05.
        """
        for module in modules:
            for parameter in filter(lambda parameter: parameter.requires_grad, module.parameters()):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                parameter.grad.copy_(self._summed(parameter.grad, module.replicas))
            module.after_reduction()

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        """Sum in float32 at least, so that the number of replicas does not cost digits."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        for name in replicas:
            if self.topology.group(name).size() > 1:
                dist.all_reduce(total, group=self.topology.group(name))
        return total
