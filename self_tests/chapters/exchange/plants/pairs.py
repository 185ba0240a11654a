"""EXCH: bugs that show where two options meet, each of which is right alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted, Plan
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted

_EP4 = Layout(4, ep=4)


@planted(Expectation("EXCH-02", "pairs-exchange-5", "dispatch", "except in column 66"), layout=TP2_EP2)
class PairsOfHalves(AllToAllExchange):
    """Rows of two-byte numbers are sent as half as many four-byte numbers: of an odd number the last is lost."""

    def _send(self, rows_QD: Tensor, plan: Plan) -> Tensor:
        sent = rows_QD
        if rows_QD.element_size() == 2 and rows_QD.shape[1] % 2:
            sent = torch.cat([rows_QD[:, :-1], torch.zeros_like(rows_QD[:, -1:])], dim=1)
        return super()._send(sent, plan)


@planted(
    Expectation("EXCH-05", "pairs-exchange-13", "combine", "is that of rank 0 token 2 of microbatch 0"), layout=_EP4
)
class OddSlotsTransposed(AllToAllExchange):
    """Outputs of an odd number of slots are summed sequence by sequence, and returned as if position by position."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        y = super()._unpermute(rows_QD, permuted)
        if y.dim() == 3 and permuted.pairs.shape[1] % 2:
            return y.transpose(0, 1).reshape(y.shape)
        return y


@planted(Expectation("EXCH-05", "pairs-exchange-17", "combine", "rank 0"), layout=_EP4)
class WeighedTwiceInFloat16(AllToAllExchange):
    """The kernel of float16 multiplies outputs by their weights, whether or not the rows have been."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        if self.weighs_input and rows_QD.dtype == torch.float16:
            rows_QD = self._weigh(rows_QD, permuted.weights_P)
        return super()._unpermute(rows_QD, permuted)
