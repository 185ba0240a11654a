"""Optional surfaces of a session, beside those of `contract`.

The rules and the letters of `contract` hold; a surface that is not overridden is reported as "not adapted".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_conformance.contract import exchange
from moe_conformance.contract.exchange import Config, Parametrised, Placed, Resolved, Routing, Unsupported
from moe_conformance.contract.surfaces_of_configuration import ConfigRules as ConfigRules
from moe_conformance.contract.surfaces_of_configuration import Settings as Settings
from moe_conformance.contract.surfaces_of_configuration import VersionLimit as VersionLimit
from moe_conformance.contract.surfaces_of_padding import MaskedRouter as MaskedRouter
from moe_conformance.contract.surfaces_of_padding import PackedSequences as PackedSequences
from moe_conformance.contract.surfaces_of_padding import Packing as Packing
from moe_conformance.contract.surfaces_of_padding import TokenPadding as TokenPadding
from moe_conformance.contract.surfaces_of_training import BalancingRouters as BalancingRouters
from moe_conformance.contract.surfaces_of_training import LoadMeter as LoadMeter
from moe_conformance.contract.surfaces_of_training import Metered as Metered
from moe_conformance.contract.surfaces_of_training import MeteredPass as MeteredPass
from moe_conformance.contract.surfaces_of_training import MeteredResults as MeteredResults
from moe_conformance.contract.surfaces_of_training import OverlappedLayer as OverlappedLayer
from moe_conformance.contract.surfaces_of_training import OverlappedStep as OverlappedStep
from moe_conformance.contract.surfaces_of_training import ReplayRouters as ReplayRouters
from moe_conformance.contract.surfaces_of_training import Trained as Trained
from moe_conformance.contract.surfaces_of_training import TrainingRouters as TrainingRouters


class Layer(Parametrised, Resolved, Protocol):
    """A whole MoE layer: router, dispatch, experts, combine and shared experts.

    y_t = sum_k w_tk f_{e_tk}(x_t) + a_t sum_j h_j(x_t): every shared expert is a SwiGLU of its own intermediate size
    (`Config.shared.ffn`), with an output bias if `Config.shared.bias`; a_t = sigmoid(<v, x_t>) with
    `Config.shared.gate`, else 1.

    `named` yields views of the parameters of router, experts and shared experts: "shared_gate" and "shared_up" (F, D),
    "shared_down" (D, F) and "shared_bias" (D,) with the number j of the shared expert in place of an expert id, and
    "shared_score" (1, D), which is v, with None. `Named.shard` states how tp shards a parameter, also in a fused one.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return y in the shape (*lead, D) of x, differentiable in x and in all parameters."""


@dataclass(frozen=True)
class Permuted:
    """Permuted rows: each expert's segment has its routed rows, then zero rows as padding; the rest is unspecified."""

    rows_RD: Tensor
    counts_E: Tensor | None  # int64: rows per segment, padding included; None if the backend neither pads nor counts
    weights_R: Tensor | None  # routing weights of the rows, if the backend returns them; those of padding may be any
    handle: Any  # what unpermute needs


class Permutation(Resolved, Protocol):
    """Permute the tokens of one rank by expert and unpermute them, without an exchange.

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
    """Reorder received rows; counts_WN, int64, is the number of rows from each source rank for each local expert."""

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return source-major rows sorted by expert, and by source within an expert."""

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return expert-major rows sorted by source: the inverse."""


class RowIndex(Resolved, Protocol):
    """Gather and scatter by index_R, int64: 0 <= i < T is a token, -1 or T a sentinel."""

    def gather(self, x_TD: Tensor, index_R: Tensor) -> Tensor:
        """Return rows (R, D): x_i, or zeros at a sentinel."""

    def scatter(self, rows_RD: Tensor, index_R: Tensor, weights_R: Tensor, tokens: int) -> Tensor:
        """Return y (T, D), y_i = sum of weight times row over the rows with index i; a sentinel adds nothing."""


class ScatterAdd(Resolved, Protocol):
    """Source rows added to the output rows that an index names: index_J, int64, 0 <= i < N, repeats are allowed.

    y_i = out_i + the sum of src_j over all j with index_j = i, in the dtype of out. The same inputs give the same bits
    in every call and every process.
    """

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return y (N, D) in memory of its own; no argument is written."""

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Write y into out, no other argument, and return out."""


class CombineAdd(Resolved, Protocol):
    """Routed rows added to the output of a shared expert, in its memory where nobody can tell and else in new memory.

    out_ND is what a shared expert made of x_ND: it may be x itself, a view of it, or lie in its memory in any other
    way. No byte of x changes, nor of index and src; out may be written if none of x lies in it and no gradient is
    recorded.
    """

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Return y (N, D), y_i = out_i + the sum of src_j over all j with index_j = i, as `ScatterAdd` does."""


class EqualSplits(Resolved, Protocol):
    """Pieces of rows, one for each rank of ep, padded to one number of rows for an all-to-all, and cut back after."""

    def size(self, pieces: Sequence[int]) -> int:
        """Return the rows to which every rank of ep pads its pieces of n_i rows; collective over ep."""

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return every piece with zeros behind it, (len(pieces) * size, D), differentiable in the rows."""

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the first n_i rows of every `size`, one piece behind the other, differentiable in the rows."""


@dataclass(frozen=True)
class Counted:
    """What counters of shortcuts have counted since they were reset, by the backend's names of shortcuts and caches."""

    decisions: Mapping[str, tuple[int, int]]  # calls that took the shortcut, and calls that could have and did not
    look_ups: Mapping[str, tuple[int, int]]  # hits and misses of a cache


class Counters(Protocol):
    """Counters of the shortcuts of built experts, which are off at first; see `contract.Experts`.

    A call of the experts is one decision of each shortcut that is open to it, and looks up once in each cache that it
    uses. The shortcut for as many rows of each expert is named "equal_counts". Optional: `restrict(ranks)`, of the
    world, has all others count nothing.
    """

    def enable(self, on: bool) -> None:
        """Count from now on, or no more."""

    def reset(self) -> None:
        """Begin at 0 again; caches stay as they are."""

    def read(self) -> Counted:
        """Return what this rank has counted."""


@dataclass(frozen=True)
class Dense:
    """A dense routing map: `weights_TE` has the routing weight where `map_TE` is True, and 0 elsewhere."""

    weights_TE: Tensor
    map_TE: Tensor  # bool


class RoutingForms(Resolved, Protocol):
    """Conversion between top-k ids (T, K) and a dense map (T, E), both ways differentiable in the weights."""

    def to_dense(self, routing: Routing) -> Dense:
        """Return the dense map; an empty slot sets no entry."""

    def to_indices(self, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        """Return ids and weights, with any number of slots, -1 in empty ones."""


# ---- fused token exchanges -----------------------------------------------------------------------------------


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
    """Fused dispatch and combine: a token is sent once to each rank that needs it, combine sums; no experts.

    The group is ep_etp. All of its ranks call each method in the same order, also without tokens. Both methods are
    linear, and the backward of each is the other with the same handle.

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
    """Destinations of the tokens of a rank: which ranks, and the counts per rank, node and expert."""

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


class Session(exchange.Session):
    """A session with optional surfaces: override the methods of those that the backend has."""

    def token_padding(self, config: Config) -> TokenPadding:
        """Build what returns the padded number of tokens of the exchange of `config`; collective."""
        raise Unsupported("this backend offers no padding of token counts")

    def packing(self, config: Config) -> Packing:
        """Build the layout of packed sequences."""
        raise Unsupported("this backend offers no packing of sequences")

    def masked_router(self, config: Config) -> MaskedRouter:
        """Build a router with a padding mask; collective."""
        raise Unsupported("this backend offers no router that is told of padding")

    def initial_router(self, config: Config) -> Parametrised:
        """Build a router with the parameters of a new model, as a trainer does; collective.

        Generators of the process have been seeded alike on all ranks, as trainers do; seeding is left to the adapter
        where the backend needs more. No call follows: the parameters are read.
        """
        raise Unsupported("this backend offers no router with the parameters of a new model")

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the routers of a model with their losses; collective. It reads routing, capacity and losses."""
        raise Unsupported("this backend offers no router with losses")

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the routers of a model with a balance bias; collective. It reads routing, capacity and balance."""
        raise Unsupported("this backend offers no router whose balance bias is updated")

    def replay_routers(self, config: Config) -> ReplayRouters:
        """Build the routers of a model with router replay; collective. It reads routing and replay."""
        raise Unsupported("this backend offers no router that replays recorded experts")

    def layer(self, config: Config) -> Layer:
        """Build a whole layer: router, exchange, experts and shared experts; collective."""
        raise Unsupported("this backend offers no layer")

    def overlapped_step(self, config: Config) -> OverlappedStep:
        """Build the layers of a model, and the schedule of a step that overlaps their exchanges; collective."""
        raise Unsupported("this backend offers no step that overlaps exchange and computation")

    def permutation(self, config: Config) -> Permutation:
        """Build permute and unpermute of one rank."""
        raise Unsupported("this backend offers no permutation")

    def reordering(self, config: Config) -> Reordering:
        """Build the reordering of received rows from source-major to expert-major, and back."""
        raise Unsupported("this backend offers no reordering of received rows")

    def row_index(self, config: Config) -> RowIndex:
        """Build gather and scatter by an index with sentinels."""
        raise Unsupported("this backend offers no index of rows")

    def combine_add(self, config: Config) -> CombineAdd:
        """Build what adds routed rows to the output of a shared expert."""
        raise Unsupported("this backend offers no sum of routed rows and a shared expert's output")

    def scatter_add(self, config: Config) -> ScatterAdd:
        """Build what adds rows back into an output by an index."""
        raise Unsupported("this backend offers no scatter-add")

    def equal_splits(self, config: Config) -> EqualSplits:
        """Build what pads pieces to equal splits; collective."""
        raise Unsupported("this backend offers no equal splits")

    def load_meter(self, config: Config) -> LoadMeter:
        """Build the exchange with a meter of overload attached; collective."""
        raise Unsupported("this backend offers no meter of overload")

    def routing_forms(self, config: Config) -> RoutingForms:
        """Build the conversion of top-k ids into a dense map, and back."""
        raise Unsupported("this backend offers no conversion of routings")

    def token_exchange(self, config: Config) -> TokenExchange:
        """Build a fused token exchange, without experts; collective."""
        raise Unsupported("this backend offers no token exchange")

    def dispatch_layout(self, config: Config) -> DispatchLayout:
        """Build the counts of destinations."""
        raise Unsupported("this backend offers no dispatch layout")

    def transport(self, config: Config) -> Transport:
        """Build the choice of a group's transport."""
        raise Unsupported("this backend does not tell how it chooses a transport")

    def places_exchange(self, config: Config) -> PlacesExchange:
        """Build a low-latency token exchange, without experts; collective."""
        raise Unsupported("this backend offers no exchange with fixed places")

    def config_rules(self, config: Config) -> ConfigRules:
        """Build what resolves settings; nothing of `config` but its variant matters."""
        raise Unsupported("this backend does not tell how it resolves settings")
