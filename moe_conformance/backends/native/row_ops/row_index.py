"""Rows by an index with sentinels; T tokens, R rows, D hidden."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moe_conformance.backends.native.offered import Offered


class RowIndex(Offered):
    """Leaves sentinels out before it reads or writes anything, so that what stands there cannot leak.

    Implements: EXCH-19.
    """

    surface = "row_index"

    @property
    def resolved(self) -> Mapping[str, str]:
        """How sentinels are kept out."""
        return {"row index": "real rows alone"}

    def gather(self, x_TD: Tensor, index_R: Tensor) -> Tensor:
        """Return x_i in every row, zeros at a sentinel."""
        real_R = self._real(index_R, len(x_TD))
        rows_RD = x_TD.new_zeros(len(index_R), x_TD.shape[1])
        return rows_RD.index_put((real_R.nonzero()[:, 0],), x_TD[index_R[real_R]])

    def scatter(self, rows_RD: Tensor, index_R: Tensor, weights_R: Tensor, tokens: int) -> Tensor:
        """Return the weighted sum of every token's rows."""
        real_R = self._real(index_R, tokens)
        weighted_RD = (rows_RD[real_R] * weights_R[real_R, None]).to(rows_RD.dtype)
        return rows_RD.new_zeros(tokens, rows_RD.shape[1]).index_add(0, index_R[real_R], weighted_RD)

    def _real(self, index_R: Tensor, tokens: int) -> Tensor:
        """Mark what is no sentinel."""
        return (index_R >= 0) & (index_R < tokens)
