"""Optional surfaces that pad and pack sequences, and a router that is told of padding; `surfaces` exports all of it.

The rules and the letters of `contract` hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_conformance.contract.exchange import Parametrised, Resolved, Routed


class TokenPadding(Resolved, Protocol):
    """The padded number of tokens of each rank of an exchange (`Config.padding.tokens`), as the exchange computes it.

    It claims `alignment` and `padding`, and so does an exchange that pads.
    """

    def count(self, tokens: int) -> int:
        """Return P, the rows that this rank dispatches for its T tokens; collective over ep_etp, or not at all."""


@dataclass(frozen=True)
class PackedSequences:
    """Cumulative lengths of packed sequences, without and with the padding behind each (as in `PackedSeqParams`)."""

    cu_seqlens: Tensor  # integers (S + 1,), from 0
    cu_seqlens_padded: Tensor


class Packing(Resolved, Protocol):
    """Packed sequences (THD), each padded to the multiple that context and sequence parallelism need.

    R is the last value of cu_seqlens_padded. It claims `context_order` "other" if the order of chunks over cp is not
    the load-balanced one (chunk c and chunk 2 cp - 1 - c).
    """

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        """Return the cumulative lengths of sequences of these lengths."""

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Return which rows are tokens, bool (R,); the others are padding."""

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        """Return the indices of the rows that a cp rank holds, integers, in the order in which it holds them."""


class MaskedRouter(Parametrised, Resolved, Protocol):
    """A router with a padding mask. x: (*lead, D), prod(lead) == T."""

    def __call__(self, x: Tensor, padding_mask_T: Tensor) -> Routed:
        """Return the routing of x; the mask, bool (T,), is True at padding. `counts_E` is the load without padding."""
