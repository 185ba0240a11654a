"""GRAD: bugs that show where something goes backward from rows that are no token's."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.fused.low_latency import Filled, LowLatencyExchange
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.router.capacity import Blocks
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

_HOW = "with a large gradient at every padding row, "


@planted(
    Expectation("GRAD-09", "to-capacity-even", "gradient", f"run {_HOW}dx of rank 0 token"),
    Expectation("GRAD-09", "own-to-capacity-even", "gradient", f"run {_HOW}dx of rank 0 token"),
)
class FilledUpWithTheFirstRow(AllToAllExchange):
    """Places that are left are filled with the first row, and cleared past autograd."""

    def _fill(self, rows_PD: Tensor, blocks: Blocks | None) -> Tensor:
        if blocks is None or not len(rows_PD):
            return super()._fill(rows_PD, blocks)
        from_Q = torch.zeros(int(blocks.room_E.sum()), dtype=torch.int64).index_put(
            (blocks.place_P,), torch.arange(len(rows_PD))
        )
        rows_QD = rows_PD[from_Q]
        left_Q = torch.ones(len(rows_QD), dtype=torch.bool).index_put((blocks.place_P,), torch.tensor(False))
        rows_QD.data[left_Q] = 0
        return rows_QD


@planted(Expectation("GRAD-09", "even", "gradient", f"run {_HOW}dx of rank 0 token 0"))
class EmptyPlacesReadTheFirstToken(LowLatencyExchange):
    """Every place reads the gradient of some token's row: those without one that of the first."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        first_D = x.reshape(-1, x.shape[-1])[0]
        leak_QD = (first_D - first_D.detach()).repeat(filled.shape[0] * filled.shape[1], 1)
        leak_QD = leak_QD.index_put((filled.place_R,), torch.tensor(0.0))
        return rows_NCD + leak_QD.reshape(rows_NCD.shape), filled


@planted(
    Expectation(
        *("GRAD-09", "own-to-capacity-even", "finish"),
        *(_HOW, "the gradient of", "on rank 0 before finishing differs from the original run"),
    ),
    layout=EP2_EDP2,
)
class RowsOfNobodyAreOnes(Experts):
    """Experts run over padding rows as they lie in memory, and count on their gradients to be zero."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        return super()._loop(torch.where((rows_PD == 0).all(1, keepdim=True), 1, rows_PD), counts_N)
