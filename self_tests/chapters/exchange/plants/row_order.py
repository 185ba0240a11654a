"""EXCH: a combine that puts rows in another order than the one in which they arrived."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation(
        *("EXCH-05", "even", "combine", "y of rank 0 token 0", "is the answer for rank"),
        "likely cause: rows came back in another order than they were sent",
    ),
    Expectation("GRAD-01", "even", "gradient", "likely cause: gradients came back in another order than the rows"),
)
class OrderAppliedTwice(AllToAllExchange):
    """The answers are put in the order of the experts once more, in place of the order in which rows arrived."""

    def _ungroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        return rows_RD.index_select(0, order_R)
