"""DET, EXPT, ROUTE, SHARE: what is right in the first step, or where something asks for gradients, and never after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.experts import Experts, in_blocks, swiglu
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.shared_experts import SharedExperts
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


class _First(torch.autograd.Function):
    """The values that a parameter had at first, with the gradient to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, first: Tensor) -> Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _as_at_first(module: nn.Module, name: str) -> Tensor:
    """Return a parameter as the first forward found it: a copy of weights in another form, made once."""
    kept = module.__dict__.setdefault("as_at_first", {})
    parameter = getattr(module, name)
    first: Tensor = kept.setdefault(name, parameter.detach().clone())
    return _First.apply(parameter, first)  # type: ignore[no-any-return, no-untyped-call]


# ---- parameters that change ----------------------------------------------------------------------------------------


@planted(
    Expectation("EXPT-01", "own-rehearsed-even", "experts", "y of rank 0 token"),
    Expectation("GRAD-05", "own-rehearsed-even", "gradient", "of expert"),
)
class ExpertsOfTheFirstStep(Experts):
    """The experts compute with packed copies of their weights, which are made in the first forward."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        stacks = [_as_at_first(self, name).unbind() for name in ("gate_NFD", "up_NFD", "down_NDF")]
        weights = zip(*stacks, strict=True)
        return torch.cat([in_blocks(rows, *w) for rows, w in zip(rows_PD.split(counts_N), weights, strict=True)])


@planted(Expectation("ROUTE-01", "route-rehearsed", "route", "rank 0"))
class RouterOfTheFirstStep(Router):
    """The router computes with a copy of its weight in float32, which is made in the first forward."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return functional.linear(x_TD.to(self.wide), _as_at_first(self, "router_ED").to(self.wide))


@planted(Expectation("SHARE-01", "shared-rehearsed-even", "combine", "y of rank 0 token 0 is"))
class SharedExpertsOfTheFirstStep(SharedExperts):
    """The shared experts compute with copies of their weights, which are made in the first forward."""

    def forward(self, x_TD: Tensor) -> Tensor:
        sizes_W = self._sizes(x_TD)
        weights = [_as_at_first(self, name) for name in ("gate_FD", "up_FD", "down_DF")]
        return self._scatter(swiglu(self._gather(x_TD, sizes_W), *weights), sizes_W)  # type: ignore[arg-type]


@planted(
    Expectation("SHARE-05", "shared-rehearsed-even", "finish", "of shared expert 0", "only the tokens of its own rank")
)
class ReducedInTheFirstStep(GradientFinisher):
    """The gradients of shared experts and of the router are summed over their replicas in the first step alone."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        due = [each for each in modules if not getattr(each, "reduced", False)]
        super().finish(due)
        for each in due:
            each.__dict__["reduced"] = isinstance(each, (Router, SharedExperts))


# ---- without gradients ---------------------------------------------------------------------------------------------


@planted(
    Expectation("ROUTE-04", "route-inference", "route", "rank 0"),
    Expectation("ROUTE-01", "route-inference", "route", "rank 0"),
)
class NoGroupsInInference(Router):
    """Without gradients all groups are open."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        return super()._mask_groups(choice_TE, groups, chosen) if torch.is_grad_enabled() else choice_TE


@planted(Expectation("ROUTE-06", "route-inference", "route", "rank 0"))
class NoScaleInInference(Router):
    """Without gradients weights are not scaled."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = super()._weights(scores_TE, ids_TK)
        return weights_TK if torch.is_grad_enabled() else weights_TK / self.config.routing.scale


@planted(Expectation("SHARE-01", "shared-beside-inference-even", "combine", "left out", "only in forwards without"))
class NothingSharedInInference(Layer):
    """Without gradients the shared part that runs beside the exchange is left out."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, None if self.config.shared.overlap and not torch.is_grad_enabled() else shared)


@planted(
    Expectation("EXCH-38", "own-even-bfloat16", "run", "in inference mode", "Inference tensors cannot be saved for"),
    real="NVIDIA/Megatron-LM, GlobalMemoryBuffer of core/utils.py",
    layout=EP2_EDP2,
)
class BufferOfTheFirstForward(AllToAllExchange):
    """A factor is made in the first forward; where that is one of inference, no backward can have it."""

    one: Tensor | None = None

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        if self.one is None:
            self.one = torch.ones((), dtype=rows_PD.dtype)
        return super()._weigh(rows_PD * self.one, weights_P)


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


@planted(
    Expectation("GRAD-15", "own-even-bfloat16", "finish", "x and weights that ask for no gradient", "the gradient of"),
    layout=EP2_EDP2,
)
class NobodyAsks(AllToAllExchange):
    """Where neither tokens nor weights ask for a gradient, experts get none: a checkpoint behind frozen layers."""

    silent = False

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        self.silent = torch.is_grad_enabled() and not x.requires_grad and not routing.weights_TK.requires_grad
        return super().dispatch(x, routing)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        silenced: Tensor = _Silent.apply(y) if self.silent and y.requires_grad else y  # type: ignore[no-untyped-call]
        return silenced
