"""GRAD: bugs of gradients that are accumulated over microbatches."""

from __future__ import annotations

from torch import nn

from moe_conformance.backends.native.layer.experts import Experts
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

_WORKLOAD = "own-small-gradients-even-bfloat16"


@planted(Expectation("GRAD-17", _WORKLOAD, "finish", "partial sums are rounded below float32"))
class AccumulatedInBfloat16(Experts):
    """Gradients are accumulated in the dtype of their parameters, as autograd does by itself."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        nn.Module.register_parameter(self, name, param)


@planted(Expectation("GRAD-17", _WORKLOAD, "finish", "is not the sum over 16 microbatches"), layout=EP2_EDP2)
class AccumulatorRoundedAfterEveryBackward(Experts):
    """The accumulator is float32, and is stored in the dtype of the parameter after every backward."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            param.register_post_accumulate_grad_hook(self._store)

    def _store(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(parameter.dtype))
