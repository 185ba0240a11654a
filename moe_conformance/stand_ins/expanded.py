"""The expanded layout of DeepEP 2: a row for each pair of a received token and an expert of this rank, by expert.

From deep_ep/buffers/elastic.py, csrc/elastic/buffer.hpp and deep_ep/include/deep_ep/impls/combine_reduce_epilogue.cuh
of deepseek-ai/DeepEP, main at dd758ca (2.1.0).

R tokens received, K slots, N experts held, P pairs, A rows of the layout, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Expanded:
    """The places of the pairs. An expert's rows are followed by its padding, which is not written."""

    pair_P: Tensor  # slot r * K + k of the pair
    row_P: Tensor  # its row
    counts_N: Tensor  # pairs of each expert
    starts_N: Tensor  # first row of each expert
    rows: int  # A

    @classmethod
    def of(cls, ids_RK: Tensor, held: int, alignment: int, *, backwards: bool) -> Expanded:
        """Lay out the pairs of local ids, -1 being none.

        An expert's pairs are in the order in which they arrive, which no caller knows: here it is that of the tokens,
        or `backwards`.
        """
        pair_P = (ids_RK.flatten() >= 0).nonzero()[:, 0]
        pair_P = pair_P.flip(0) if backwards else pair_P
        expert_P, order_P = ids_RK.flatten()[pair_P].sort(stable=True)
        counts_N = torch.bincount(expert_P, minlength=held)
        aligned_N = -(-counts_N // alignment) * alignment
        starts_N = aligned_N.cumsum(0) - aligned_N
        before_P = (counts_N.cumsum(0) - counts_N)[expert_P]
        row_P = starts_N[expert_P] + torch.arange(len(expert_P)) - before_P
        return cls(pair_P[order_P], row_P, counts_N, starts_N, int(aligned_N.sum()))

    @property
    def ends_N(self) -> Tensor:
        """Where the pairs of each expert end, without its padding: the library's prefix sum of this layout."""
        return (self.starts_N + self.counts_N).int()

    def rows_of(self, rows_RD: Tensor, slots: int, *, zero_padding: bool) -> Tensor:
        """Return the rows of the pairs; padding is NaN, or zero where the call asks for that."""
        rows_AD = rows_RD.new_full((self.rows, rows_RD.shape[1]), 0.0 if zero_padding else float("nan"))
        rows_AD[self.row_P] = rows_RD[self.pair_P // slots]
        return rows_AD

    def weights_of(self, weights_RK: Tensor) -> Tensor:
        """Return the weights of the pairs, (A,)."""
        weights_A = weights_RK.new_full((self.rows,), float("nan"))
        weights_A[self.row_P] = weights_RK.flatten()[self.pair_P]
        return weights_A

    def summed(self, rows_AD: Tensor, received: int, slots: int) -> Tensor:
        """Return the sum of each received token's rows, in float32 at least."""
        assert len(rows_AD) == self.rows, "a combine takes as many rows as were expanded"
        wide = torch.promote_types(rows_AD.dtype, torch.float32)
        sums_RD = rows_AD.new_zeros((received, rows_AD.shape[1]), dtype=wide)
        sums_RD.index_add_(0, self.pair_P // slots, rows_AD[self.row_P].to(wide))
        return sums_RD.to(rows_AD.dtype)

    def slots_of(self, weights_A: Tensor, received: int, slots: int) -> Tensor:
        """Return the weights of the pairs at their slots, (R, K), and 0 at others."""
        assert len(weights_A) == self.rows, "a combine takes as many weights as were expanded"
        weights_RK = weights_A.new_zeros(received * slots)
        weights_RK[self.pair_P] = weights_A[self.row_P]
        return weights_RK.reshape(received, slots)
