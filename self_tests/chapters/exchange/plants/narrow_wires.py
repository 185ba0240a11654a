"""EXCH: bugs by which rows, weights or gradients travel in narrower types than they have, where nobody asked for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.fused.low_latency import Filled, LowLatencyExchange
from moe_conformance.backends.native.fused.surface import ReusableExchange
from moe_conformance.backends.native.fused.token_exchange import Handle, TokenExchange
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Delivery, Received, Routing
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted


class _Through(torch.autograd.Function):
    """The identity, but for what narrower types do to values on their way there, and to gradients on theirs back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: torch.dtype, back: torch.dtype) -> Tensor:
        ctx.back = back
        return tensor.to(there).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.to(ctx.back).to(gradient.dtype), None, None


def _through(tensor: Tensor, there: torch.dtype, back: torch.dtype) -> Tensor:
    passed: Tensor = _Through.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return passed


# ---- the exchange --------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-02", "every-bit-even", "dispatch", "row 0 of microbatch 0 delivered to rank 0 is rank", "e4m3fn"),
    Expectation(
        *("EXCH-02", "every-bit-even-bfloat16", "dispatch"),
        *("delivered to rank 0 is rank", "with the precision of torch.float8_e4m3fn"),
    ),
    Expectation("EXCH-05", "every-bit-uneven", "combine", "y of rank 0 token 0 of microbatch 0 in column 0 is"),
    Expectation("GRAD-03", "every-bit-even", "gradient", "dweights of rank"),
)
class DispatchInEightBits(AllToAllExchange):
    """Tokens travel in eight bits and without scales, where nobody has asked for it."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return super().dispatch(_through(x, torch.float8_e4m3fn, x.dtype), routing)


@planted(
    Expectation("EXCH-05", "every-bit-even", "combine", "y of rank 0 token 0 of microbatch 0 in column 0 is"),
    Expectation("EXCH-05", "every-bit-even-float64", "combine", "y of rank 0 token 0 of microbatch 0 in column 0 is"),
)
class CombineInBfloat16(AllToAllExchange):
    """Answers travel home in bfloat16."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(_through(rows, torch.bfloat16, rows.dtype), handle)


@planted(
    Expectation("GRAD-02", "every-bit-even", "gradient", "dx of rank 0 token 0 of microbatch 1 in column 0 is"),
    Expectation("GRAD-02", "every-bit-input-weights-even", "gradient", "dx of rank 0 token 0 of microbatch 1"),
)
class GradientsInBfloat16(AllToAllExchange):
    """Gradients travel home in bfloat16, as buckets of them do."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return super().dispatch(_through(x, x.dtype, torch.bfloat16), routing)


@planted(
    Expectation("EXCH-05", "every-bit-even", "combine", "y of rank 0 token 0 of microbatch 2 in column"),
    Expectation("GRAD-02", "every-bit-even", "gradient", "dx of rank 0 token 0 of microbatch 2 in column"),
)
class WeightsInBfloat16(AllToAllExchange):
    """Weights are cast to the type in which models compute, whatever these tokens have."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        weights_P = super()._weights(routing, pairs)
        return weights_P.bfloat16().to(weights_P.dtype)


@planted(Expectation("GRAD-03", "every-bit-even", "gradient", "dweights of rank 0 token 0 of microbatch 0 in column 0"))
class WeightGradientsInBfloat16(AllToAllExchange):
    """Gradients of weights travel home in bfloat16."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        weights_P = super()._weights(routing, pairs)
        return _through(weights_P, weights_P.dtype, torch.bfloat16)


@planted(
    Expectation("EXCH-02", "every-bit-even", "dispatch", "with the precision of torch.bfloat16, in torch.float32"),
    Expectation("EXCH-05", "every-bit-even", "combine", "of microbatch 0 in column 0 is"),
    layout=EP2_ETP2,
)
class ShardsInBfloat16(AllToAllExchange):
    """Tokens are gathered by the shards of an expert in bfloat16; between experts they travel as they are."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        return super()._regroup(_through(rows_RD, torch.bfloat16, rows_RD.dtype), order_R)


@planted(
    Expectation(
        "EXCH-38", "every-bit-inference-even", "dispatch", "row 0 of microbatch 0 delivered to rank 0", "e4m3fn"
    )
)
class EightBitsInInference(AllToAllExchange):
    """Where no gradients are wanted, tokens travel in eight bits."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return super().dispatch(x if torch.is_grad_enabled() else x.to(torch.float8_e4m3fn).to(x.dtype), routing)


@planted(
    Expectation(
        *("EXCH-05", "one-product-even-bfloat16", "combine"),
        *("rounded once", "weights stay float32", "likely cause: weights were rounded to torch.bfloat16 before"),
    ),
    Expectation("EXCH-05", "sum-of-eight-even-bfloat16", "combine", "likely cause: weights were rounded"),
)
class WeightsInTheDtypeOfRows(AllToAllExchange):
    """Weights are cast to the dtype of the tokens before they are multiplied, as a library does that claims so."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        weights_P = super()._weights(routing, pairs)
        return weights_P.to(self.config.dtype).to(weights_P.dtype)


@planted(
    Expectation(
        *("EXCH-05", "sum-of-eight-even-bfloat16", "combine"),
        *("sums are in float32", "likely cause: partial sums were rounded to torch.bfloat16"),
    )
)
class SumsInTheDtypeOfRows(AllToAllExchange):
    """Rows are added one by one to an output of their dtype, which rounds after each, as atomic additions do."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        rows_PD = rows_QD if permuted.blocks is None else permuted.blocks.take(rows_QD)
        rows_PD = self._weigh(rows_PD, permuted.weights_P)
        pairs = permuted.pairs
        table_TKD = rows_PD.new_zeros(*pairs.shape, rows_PD.shape[1])
        table_TKD = table_TKD.index_put((pairs.token_P, pairs.slot_P), rows_PD)
        y_TD = table_TKD.new_zeros(len(table_TKD), table_TKD.shape[2])
        for slot_TD in table_TKD.unbind(1):
            y_TD = y_TD + slot_TD
        return y_TD.reshape(permuted.shape)


# ---- the token exchange --------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-27", "reused-handle", "dispatch", "call 0: row 0 on rank 0 is rank", "instead of", "in column"),
    Expectation("EXCH-27", "reused-handle-bfloat16", "dispatch", "call 0: row 0 on rank 0 is rank", "instead of"),
)
class EightBitsUnasked(ReusableExchange):
    """Tokens travel in eight bits and without scales, where nobody has asked for it."""

    def dispatch(
        self, x_TD: Tensor, ids_TK: Tensor | None = None, weights_TK: Tensor | None = None, handle: Handle | None = None
    ) -> Received:
        return super().dispatch(_through(x_TD, torch.float8_e4m3fn, x_TD.dtype), ids_TK, weights_TK, handle)


@planted(Expectation("EXCH-27", "reused-handle", "combine", "y of call 4 at rank 0 token"))
class SumsHalved(ReusableExchange):
    """What comes back from the experts travels in half the bits of the tokens."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        return super().combine(_through(rows_RD, torch.bfloat16, rows_RD.dtype), handle, biases)


@planted(
    Expectation(
        "EXCH-27", "reused-handle", "gradient", "the gradient of x_TD of dispatch (call 3) through combine (call 4)"
    )
)
class GradientsHalved(ReusableExchange):
    """Gradients travel back from the tokens' sums in half the bits of the tokens."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        y_TD = super().combine(rows_RD, handle, biases)
        return _through(y_TD, y_TD.dtype, torch.bfloat16)


@planted(Expectation("EXCH-27", "reused-handle", "dispatch", "was delivered to rank 0 with local experts and weights"))
class WeightsHalved(TokenExchange):
    """Weights travel in half their bits."""

    def _own_slots(self, weights_RK: Tensor, handle: Handle) -> Tensor:
        return super()._own_slots(weights_RK.bfloat16().to(weights_RK.dtype), handle)


@planted(
    Expectation(
        "EXCH-30",
        "float8-rows",
        "combine",
        "y of call 2 has the dtype torch.bfloat16 instead of torch.float32 on rank 0",
    )
)
class SumKeptNarrow(ReusableExchange):
    """The sums of rows that came in eight bits are returned in sixteen, whatever the tokens have."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        y_TD = super().combine(rows_RD, handle, biases)
        return y_TD if self.exchange.wire is None else y_TD.bfloat16()


@planted(
    Expectation("EXCH-29", "places", "dispatch", "rank 0 receives rows of torch.bfloat16 instead of torch.float32"),
    Expectation("EXCH-23", "tokens-over-limit", "dispatch", "rank 0 receives rows of torch.bfloat16 instead of"),
)
class PlacesInBfloat16(LowLatencyExchange):
    """Places hold bfloat16 whatever the tokens are, as in kernels that know nothing else."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        return rows_NCD.bfloat16(), filled


@planted(
    Expectation(
        "EXCH-29", "places", "combine", "y of call 2 has the dtype torch.bfloat16 instead of torch.float32 on rank 0"
    )
)
class PlacesAddedUpInBfloat16(LowLatencyExchange):
    """The sums are returned in bfloat16, as kernels make them."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle).bfloat16()


@planted(Expectation("EXCH-29", "places", "dispatch", "call 0: rank 0 has rank", "in place", "instead of"))
class PlacesRounded(LowLatencyExchange):
    """Tokens travel in bfloat16 and are handed over in the dtype that they had."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        return super().fill(_through(x, torch.bfloat16, x.dtype), routing, tokens_max)


@planted(Expectation("EXCH-29", "places", "gradient", "the gradient of the tokens through call 2 at rank 0 token"))
class PlacesRoundedBack(LowLatencyExchange):
    """Gradients travel to the places in bfloat16."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(_through(rows, rows.dtype, torch.bfloat16), handle)
