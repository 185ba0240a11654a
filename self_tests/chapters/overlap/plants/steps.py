"""OVLP: bugs in steps that overlap exchanges with other microbatches, in deferred weight gradients, and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.chunks import ChunkedExchange
from moe_conformance.backends.native.exchange.collectives import AsyncAllToAll
from moe_conformance.backends.native.exchange.dispatchers import Departed
from moe_conformance.backends.native.layer.deferred import Put, WeightGradients
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.overlapped_pass import LayerPass, Pass
from moe_conformance.backends.native.layer.overlapped_step import OverlappedStep
from moe_conformance.contract import ExpertFn, Routing
from self_tests.planted_bugs.plant import EP2_EDP2, SINGLE, Expectation, planted

# ---- microbatches mixed up -----------------------------------------------------------------------------------------


@planted(Expectation("OVLP-04", "overlap-even", "gradient", "dL/dx of microbatch", "differs from the sequential step"))
class UpstreamOfTheForward(OverlappedStep):
    """The backward of a microbatch begins with the upstream gradient of the one whose forward runs beside it."""

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        return super().run(xs, [*upstreams[1:], *upstreams[-1:]])


@planted(
    Expectation(
        "OVLP-04",
        "overlap-even",
        "combine",
        "returns y of",
        "in the overlapped step behind another microbatch instead of",
    ),
)
class LastForwardMissing(OverlappedStep):
    """From the second step on, y of the last microbatch is missing, whose forward another pass is to return."""

    steps = 0

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        self.steps += 1
        return super().run(xs, upstreams)[: None if self.steps == 1 else -1]


@planted(
    Expectation("OVLP-04", "overlap-uneven", "gradient", "dL/dx of microbatch 0 on rank 0", "differs"),
    Expectation("OVLP-05", "overlap-uneven", "finish", "router of layer 0", "it was never computed"),
    real="NVIDIA/Megatron-LM commit 3b1521e29c (#4500)",
)
class DetachedWeights(LayerPass):
    """Between two pieces the routing weights are replaced by a detached copy: the router gets no gradient."""

    def _routed(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        rows_QD, weights_P, x_TD = super()._routed(x_TD)
        return rows_QD, weights_P.detach() + 0 * weights_P, x_TD


# ---- deferred weight gradients -------------------------------------------------------------------------------------


@planted(
    Expectation(
        "OVLP-06",
        "overlap-deferred-uneven",
        "gradient",
        "of shared expert 0 of layer 0",
        "is None; the sequential step has",
    ),
    real="NVIDIA/Megatron-LM commit a4008d0f2f (#2977)",
)
class SharedExpertsForgotten(WeightGradients):
    """What is put off is computed for the routed experts, and never for the shared ones."""

    def compute(self) -> None:
        self.pending = [each for each in self.pending if each.weight.n is not None]
        super().compute()


@planted(Expectation("OVLP-07", "overlap-deferred-uneven", "gradient", "of layer 0", "microbatch 0 was added twice"))
class NeverTakenOff(WeightGradients):
    """What was computed stays in the queue, and is computed again behind the next microbatch."""

    def compute(self) -> None:
        kept = self.pending
        super().compute()
        self.pending = kept


@planted(Expectation("OVLP-07", "overlap-deferred-uneven", "gradient", "of layer 0", "that of microbatch 1 is missing"))
class OneBehind(WeightGradients):
    """Products are computed as the next microbatch has left its own, so that the last are never computed."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def compute(self) -> None:
        self.pending, self.held = self.held, self.pending
        super().compute()


class KeptInOneBuffer(WeightGradients):
    """Keeps the rows of a weight in one buffer, and computes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[tuple[Put, torch.Size], Tensor] = {}

    def note(self, weight: Put, rows_RD: Tensor, upstream_RO: Tensor) -> None:
        buffer = self.buffers.setdefault((weight, rows_RD.shape), torch.empty_like(rows_RD))
        super().note(weight, buffer.copy_(rows_RD), upstream_RO)

    def compute(self) -> None:
        """Compute nothing yet."""


@planted(
    Expectation("OVLP-07", "overlap-deferred-uneven", "gradient", "of expert", "of layer 0", "in the overlapped step"),
    also=(KeptInOneBuffer,),
)
class RowsOfTheLast(OverlappedStep):
    """All products are put off to the end of the step, with rows that the last microbatch has written over."""

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = super().run(xs, upstreams)
        for queue in self.queues:
            WeightGradients.compute(queue)
        return ys


@planted(
    Expectation("OVLP-06", "overlap-deferred-one-microbatch-uneven", "gradient", "of expert"),
    real="pytorch/pytorch issue #172439; openxla/tokamax issue #887",
)
class StaleProductOfAnIdleExpert(WeightGradients):
    """The product of an expert without rows is what its buffer holds: that of another expert."""

    def compute(self) -> None:
        latest: dict[nn.Parameter, Any] = {}
        for place, product in enumerate(self.pending):
            if len(product.rows_RD):
                latest[product.weight.parameter] = product
            elif product.weight.parameter in latest:
                self.pending[place] = latest[product.weight.parameter]._replace(weight=product.weight)
        super().compute()


@planted(
    Expectation("OVLP-07", "overlap-deferred-uneven", "gradient", "of layer 0", "is None; the sequential step has"),
    layout=SINGLE,
)
class ComputedDuringExchangesAlone(LayerPass):
    """What is put off is computed while rows are on their way, which with ep = 1 they never are."""

    def _combined(self, rows_RD: Tensor, meanwhile: Callable[[], None] | None = None) -> Pass:
        return super()._combined(rows_RD, meanwhile if self.group.size() > 1 else None)


@planted(
    Expectation("OVLP-08", "overlap-deferred-uneven", "gradient", "of microbatch 1 alone, which replaced what was"),
    real="NVIDIA/TransformerEngine PR #2142",
)
class ReplacesTheGradient(WeightGradients):
    """A gradient that was put off takes the place of what earlier microbatches have left."""

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient.to(parameter.grad_dtype)


class Unfinished(WeightGradients):
    """Computes nothing until it is told to."""

    queues: ClassVar[list[WeightGradients]] = []

    def compute(self) -> None:
        self.queues.append(self)


@planted(
    Expectation("OVLP-09", "overlap-deferred-uneven", "finish", "the finished gradient of", "of layer 0"),
    layout=EP2_EDP2,
    also=(Unfinished,),
)
class ReducedBefore(GradientFinisher):
    """Gradients are reduced over replicas first, and what was put off is added to the sum."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        super().finish(modules)
        for queue in Unfinished.queues:
            WeightGradients.compute(queue)
        Unfinished.queues.clear()


@planted(Expectation("OVLP-10", "overlap-deferred-uneven", "gradient", "expected down before gate and up"))
class UpAndGateFirst(WeightGradients):
    """Products are computed in the order of the forward, so that the buffers of the last are free last."""

    def compute(self) -> None:
        self.pending = self.pending[::-1]
        super().compute()


# ---- what is changed in flight, or not overlapped --------------------------------------------------------------------


@planted(Expectation("OVLP-02", "overlap-watched-uneven", "run", "sends was changed before wait()"))
class SentRowsReused(LayerPass):
    """The buffer of rows that are being sent is filled again before they have been."""

    def _exchanged(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], meanwhile: Callable[[], None] | None = None
    ) -> Pass:
        buffer = rows.contiguous().clone()
        under_way = super()._exchanged(buffer, sent, received, meanwhile)
        next(under_way)
        buffer.zero_()
        yield
        return (yield from under_way)


@planted(Expectation("OVLP-12", "overlap-even", "run", "0 collectives in flight while it computes", "2 collectives"))
class AwaitedAtOnce(LayerPass):
    """Every exchange is waited for where it is started: the schedule is as it was, and nothing overlaps."""

    def _exchanged(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], meanwhile: Callable[[], None] | None = None
    ) -> Pass:
        exchange = AsyncAllToAll(sent, received, self.group)
        exchange.start(rows)
        arrived = exchange.wait()
        if meanwhile is not None:
            meanwhile()
        yield
        return arrived


@planted(Expectation("OVLP-14", "overlap-even", "run", "rank 0 calls all_to_all_single on group (0, 1)", "instead of"))
class CountsTwice(LayerPass):
    """The splits are agreed on once for dispatch and once for combine."""

    def _answered(self, rows_RD: Tensor) -> tuple[Tensor, ...]:
        self.exchange._plan(self.permuted.rows_E)
        return super()._answered(rows_RD)


@planted(Expectation("OVLP-15", "overlap-recomputed-uneven", "gradient", "dL/dx of microbatch 0 on rank 0", "differs"))
class RecomputedFromACopy(LayerPass):
    """What is recomputed begins with rows that were kept in bfloat16."""

    calls = 0

    def _answered(self, rows_RD: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return super()._answered(rows_RD if self.calls == 1 else rows_RD.bfloat16().to(rows_RD.dtype))


# ---- chunks --------------------------------------------------------------------------------------------------------


@planted(Expectation("OVLP-13", "chunks-2-uneven", "dispatch", "rank 0 token 8", "was not delivered"))
class WholeChunksOnly(ChunkedExchange):
    """All chunks have T / degree tokens, rounded down: what is left over is not sent."""

    def _cut(self, x_TD: Tensor, routing: Routing) -> list[tuple[Tensor, Routing]]:
        size = len(x_TD) // self.chunks
        return super()._cut(x_TD[: size * self.chunks], _first(routing, size * self.chunks))

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        size = len(x_TD) // self.chunks * self.chunks
        y_TD = super().__call__(x_TD[:size], _first(routing, size), expert)
        return torch.cat([y_TD, x_TD[size:] * 0]).reshape(x.shape)


@planted(Expectation("OVLP-13", "chunks-3-rank-without-tokens", "combine", "rank"))
class ChunksOutOfOrder(ChunkedExchange):
    """Outputs are put together in the order in which chunks came back, the last first."""

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        y = super().__call__(x, routing, expert)
        return torch.cat(y.tensor_split(self.chunks)[::-1])


@planted(Expectation("OVLP-13", "chunks-3-poisoned-even", "dispatch", "rank"))
class WaitsForTheLastChunk(ChunkedExchange):
    """A chunk is used when the last one has been started, without a wait of its own."""

    def _answered(self, departed: Departed, expert: ExpertFn) -> Tensor:
        early = departed.exchange.result.clone()
        rows = collectives.arrive(departed.rows, departed.exchange)
        arrived = early + (rows - rows.detach())
        delivery, handle = self.exchange.delivered(arrived, departed.plan, departed.permuted)
        return self.exchange.combine(expert(delivery), handle)


def _first(routing: Routing, tokens: int) -> Routing:
    return Routing(routing.ids_TK[:tokens], routing.weights_TK[:tokens], routing.experts)
