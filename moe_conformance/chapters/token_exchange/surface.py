"""Fused and low-latency token exchanges: surfaces, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Placed, Resolved

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Received:
    """The rows that one dispatch delivered to this rank: one for each token with at least one expert here.

    The order of rows is free. An unused row of a receive buffer of fixed size has no id >= 0.
    """

    rows_RD: Tensor
    ids_RK: Tensor  # int64 index into local_experts; -1 = an empty slot, or an expert on another rank
    weights_RK: Tensor | None  # 0 where the id is -1; None if no weights were sent
    counts_N: Tensor | None  # routed pairs of each local expert; None if the backend does not report them
    handle: Any  # what combine and a repeated dispatch need; the only state
    scales_RB: Tensor | None = None  # with `Config.wire` "float8": one per block; rows times scales are the values


class TokenExchange(Placed, Protocol):
    """Fused dispatch and combine without experts: a token is sent once to each rank that needs it, and combine sums.

    The group is ep_etp. All of its ranks call each method in the same order, also without tokens. Both methods are
    linear, and the backward of each is the other with the same handle.

    A library whose combine adds no biases has no parameter for them: what needs it is then not adapted.

    With `Config.wire` "float8" dispatch quantises rows; it claims `wire_format` and `wire_block`, the number of columns
    that share a scale. Gradients are those without quantisation; if combine's backward quantises what it sends, as it
    may, it claims `gradient_format`.
    """

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Any = None,
    ) -> Received:
        """Send tokens by their global expert ids (-1 = empty slot), or by the handle of an earlier dispatch.

        Weights are float32, or float64 with float64 rows; None: no weights are sent.
        """

    def combine(self, rows_RD: Tensor, handle: Any, biases: tuple[Tensor, ...] = ()) -> Tensor:
        """Return y_TD, for each token the unweighted sum of its rows on all ranks and of its row in each bias (T, D).

        Raise on every rank if the number of rows differs from that of the handle.
        """


@dataclass(frozen=True)
class Destinations:
    """The destinations of the tokens of a rank: which ranks, and the counts per rank, node and expert."""

    in_rank_TW: Tensor  # bool
    per_rank_W: Tensor  # tokens, integers
    per_node_D: Tensor  # tokens
    per_expert_E: Tensor  # slots: an expert twice in a token counts twice


class DispatchLayout(Resolved, Protocol):
    """Counts the destinations of the tokens of a rank before anything is sent, as DeepEP's `get_dispatch_layout`."""

    def __call__(self, ids_TK: Tensor, owner_E: Tensor, node_of_W: Tensor) -> Destinations:
        """Return the counts for ids (-1 is an empty slot), the rank of every expert and the node of every rank."""


class Transport(Resolved, Protocol):
    """Chooses the transport of a process group."""

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        """Return whether the group lies within one fast interconnect domain.

        `domain_of` is the domain of every rank of the world: its host, or a domain that spans hosts;
        `visible_devices` is the number of devices that each process sees.
        """


@dataclass(frozen=True)
class Places:
    """The rows that one dispatch put into a low-latency receive buffer: C places for each of this rank's experts."""

    rows_NCD: Tensor  # the first counts_n places of expert n are filled; the others hold any value, NaN included
    counts_N: Tensor  # int64
    begin_NW: Tensor | None  # int64: first place of each source rank, in the order of the ranks of ep_etp
    run_NW: Tensor | None  # int64: number of places of each source rank; None if its rows are not contiguous
    handle: Any  # what combine needs


class PlacesExchange(Placed, Protocol):
    """Low-latency dispatch and combine: a fixed number of places for each expert, independent of the load.

    The group is ep_etp. All of its ranks call each method in the same order, also without tokens. Both methods are
    differentiable. Several dispatches may be in flight.
    """

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, tokens_max: int) -> Places:
        """Send every routed pair to its expert, and to all shards of it.

        `tokens_max` is the same on all ranks; if any rank has more tokens, raise on every rank.
        """

    def combine(self, rows_NCD: Tensor, weights_TK: Tensor, handle: Any) -> Tensor:
        """Return y_TD, for each token the weighted sum over its slots of their rows on all shards; 0 without slots."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def token_exchange(self, config: Config) -> TokenExchange:
        """Build a fused token exchange, without experts; collective."""
        raise Unsupported("this backend offers no token exchange")

    def dispatch_layout(self, config: Config) -> DispatchLayout:
        """Build the function that counts destinations."""
        raise Unsupported("this backend offers no dispatch layout")

    def transport(self, config: Config) -> Transport:
        """Build the function that chooses the transport of a group."""
        raise Unsupported("this backend does not tell how it chooses a transport")

    def places_exchange(self, config: Config) -> PlacesExchange:
        """Build a low-latency token exchange, without experts; collective."""
        raise Unsupported("this backend offers no exchange with fixed places")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # With `Config.wire` "float8" (EXCH-30): the format in which the backward of combine sends gradients. None: they are
    # not rounded.
    gradient_format: Literal["e4m3", "e5m2"] | None = None
    # With `Config.wire` "float8" (EXCH-30, COST-09): the format of the numbers, and how many columns share a scale.
    wire_format: Literal["e4m3", "e5m2"] = "e4m3"
    wire_block: int | None = None  # None: all columns
