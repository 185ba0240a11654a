"""Packed sequences: where they stand in one tensor, which rows are tokens, and which rows a cp rank holds.

L_i tokens of sequence i in P_i rows, S sequences, R rows of the pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.offered import Offered
from moe_conformance.contract import PackedSequences


class Packing(Offered):
    """Pads every sequence to what context and sequence parallelism divide it by. Sums are int32, as kernels ask."""

    surface = "packing"

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built."""
        return {"packing": type(self).__name__}

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        """Return the sums of lengths and of padded lengths, (S + 1,) each.

        Implements: PACK-07, PACK-10.
        """
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        m = self._multiple(cp, tp, sequence_parallel)
        padded_S = (lengths_S + m - 1) // m * m
        return PackedSequences(self._sums(lengths_S), self._sums(padded_S))

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Return which rows are tokens and no gaps, bool (R,).

        Implements: PACK-08.
        """
        sequence_R = self._sequence_of_rows(cu_seqlens_padded)
        place_R = torch.arange(len(sequence_R), device=sequence_R.device) - cu_seqlens_padded[sequence_R]
        return place_R < cu_seqlens.diff()[sequence_R]

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        """Return the rows of a cp rank: of each sequence the chunk of its number and that chunk's mirror image.

        Implements: PACK-15.
        """
        sequence_R = self._sequence_of_rows(cu_seqlens_padded)
        if cp == 1:
            return torch.arange(len(sequence_R), device=sequence_R.device)
        place_R = torch.arange(len(sequence_R), device=sequence_R.device) - cu_seqlens_padded[sequence_R]
        chunk_R = place_R // (cu_seqlens_padded.diff()[sequence_R] // (2 * cp))
        return (self._owner(chunk_R, cp) == cp_rank).nonzero().flatten()

    def _multiple(self, cp: int, tp: int, sequence_parallel: bool) -> int:
        return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)

    def _sums(self, lengths_S: Tensor) -> Tensor:
        return F.pad(lengths_S.cumsum(0), (1, 0)).to(torch.int32)

    def _owner(self, chunk_R: Tensor, cp: int) -> Tensor:
        """Return the cp rank of every row by its chunk, of 2 cp."""
        return torch.minimum(chunk_R, 2 * cp - 1 - chunk_R)

    def _sequence_of_rows(self, cu_seqlens_padded: Tensor) -> Tensor:
        """Return the sequence that every row belongs to, (R,)."""
        number_S = torch.arange(len(cu_seqlens_padded) - 1, device=cu_seqlens_padded.device)
        return number_S.repeat_interleave(cu_seqlens_padded.diff())
