"""Packed sequences (THD) and padding masks: surfaces, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved, Routed

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class PackedSequences:
    """Cumulative lengths of packed sequences, without and with the padding behind each (as in `PackedSeqParams`)."""

    cu_seqlens: Tensor  # integers (S + 1,), from 0
    cu_seqlens_padded: Tensor


class Packing(Resolved, Protocol):
    """Lays out packed sequences (THD), each padded to the multiple that context and sequence parallelism need.

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


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def packing(self, config: Config) -> Packing:
        """Build the layout of packed sequences."""
        raise Unsupported("this backend offers no packing of sequences")

    def masked_router(self, config: Config) -> MaskedRouter:
        """Build a router with a padding mask; collective."""
        raise Unsupported("this backend offers no router that is told of padding")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # Chunks of packed sequences over cp (PACK-15). mirrored: rank c holds chunks c and 2 cp - 1 - c; other: any order.
    context_order: Literal["mirrored", "other"] = "mirrored"
