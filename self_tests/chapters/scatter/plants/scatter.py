"""Scatter-add that loses rows, depends on the run, or writes what it must not."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from moe_conformance.backends.native.row_ops.scatter import ScatterAdd
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


@planted(
    Expectation("ALIAS-01", "scatter-repeats", "combine", "one alone was added"),
    Expectation("ALIAS-01", "scatter-one-row", "combine", "the result of add is", "one alone was added"),
    layout=SINGLE,
)
class RepeatsLost(ScatterAdd):
    """Of source rows with the same index one alone is added, as by an assignment without accumulation."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Assign."""
        return out_ND.index_put((index_J,), out_ND[index_J] + src_JD)


@planted(
    Expectation("ALIAS-01", "scatter-few", "combine", "has other bits than out", "zeros were added to it"),
    layout=SINGLE,
)
class ZerosAdded(ScatterAdd):
    """Rows without a source row get zeros added, which turns -0.0 into 0.0."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Add to every row."""
        return out_ND + torch.zeros_like(out_ND).index_add(0, index_J, src_JD)


@planted(
    Expectation("ALIAS-01", "scatter-repeats", "combine", "computed with the precision of bfloat16"), layout=SINGLE
)
class NarrowSums(ScatterAdd):
    """Sums are kept in bfloat16, whatever the dtype of the rows."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Add in bfloat16."""
        return super().add(out_ND.bfloat16(), index_J, src_JD.bfloat16()).to(out_ND.dtype)


@planted(
    Expectation("ALIAS-02", "scatter-repeats", "combine", "other bits", "the order of addition varies"),
    Expectation("ALIAS-02", "scatter-repeats-bfloat16", "combine", "call 1, add_", "the order of addition varies"),
    layout=SINGLE,
)
class OrderOfEveryCall(ScatterAdd):
    """Rows are added in an order that is another in every call, as by atomic additions."""

    calls = count()

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Begin at another source row in every call."""
        turned_J = torch.arange(len(index_J)).roll(next(self.calls))
        y_ND = out_ND.clone()
        for j in turned_J.tolist():
            y_ND[index_J[j]] += src_JD[j]
        return y_ND


@planted(
    Expectation("ALIAS-03", "scatter-repeats", "combine", "add changed out_ND", "shares memory with out_ND"),
    layout=SINGLE,
)
class AddsInPlaceAlways(ScatterAdd):
    """The out-of-place form adds in place."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Write into out."""
        return out_ND.copy_(super().add(out_ND, index_J, src_JD))


@planted(
    Expectation("ALIAS-03", "scatter-few", "combine", "add_ returned another tensor instead of out_ND itself"),
    layout=SINGLE,
)
class ReturnsACopy(ScatterAdd):
    """The in-place form writes its output and returns another tensor."""

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return a copy."""
        return super().add_(out_ND, index_J, src_JD).clone()


@planted(Expectation("ALIAS-03", "scatter-repeats", "combine", "changed index_J"), layout=SINGLE)
class SortsTheIndex(ScatterAdd):
    """The index is sorted where it lies, and the rows with it in a copy."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Sort the index in place."""
        order_J = index_J.argsort(stable=True)
        index_J.copy_(index_J[order_J])
        return super().add(out_ND, index_J, src_JD[order_J])


@planted(Expectation("ALIAS-03", "scatter-few", "run", "add_ on rank 0 raised", "no in-place form"), layout=SINGLE)
class RaisesInPlace(ScatterAdd):
    """The in-place form raises an error of its own, which is no refusal of the library's."""

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Raise."""
        raise RuntimeError("no in-place form")
