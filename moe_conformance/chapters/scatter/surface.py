"""Surfaces that add rows to an output by an index. Import them from `contract`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Resolved

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


class ScatterAdd(Resolved, Protocol):
    """Adds source rows to the output rows that an index names: index_J, int64, 0 <= i < N, repeats are allowed.

    y_i = out_i + the sum of src_j over all j with index_j = i, in the dtype of out. The same inputs give the same bits
    in every call and every process.
    """

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return y (N, D) in new memory; no argument is written."""

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Write y into out and return out; no other argument is written."""


class CombineAdd(Resolved, Protocol):
    """Adds routed rows to the output of a shared expert: in place where that is allowed, else in new memory.

    out_ND is what a shared expert made of x_ND: it may be x itself, a view of it, or lie in its memory in any other
    way. No byte of x changes, nor of index and src; out may be written if none of x lies in it and no gradient is
    recorded.
    """

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Return y (N, D), y_i = out_i + the sum of src_j over all j with index_j = i, as `ScatterAdd` does."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def scatter_add(self, config: Config) -> ScatterAdd:
        """Build the sum of rows into an output by an index."""
        raise Unsupported("this backend offers no scatter-add")

    def combine_add(self, config: Config) -> CombineAdd:
        """Build the sum of routed rows and the output of a shared expert."""
        raise Unsupported("this backend offers no sum of routed rows and a shared expert's output")
