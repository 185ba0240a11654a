"""DET, EXCH, GRAD: bugs of the second of two runs, under autocast, or where a backward keeps a graph of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.contract import Config, Routing, Topology, Unsupported
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

# ---- refusals ------------------------------------------------------------------------------------------------------


@planted(Expectation("DET-05", "own-even-bfloat16", "run", "run twice over", "one exchange is enough"), layout=EP2_EDP2)
class OneExchangeAProcess(AllToAllExchange):
    """What was built once is refused from then on."""

    _built: ClassVar[list[Config]] = []

    def __init__(self, config: Config, topology: Topology) -> None:
        if config in self._built:
            raise CannotBuild("one exchange is enough for a process")
        self._built.append(config)
        super().__init__(config, topology)


@planted(
    Expectation("GRAD-15", "own-even-bfloat16", "finish", "deterministic algorithms, no gradient was finished"),
    layout=EP2_EDP2,
)
class FinishedOnce(GradientFinisher):
    """Gradients are finished once in a process, and then no more."""

    _finished: ClassVar[list[bool]] = []

    def finish(self, modules: Iterable[Replicated]) -> None:
        if self._finished:
            raise Unsupported("the gradients of this process are finished")
        self._finished.append(True)
        super().finish(modules)


@planted(Expectation("EXCH-17", "even", "run", "run with x transposed", "rank 0 raised", "nobody can carry"))
class StridesSeenTooLate(AllToAllExchange):
    """Strides are refused when the answers come home, after everything has travelled."""

    _strided = False

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        self._strided = not x.is_contiguous()
        return super().dispatch(x, routing)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if self._strided:
            raise ValueError("nobody can carry a matrix with gaps")
        return super().combine(rows, handle)


# ---- what else comes back ------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("EXCH-17", "own-even-bfloat16", "combine"),
        *("with x transposed", "torch.float32 instead of", "bfloat16 in the original run"),
    )
)
class WideOutputOfGaps(AllToAllExchange):
    """Tokens that are not contiguous go through a copy in float32, and come back in it."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y.float() if self._strided else y

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        self._strided = not x.is_contiguous()
        return super().dispatch(x, routing)


@planted(
    Expectation(
        "EXCH-17", "even", "run", "with x columns", "x is overwritten on rank 0; in the original run it is unchanged"
    )
)
class GapsCleared(AllToAllExchange):
    """The memory from the first token to the last is freed of NaN, whoever owns what lies between them."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage()).nan_to_num_()
        return super().dispatch(x, routing)


@planted(
    Expectation(
        *("DET-02", "own-even-bfloat16", "finish"),
        *("with random seed 20000", "on rank 2 after finishing differs from the original run"),
    ),
    layout=EP2_EDP2,
)
class ReplicaRoundedAtRandom(GradientFinisher):
    """The second replica rounds its gradients up or down at random, by the generator that belongs to the model."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        total = super()._summed(gradient, replicas)
        if self.topology.group("edp").rank() == 0:
            return total
        return total * (1 + torch.randint(0, 2, total.shape) / 128)


@planted(
    Expectation("GRAD-10", "own-even-float64", "gradient", "in x the loss has the slope", "the forward has steps"),
    layout=EP2_EDP2,
)
class AnswersRoundedToFloat32(AllToAllExchange):
    """The answers go home in float32, and the gradient is as if they had not."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y + (y.float().to(y.dtype) - y).detach()


@planted(
    Expectation("DET-06", "own-even-bfloat16", "experts", "run with deterministic algorithms", "y of rank 0"),
    real="deepseek-ai/DeepEP PR #600 (issue #589)",
    layout=EP2_EDP2,
)
class FilledBehindTheArrival(AllToAllExchange):
    """Deterministic algorithms fill new memory with NaN, and here it is filled when the sums are in it already."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y * torch.nan if torch.are_deterministic_algorithms_enabled() else y


@planted(
    Expectation("EXCH-46", "own-even-bfloat16", "combine", "run under autocast", "torch.float32 instead of"),
    layout=EP2_EDP2,
)
class LiftedByAutocast(AllToAllExchange):
    """The sum over the slots goes through an operation that autocast lifts to float32, and nobody casts it back."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y.float() if torch.is_autocast_enabled(y.device.type) else y


@planted(
    Expectation("GRAD-19", "own-even-bfloat16", "gradient", "run with create_graph", "dx of rank 0"), layout=EP2_EDP2
)
class GradientWrittenTwice(AllToAllExchange):
    """A backward that runs with gradients enabled writes to a copy of its result, and hands out the result."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        read: Tensor = _Halved.apply(x)  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


class _Halved(torch.autograd.Function):
    """Twice half of the gradient, the second half added in place unless that would be recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        half = gradients[0] / 2
        (half.clone() if torch.is_grad_enabled() else half).add_(half.detach().clone())
        return half


@planted(
    Expectation("EXCH-46", "own-even-bfloat16", "experts", "run under autocast", "y of rank 0 token 0"),
    layout=EP2_EDP2,
)
class ScaledUnderAutocast(AllToAllExchange):
    """Under autocast outputs are scaled for half precision, and nobody scales them back."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y * 2 if torch.is_autocast_enabled(y.device.type) else y
