"""DET, GRAD: bugs that show when steps are repeated, or when ranks come in another order."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.experts import Experts, swiglu
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.contract import Routing, Unsupported
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


@planted(
    Expectation(
        *("DET-05", "own-even-bfloat16", "finish"),
        *("run twice over", "after finishing step 1 differs from the original run"),
    ),
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, in step 1 the gradient of"),
    layout=EP2_EDP2,
)
class ReducedOnce(GradientFinisher):
    """What was reduced is marked, so that nothing is reduced twice, and the mark stays when gradients are cleared."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        new = [module for module in modules if not getattr(module, "reduced", False)]
        super().finish(new)
        for module in new:
            module.reduced = True  # type: ignore[assignment]


@planted(
    Expectation(
        *("DET-05", "own-even-bfloat16", "finish"),
        *("run twice over", "after finishing step 1 differs from the original run"),
    ),
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, in step 1 the gradient of"),
    layout=EP2_EDP2,
)
class SumsOfAllSteps(GradientFinisher):
    """Finished gradients are summed up in buffers that nobody clears when gradients are cleared."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        super().finish(every)
        for parameter in (parameter for module in every for parameter in module.parameters()):
            assert parameter.grad is not None
            parameter.total = getattr(parameter, "total", 0) + parameter.grad  # type: ignore[attr-defined]
            parameter.grad.copy_(parameter.total)  # type: ignore[attr-defined]


@planted(
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, in step 1 the gradient of"),
    layout=EP2_EDP2,
)
class GradientsOfTheFirstStep(GradientFinisher):
    """What the first step ended with is handed out in every later one."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        super().finish(every)
        for parameter in (parameter for module in every for parameter in module.parameters()):
            assert parameter.grad is not None
            parameter.first = getattr(parameter, "first", parameter.grad.clone())  # type: ignore[attr-defined]
            parameter.grad.copy_(parameter.first)  # type: ignore[attr-defined]


@planted(
    Expectation(
        *("DET-05", "own-even-bfloat16", "finish"),
        *("run twice over", "after finishing step 1 is missing; it exists in the original run"),
    ),
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, no gradient was finished"),
    layout=EP2_EDP2,
)
class OneStepAModule(GradientFinisher):
    """The gradients of a module are finished once, and refused from then on, without a limit that says so."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        if any(getattr(module, "finished_before", False) for module in every):
            raise Unsupported("gradients are finished once")
        super().finish(every)
        for module in every:
            module.finished_before = True  # type: ignore[assignment]


class AddsInPlace(Experts):
    """Weight gradients are added two rows at a time to where they lie, as fused kernels do: no bug, see `InPlace`."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        stacked = (self.gate_NFD, self.up_NFD, self.down_NDF)
        return torch.cat(
            [
                swiglu(chunk_RD, *(_added_in_place(each, n) for each in stacked))  # type: ignore[arg-type]
                for n, rows in enumerate(rows_PD.split(counts_N))
                for chunk_RD in rows.split(2)
            ]
        )


def _added_in_place(stacked: Tensor, n: int) -> Tensor:
    """Return matrix n, whose gradient is added to what is there as soon as it comes."""
    matrix = stacked.detach()[n].requires_grad_()

    def add(gradient: Tensor) -> None:
        if stacked.grad is None:
            stacked.grad = torch.zeros_like(stacked, dtype=stacked.grad_dtype)
        stacked.grad[n] += gradient

    matrix.register_hook(add)
    return matrix


class InPlace(Native):
    """Native, with experts that add their gradients in place."""

    session_class = NativeSession.building(AddsInPlace)


class KnowsWhoCameLast(AllToAllExchange):
    """The base of plants for which it counts who comes to the exchange last."""

    _last = False

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        group = self.topology.group("ep")
        times = [0.0] * group.size()
        dist.all_gather_object(times, time.time(), group=group)  # behind it nobody is late any more
        self._last = max(times) == times[group.rank()]
        return super().dispatch(x, routing)


@planted(Expectation("DET-06", "own-even-bfloat16", "experts", "late, y of rank"), layout=EP2_EDP2)
class LatecomersSendLess(KnowsWhoCameLast):
    """The rank that comes last to the exchange sends its answers without their last bit: what rounding may do too."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if self._last:
            less = (rows.detach().view(torch.int16) & ~1).view(rows.dtype)
            rows = rows + (less - rows).detach()
        return super().combine(rows, handle)


@planted(Expectation("DET-06", "own-even-bfloat16", "experts", "late, y of rank"), layout=EP2_EDP2)
class AnswersAddedAsTheyCome(KnowsWhoCameLast):
    """The answers of one expert after the other are added to the tokens, and by latecomers the other way round."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        pairs, counts = permuted.pairs, permuted.pairs.counts_E.tolist()
        rows_PD = self._weigh(rows_QD, permuted.weights_P)
        y_TD = rows_PD.new_zeros(pairs.shape[0], rows_PD.shape[1])
        answers = list(zip(pairs.token_P.split(counts), rows_PD.split(counts), strict=True))
        for token_p, rows_pD in reversed(answers) if self._last else answers:
            y_TD = y_TD + torch.zeros_like(y_TD).index_add(0, token_p, rows_pD)
        return y_TD.reshape(permuted.shape)


@planted(
    Expectation(
        *("GRAD-15", "own-even-bfloat16", "finish"),
        *("that ask for no gradient, gate of expert", "of zeros instead of None, and had none"),
    ),
    layout=EP2_EDP2,
)
class FrozenFilledWithZeros(GradientFinisher):
    """Gradients that are absent become zeros, also those of frozen parameters, which weight decay then moves."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        for parameter in (parameter for module in every for parameter in module.parameters()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        super().finish(every)
