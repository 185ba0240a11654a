"""Native's permutation as a surface: tokens to rows sorted by expert, every segment padded, and back.

R rows, padding included; the other letters are those of `permutation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.offered import Offered
from moe_conformance.backends.native.row_ops.permutation import Pairs, permute, sort_pairs, unpermute, weigh
from moe_conformance.contract import Claims, Config, Permuted, Routing


@dataclass(frozen=True)
class Sorted:
    """Where the rows of one call stand."""

    pairs: Pairs
    place_P: Tensor  # the row of every pair
    weights_P: Tensor


class Permutation(Offered):
    """Sorts pairs by expert, then token, then slot. An expert without a pair gets no row."""

    surface = "permutation"
    maps = ("padding.row_multiple",)

    def __init__(self, config: Config) -> None:
        """Take the multiple."""
        self.multiple = config.padding.row_multiple

    @property
    def resolved(self) -> Mapping[str, str]:
        """How rows are ordered."""
        return {"permutation": "stable sort"}

    @property
    def claims(self) -> Claims:
        """To what rows are padded."""
        return Claims(multiple=self.multiple)

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        """Return the rows, zeros where they are padding."""
        pairs = sort_pairs(routing.ids_TK, routing.experts)
        counts_E = self._padded(pairs.counts_E)
        place_P = self._places(pairs.counts_E, counts_E)
        rows_PD = permute(x_TD, pairs)
        rows_RD = rows_PD.new_zeros(int(counts_E.sum()), x_TD.shape[1]).index_put((place_P,), rows_PD)
        weights_P = routing.weights_TK[pairs.token_P, pairs.slot_P]
        weights_R = weights_P.new_zeros(len(rows_RD)).index_put((place_P,), weights_P)
        return Permuted(rows_RD, counts_E, weights_R, Sorted(pairs, place_P, weights_P))

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Return every token's weighted sum."""
        return unpermute(weigh(rows_RD[handle.place_P], handle.weights_P), handle.pairs)

    def _padded(self, counts_E: Tensor) -> Tensor:
        """Return the rows of every segment.

        Implements: EXCH-18.
        """
        return (counts_E + self.multiple - 1) // self.multiple * self.multiple

    def _places(self, pairs_E: Tensor, counts_E: Tensor) -> Tensor:
        """Return the row of every pair: they lie as sorted, each segment shifted by the padding of those before it."""
        shift_E = (counts_E - pairs_E).cumsum(0) - (counts_E - pairs_E)
        return torch.arange(int(pairs_E.sum()), device=pairs_E.device) + shift_E.repeat_interleave(pairs_E)
