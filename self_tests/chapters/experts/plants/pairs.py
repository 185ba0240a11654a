"""EXPT: bugs that show where two options meet, each of which is right alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.activated_experts import ExpertBiases
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import Expectation, planted

_EP4 = Layout(4, ep=4)


@planted(Expectation("EXPT-06", "pairs-experts-21", "experts", "the output bias was left out"), layout=_EP4)
class BiasesInTrainingAlone(ExpertBiases):
    """The kernel that runs where no gradient is recorded has no place for biases."""

    def added(self, n: int) -> Tensor | None:
        return super().added(n) if torch.is_grad_enabled() else None
