"""BIAS: bugs in the bias as a tensor: rebound, not saved, copied, rounded, trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

# ---- one tensor ------------------------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-08", "bias-microbatches", "finish", "the update made a new tensor", "the state dictionary holds"),
    real="pytorch/torchtitan commit e09995f72 (#1226, issue #1222)",
    layout=SINGLE,
)
class Rebound(BalancingRouters):
    """The update makes a new tensor and gives it the name of the old one."""

    def move(self, number: int, change_E: Tensor) -> None:
        router = self.routers[number]
        router.balance_bias = router.balance_bias + change_E  # type: ignore[operator]


@planted(Expectation("BIAS-08", "bias-microbatches", "finish", "the state dictionary does not hold it"), layout=SINGLE)
class NotSaved(Router):
    """The bias is a buffer that is not saved."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        self._non_persistent_buffers_set.add("balance_bias")


@planted(Expectation("BIAS-08", "bias-microbatches", "route", "likely cause: another bias is added"), layout=SINGLE)
class FirstBiasKept(Router):
    """The router adds a copy that it made in its first forward."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.balance_bias is None:
            return super()._select(scores_TE)
        if not hasattr(self, "copy_E"):
            self.copy_E = self.balance_bias.clone()
        return (scores_TE.detach() + self.copy_E).topk(self.config.top_k, dim=1).indices


# ---- precision -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-09", "bias-bfloat16", "finish", "likely cause: the bias is kept in torch.bfloat16"), layout=SINGLE
)
class BiasOfModelDtype(Router):
    """The bias has the dtype of the model."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        if self.balance_bias is not None:
            self.balance_bias = self.balance_bias.to(config.dtype)


@planted(
    Expectation("BIAS-09", "bias-float16", "finish", "likely cause: the bias is kept in torch.float16"), layout=SINGLE
)
class BiasOfFloat16(Router):
    """The bias of a float16 model has its dtype, and that of a bfloat16 model is kept in float32."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        if self.balance_bias is not None and config.dtype == torch.float16:
            self.balance_bias = self.balance_bias.to(config.dtype)


@planted(
    Expectation("BIAS-09", "bias-bfloat16", "finish", "the bias is kept in torch.bfloat16 between updates"),
    layout=SINGLE,
)
class RoundedByUpdates(BalancingRouters):
    """The update is computed in the dtype of the model."""

    def move(self, number: int, change_E: Tensor) -> None:
        super().move(number, change_E)
        bias_E = self.routers[number].balance_bias
        assert isinstance(bias_E, Tensor)
        bias_E.copy_(bias_E.to(self.config.dtype))


@planted(Expectation("BIAS-09", "bias-bfloat16", "route", "selected experts", "or with too few digits"), layout=SINGLE)
class RoundedInSelection(Router):
    """The bias is added to scores in the dtype of the tokens."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.balance_bias is None:
            return super()._select(scores_TE)
        sum_TE = scores_TE.detach().to(self.config.dtype) + self.balance_bias.to(self.config.dtype)
        return sum_TE.topk(self.config.top_k, dim=1).indices


# ---- nothing else trains it ------------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-10", "bias-microbatches", "finish", "a step of the optimizer left the bias of router 0 at"),
    layout=SINGLE,
)
class BiasAsParameter(Router):
    """The bias is a parameter, to which weight decay applies."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        bias_E = self.balance_bias
        if bias_E is not None:
            del self.balance_bias
            self.balance_bias = nn.Parameter(bias_E)


@planted(
    Expectation("BIAS-10", "bias-microbatches", "gradient", "the bias of router 0 has a gradient of up to"),
    layout=SINGLE,
)
class BiasTrained(Router):
    """The bias asks for a gradient, and is in the weights."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        if self.balance_bias is not None:
            self.balance_bias.requires_grad_()

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        biased_TE = scores_TE if self.balance_bias is None else scores_TE + self.balance_bias
        return super()._weights(biased_TE, ids_TK)
