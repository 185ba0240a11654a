"""Surfaces that a session may offer beside those of `contract`: all of them optional.

They are under the rules of `contract`, with its letters; a surface that is not offered is reported as "not offered".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_conformance import contract
from moe_conformance.contract import Config, Parametrised, Placed, Resolved, Routed, Routing, Unsupported


class Layer(Parametrised, Resolved, Protocol):
    """A whole layer: router, dispatch, experts, combine, and the shared experts beside them.

    y_t = sum_k w_tk f_{e_tk}(x_t) + a_t sum_j h_j(x_t): every shared expert is a SwiGLU of its own width
    (`Config.shared_ffn`), plus its own output bias with `Config.shared_bias`; a_t = sigmoid(<v, x_t>) with
    `Config.shared_gate` and 1 without.

    `named` yields the windows of the router and of the experts, and those of the shared experts: "shared_gate" and
    "shared_up" (F, D), "shared_down" (D, F) and "shared_bias" (D,) with the number j of the shared expert in place of
    an expert's id, and "shared_score" (1, D), which is v. What tp splits is told by `Named.shard`, be it inside a fused
    parameter or not.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return y in the shape (*lead, D) of x, differentiable in x and in all parameters."""


@dataclass(frozen=True)
class Permuted:
    """Rows sorted by expert: in each segment its pairs, then its padding, zeros; what comes after is unspecified."""

    rows_RD: Tensor
    counts_E: Tensor | None  # int64: rows of every segment, padding included; None where nothing is padded or counted
    weights_R: Tensor | None  # of the rows, where the backend hands them on; those of padding are free
    handle: Any  # what unpermute needs


class Permutation(Resolved, Protocol):
    """One rank's tokens to rows sorted by expert, and back, without an exchange.

    Every segment is padded to `Config.row_multiple`. An empty slot is no pair.
    """

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        """Return one row per pair, differentiable in x."""

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Return y (T, D), y_t = sum over the pairs (t, k) of w_tk times their row; differentiable in rows and weights.

        The rows stand as `permute` left them, padding included, in which and behind which anything finite may stand.
        """


class Reordering(Resolved, Protocol):
    """Two orders of the same W * N segments: counts_WN, int64, has the rows from each source for each local expert."""

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows expert by expert, in each source by source; they come source by source."""

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Undo it."""


class RowIndex(Resolved, Protocol):
    """Rows by index: index_R, int64, names a token by 0 <= i < T; anything else, -1 or T, is a sentinel."""

    def gather(self, x_TD: Tensor, index_R: Tensor) -> Tensor:
        """Return rows (R, D): x_i, or zeros at a sentinel."""

    def scatter(self, rows_RD: Tensor, index_R: Tensor, weights_R: Tensor, tokens: int) -> Tensor:
        """Return y (T, D), to whose row i every row of index i is added, times its weight; a sentinel adds nothing."""


@dataclass(frozen=True)
class Dense:
    """A routing as a map: where `map_TE` is set, `weights_TE` has the weight, and 0 elsewhere."""

    weights_TE: Tensor
    map_TE: Tensor  # bool


class RoutingForms(Resolved, Protocol):
    """The two forms of one routing. Both conversions are differentiable in the weights."""

    def to_dense(self, routing: Routing) -> Dense:
        """Return the dense form; an empty slot sets nothing."""

    def to_indices(self, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        """Return the indexed form, with as many slots as the backend likes, -1 for those that are empty."""


# ---- fused token exchanges -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """What one dispatch brought to this rank: a row for each token that has an expert here, however many it has.

    The order of rows is free. A row that is nobody's, of a buffer of fixed size, has no id >= 0.
    """

    rows_RD: Tensor
    ids_RK: Tensor  # int64 index into local_experts; -1 = an empty slot, or another rank's
    weights_RK: Tensor | None  # 0 where the id is -1; None where none travelled
    counts_N: Tensor | None  # slots for each of this rank's experts; None if none are claimed
    handle: Any  # what combine and a repeated dispatch need; no state stays elsewhere
    scales_RB: Tensor | None = None  # with `Config.wire` "float8": of every block; rows are multiplied by them


class TokenExchange(Placed, Protocol):
    """Kernels that send a token once to every rank that needs it, and add up what comes back; no experts.

    It spans the ranks of ep_etp. All of them call each method, in the same order and with no tokens too. The gradients
    of either method are those of the sum that it is: the backward of one is the other with the same handle.

    With `Config.wire` "float8" dispatch rounds rows, and `resolved` names "wire_format", "e4m3" or "e5m2", and
    "wire_block", the columns that share a scale. Gradients are those of rows that were not rounded.
    """

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Any = None,
    ) -> Received:
        """Send tokens where their ids say (global, -1 = empty slot), or by the layout of an earlier dispatch's handle.

        Weights are float32, or float64 beside float64 rows; without them none travel.
        """

    def combine(self, rows_RD: Tensor, handle: Any, biases: tuple[Tensor, ...] = ()) -> Tensor:
        """Return y_TD, for each token the sum of its rows on all ranks and of its row in each bias (T, D); unweighted.

        Raise on every rank if the rows are not as many as the handle's.
        """


@dataclass(frozen=True)
class Destinations:
    """Where the tokens of a rank go: to which ranks, and how many to every rank, node and expert."""

    in_rank_TW: Tensor  # bool
    per_rank_W: Tensor  # tokens, integers
    per_node_D: Tensor  # tokens
    per_expert_E: Tensor  # slots: an expert twice in a token counts twice


class DispatchLayout(Resolved, Protocol):
    """Counts where the tokens of a rank go before anything is sent."""

    def __call__(self, ids_TK: Tensor, owner_E: Tensor, node_of_W: Tensor) -> Destinations:
        """Return it for ids (-1 is an empty slot), the rank of every expert and the node 0, 1, ... of every rank."""


class Transport(Resolved, Protocol):
    """Chooses the transport of a group of ranks."""

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        """Tell whether the group stays within one fast transport domain.

        `domain_of` names the domain of every rank of the world: its host, or what spans hosts; `visible_devices` is
        how many devices each of the processes sees.
        """


class TokenPadding(Resolved, Protocol):
    """To how many tokens the ranks of an exchange are padded (`Config.pad_tokens`): the exchange's own answer.

    `resolved["alignment"]` states the multiple that all its parts use, and `resolved["padding"]` says "group_max" or
    "bound"; an exchange that pads says the same of itself.
    """

    def count(self, tokens: int) -> int:
        """Return P, the rows that this rank dispatches for its T tokens; collective over ep_etp, or not at all."""


@dataclass(frozen=True)
class Places:
    """What one dispatch brought into the places of this rank's experts: a row for each pair."""

    rows_NCD: Tensor  # the first counts_n places of expert n are filled; the others hold anything, NaN included
    counts_N: Tensor  # int64
    begin_NW: Tensor | None  # int64: where the run of each source begins, in the order of the ranks of ep_etp
    run_NW: Tensor | None  # int64: and how many rows it has; None where a source's rows may stand anywhere
    handle: Any  # what combine needs


class PlacesExchange(Placed, Protocol):
    """Kernels for few tokens and little waiting: a fixed number of places for each expert, whatever the load.

    It spans the ranks of ep_etp. All of them call each method, in the same order and with no tokens too. Both are
    differentiable. Several dispatches may be under way.
    """

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, tokens_max: int) -> Places:
        """Send every routed pair to its expert, and to all shards of it.

        No rank brings more than `tokens_max` tokens, the same number on all; if one does, raise on every rank.
        """

    def combine(self, rows_NCD: Tensor, weights_TK: Tensor, handle: Any) -> Tensor:
        """Return y_TD, the weighted sum over each token's pairs of their rows on all shards, 0 without any."""


@dataclass(frozen=True)
class PackedSequences:
    """Where sequences stand in a packed tensor: sums of their lengths, and of their rows with the gaps behind them."""

    cu_seqlens: Tensor  # integers (S + 1,), from 0
    cu_seqlens_padded: Tensor


class Packing(Resolved, Protocol):
    """Sequences one after the other in one tensor (THD), each padded to what its parallelism divides it by.

    R is the last of cu_seqlens_padded. `resolved["context_order"]` names the order of shares where it is another than
    front chunks and their mirror images.
    """

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        """Return where sequences of these lengths stand."""

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Return which rows are tokens, bool (R,); the others are gaps."""

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        """Return the rows of the pack that a cp rank holds, integers, in its own order."""


class MaskedRouter(Parametrised, Resolved, Protocol):
    """A router that is told which of its tokens are padding. x: (*lead, D), prod(lead) == T."""

    def __call__(self, x: Tensor, padding_mask_T: Tensor) -> Routed:
        """Return the routing of x; the mask, bool (T,), is True at padding. `counts_E` is the load without padding."""


class Session(contract.Session):
    """A session that offers some of the surfaces above: override the methods of those."""

    def token_padding(self, config: Config) -> TokenPadding:
        """Build what tells the exchange of `config` to how many tokens it pads; collective."""
        raise Unsupported("this backend offers no padding of token counts")

    def packing(self, config: Config) -> Packing:
        """Build what lays sequences out in one tensor."""
        raise Unsupported("this backend offers no packing of sequences")

    def masked_router(self, config: Config) -> MaskedRouter:
        """Build a router that is told of padding; collective."""
        raise Unsupported("this backend offers no router that is told of padding")

    def layer(self, config: Config) -> Layer:
        """Build a whole layer: router, exchange, experts and shared experts; collective."""
        raise Unsupported("this backend offers no layer")

    def permutation(self, config: Config) -> Permutation:
        """Build what sorts one rank's tokens by expert, and back."""
        raise Unsupported("this backend offers no permutation")

    def reordering(self, config: Config) -> Reordering:
        """Build what puts received rows from source-major into expert-major order, and back."""
        raise Unsupported("this backend offers no reordering of received rows")

    def row_index(self, config: Config) -> RowIndex:
        """Build what fetches and puts back rows by an index with sentinels."""
        raise Unsupported("this backend offers no index of rows")

    def routing_forms(self, config: Config) -> RoutingForms:
        """Build what turns a routing into a dense map, and back."""
        raise Unsupported("this backend offers no conversion of routings")

    def token_exchange(self, config: Config) -> TokenExchange:
        """Build a fused token exchange, without experts; collective."""
        raise Unsupported("this backend offers no token exchange")

    def dispatch_layout(self, config: Config) -> DispatchLayout:
        """Build what counts where tokens go."""
        raise Unsupported("this backend offers no dispatch layout")

    def transport(self, config: Config) -> Transport:
        """Build what chooses the transport of a group."""
        raise Unsupported("this backend does not tell how it chooses a transport")

    def places_exchange(self, config: Config) -> PlacesExchange:
        """Build a token exchange with a fixed number of places for each expert, without experts; collective."""
        raise Unsupported("this backend offers no exchange with fixed places")
