"""Surfaces for permute and unpermute on one rank, and for the conversions around them. Import them from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Resolved, Routing

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Permuted:
    """The result of a permute: each expert's segment has its routed rows, then zero rows as padding.

    The rows after the last segment are unspecified.
    """

    rows_RD: Tensor
    counts_E: Tensor | None  # int64: rows per segment, padding included; None if the backend neither pads nor counts
    weights_R: Tensor | None  # routing weights of the rows, if the backend returns them; those of padding may be any
    handle: Any  # what unpermute needs


class Permutation(Resolved, Protocol):
    """Permutes the tokens of one rank by expert and unpermutes them, without an exchange.

    Every segment is padded to `Config.padding.row_multiple`. An empty slot has no row.
    """

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        """Return one row per routed pair, differentiable in x."""

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Return y (T, D), y_t = sum over k of w_tk times the row of (t, k); differentiable in rows and weights.

        Rows are in the order that `permute` returned. Padding rows and the rows after the last segment have any
        finite values.
        """


class Reordering(Resolved, Protocol):
    """Reorders received rows; counts_WN, int64, is the number of rows from each source rank for each local expert."""

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return source-major rows sorted by expert, and by source within an expert."""

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return expert-major rows sorted by source: the inverse."""


class RowIndex(Resolved, Protocol):
    """Gathers and scatters rows by index_R, int64: 0 <= i < T is a token, -1 or T a sentinel."""

    def gather(self, x_TD: Tensor, index_R: Tensor) -> Tensor:
        """Return rows (R, D): x_i, or zeros at a sentinel."""

    def scatter(self, rows_RD: Tensor, index_R: Tensor, weights_R: Tensor, tokens: int) -> Tensor:
        """Return y (T, D), y_i = sum of weight times row over the rows with index i; a sentinel adds nothing."""


@dataclass(frozen=True)
class Dense:
    """A dense routing map: `weights_TE` has the routing weight where `map_TE` is True, and 0 elsewhere."""

    weights_TE: Tensor
    map_TE: Tensor  # bool


class RoutingForms(Resolved, Protocol):
    """Converts top-k ids (T, K) into a dense map (T, E) and back, both differentiable in the weights."""

    def to_dense(self, routing: Routing) -> Dense:
        """Return the dense map; an empty slot sets no entry."""

    def to_indices(self, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        """Return ids and weights, with any number of slots, -1 in empty ones."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def permutation(self, config: Config) -> Permutation:
        """Build permute and unpermute of one rank."""
        raise Unsupported("this backend offers no permutation")

    def reordering(self, config: Config) -> Reordering:
        """Build the reordering of received rows from source-major to expert-major, and back."""
        raise Unsupported("this backend offers no reordering of received rows")

    def row_index(self, config: Config) -> RowIndex:
        """Build gather and scatter by an index with sentinels."""
        raise Unsupported("this backend offers no index of rows")

    def routing_forms(self, config: Config) -> RoutingForms:
        """Build the conversion of top-k ids into a dense map, and back."""
        raise Unsupported("this backend offers no conversion of routings")
