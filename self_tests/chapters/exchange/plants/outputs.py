"""EXCH: bugs in the form of outputs, and in what an exchange changes, keeps or lends; the grad mode is one of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation("EXCH-07", "even-bfloat16", "combine", "has the dtype torch.float32 instead of torch.bfloat16"),
    real="NVIDIA/Megatron-LM commit 20b395424d (!3774)",
)
class OutputUpcast(AllToAllExchange):
    """A factor in float32 lifts bfloat16 rows, and nobody casts them back."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return rows_PD * weights_P.unsqueeze(1)


@planted(
    Expectation("EXCH-07", "even", "combine", "is not finite at", "although its terms fit torch.float32"),
    Expectation("EXCH-07", "own-even-bfloat16", "combine", "is not finite at", "although its terms fit torch.bfloat16"),
)
class SummedAtTooLargeAScale(AllToAllExchange):
    """Rows are scaled up before they are added, so that no small term is lost, and the sum down again."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        return super()._unpermute(rows_PD * 2.0**127 * 2.0**4, permuted) * 2.0**-127 * 2.0**-4


@planted(Expectation("EXCH-07", "two-dims-even", "combine", "has the shape (8, 32) instead of (4, 2, 32)"))
class OutputFlattened(AllToAllExchange):
    """The leading dimensions do not come back."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        return super()._unpermute(rows_PD, permuted).flatten(0, -2)


@planted(
    Expectation("EXCH-08", "even", "run", "the backend changed its input ids on rank 1"),
    real="vllm-project/vllm PR #52639",
)
class IdsOverwritten(AllToAllExchange):
    """Local ids are written over the caller's global ones."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        rows_PD, permuted = super()._permute(x, routing, room)
        routing.ids_TK.sub_(self.placement.first)
        return rows_PD, permuted


@planted(Expectation("EXCH-08", "even", "run", "the backend changed its input upstream on rank 0"))
class UpstreamRecycled(AllToAllExchange):
    """The backward of combine uses the memory of the upstream gradient for itself."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)

        def recycle(upstream: Tensor) -> Tensor:
            own = upstream.clone()
            upstream.zero_()
            return own

        y.register_hook(recycle)
        return y


@planted(
    Expectation("EXCH-09", "rank-without-tokens", "run", "rank 1 hung: returned while rank 0 waited in a collective"),
    real="vllm-project/vllm PRs #51984, #53578",
)
class EarlyReturnWithoutTokens(AllToAllExchange):
    """A rank without tokens returns at once, and its peers wait for it."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if not len(x):
            return Delivery.grouped(x, torch.zeros(self.placement.held, dtype=torch.int64)), None
        return super().dispatch(x, routing)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return rows if handle is None else super().combine(rows, handle)


@planted(
    Expectation("EXCH-09", "idle-rank-even", "run", "rank 1 raised in forward:0: RuntimeError", "null pointer"),
    real="NVIDIA/TransformerEngine commit af1ed4412 (#3276)",
)
class NullPointerRefused(AllToAllExchange):
    """A check forbids a null pointer where there are no rows to point to."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        if rows_RD.data_ptr() == 0:
            raise RuntimeError("rows must not be a null pointer")
        return super()._regroup(rows_RD, order_R)


@planted(
    Expectation(
        *(
            "EXCH-10",
            "halves-in-flight-even",
            "combine",
            "microbatches 0 and 1 were in flight at the same time, of which 1",
        ),
        "y of microbatch 0 is wrong; likely cause: every answer went to the token that",
        "the token that the routing of microbatch 1 has in its place",
    ),
    real="deepseek-ai/DeepEP PR #580",
)
class OneRoutingAtATime(AllToAllExchange):
    """The second dispatch overwrites what the exchange remembers of the first."""

    latest: Pairs

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        self.latest = pairs
        return super()._weights(routing, pairs)

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        return super()._unpermute(rows_PD, replace(permuted, pairs=self.latest))


@planted(Expectation("EXCH-11", "even", "run", "rank 0 changed torch's random state, and left it so"))
class Reseeds(AllToAllExchange):
    """Every dispatch seeds the global generator, so that dropout elsewhere in the model repeats itself."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        torch.manual_seed(0)
        return super().dispatch(x, routing)


@planted(Expectation("EXCH-11", "even", "run", "rank 0 changed numpy's random state, and left it so"))
class TiesByNumpy(AllToAllExchange):
    """Every dispatch draws an order of the experts from numpy's global generator, by which loaders order the data."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        numpy.random.permutation(routing.experts)
        return super().dispatch(x, routing)


@planted(
    Expectation(
        "EXCH-32",
        "in-flight-uneven",
        "combine",
        "a row delivered to an expert of microbatch 0 on rank 0 was overwritten",
    )
)
class LendsItsRows(AllToAllExchange):
    """The rows of the next microbatch arrive in the memory of the last one's, which experts may still need."""

    lent: Tensor | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        rows = delivery.rows_RD
        if self.lent is not None:
            n = min(len(rows), len(self.lent))
            self.lent.data[:n] = rows.data[:n]
        self.lent = rows
        return delivery, handle


@planted(
    Expectation("EXCH-38", "inference-even", "combine", "y of rank 0 token 0", "microbatch 0", "multiplied by 1"),
    Expectation(
        "EXCH-38", "inference-in-turn-even", "combine", "y of rank 0 token 0", "microbatch 0", "multiplied by 1"
    ),
    Expectation("EXPT-01", "own-inference-in-turn-even", "experts", "y of rank 0 token 0 is"),
)
class UnweightedInference(AllToAllExchange):
    """The path without gradients forgets the weights."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return super()._weigh(rows_PD, weights_P) if torch.is_grad_enabled() else rows_PD


@planted(Expectation("EXCH-38", "inference-unasked-even", "run", "rank 0 raised in unasked:0", "require gradient"))
class HooksItsOutput(AllToAllExchange):
    """Where gradients are recorded, the output is taken to require one, whatever the tokens do."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        if torch.is_grad_enabled():
            y.register_hook(torch.clone)
        return y


@planted(
    Expectation(
        "EXCH-38", "inference-dropped-even", "dispatch", "for expert 0 is rank", "which is not routed to this expert"
    ),
    Expectation(
        *("EXCH-38", "inference-gaps-padded-uneven", "dispatch"),
        *("for expert 0 is rank", "which is not routed to this expert"),
    ),
)
class EmptySlotsInInference(AllToAllExchange):
    """The path without gradients has a fixed shape, in which slots that are empty go to the first expert."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if not torch.is_grad_enabled():
            routing = replace(routing, ids_TK=routing.ids_TK.clamp_min(0))
        return super().dispatch(x, routing)


@planted(Expectation("EXCH-39", "filled-even", "combine", "y of rank 0", "not finite"))
class AddsWhatWasThere(AllToAllExchange):
    """Answers are added to memory that nobody has cleared; multiplied by zero first, which seems to be enough."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y + 0 * torch.empty_like(y)


_CHANGED = "rank 0 changed the grad mode, and left it so"


@planted(
    Expectation("EXCH-11", "own-inference-even", "run", _CHANGED),
    Expectation("EXCH-11", "shared-inference-even", "run", _CHANGED),
)
class FinishSwitchesGradientsOn(GradientFinisher):
    """Autograd is off for the sums over replicas and on afterwards, also for a trainer that had switched it off."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        torch.set_grad_enabled(False)
        super().finish(modules)
        torch.set_grad_enabled(True)


@planted(Expectation("EXCH-11", "inference-even", "run", _CHANGED))
class DispatchSwitchesGradientsOn(AllToAllExchange):
    """Autograd is on after every dispatch, also in a forward without gradients."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        dispatched = super().dispatch(x, routing)
        torch.set_grad_enabled(True)
        return dispatched


@planted(Expectation("EXCH-11", "shared-inference-even", "run", _CHANGED))
class LayerSwitchesGradientsOn(Layer):
    """A layer that switches autograd off for a moment switches it on again, whatever it was."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return super().forward(x)
