"""What a backend implements: the one file an adopter reads. It imports torch and nothing of the suite.

Shapes by letter: T tokens on this rank, K slots per token, E experts, N experts held by this rank (replicas count), D
hidden, F expert hidden, R rows received, J slots per row, C capacity. One process is one rank, and everything below is
that rank's part. Tensors that come back are ready on the current stream: wait for events and asynchronous results.

A backend is opened once per topology (`Backend.open`) and gives a `Session`; a session builds *surfaces* (an exchange,
experts, a router; further ones are in `surfaces`) from a `Config`. Adapters only adapt: they never cast, reshape,
recount or repair what the library returned, never decide a verdict, and catch exceptions through `refusals` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

# ---- refusals ------------------------------------------------------------------------------------------------


class Unsupported(Exception):
    """What was asked for cannot be had from this backend.

    `by="library"`: the code under test itself refused (its exception is `__cause__`): a *proved* refusal.
    `by="adapter"`: this adapter has no way to ask for it; reported as "not adapted", never as a property of the
    library. Raise it while building only: an exception from a running step is judged as a failure.
    """

    def __init__(self, reason: str, by: Literal["library", "adapter"] = "adapter") -> None:
        super().__init__(reason)  # one sentence that names the value asked for
        self.by = by


class Overflow(RuntimeError):
    """A rank wants more rows than its buffer holds: raised by a dispatch, on all ranks of the exchange group.

    The next dispatch is as if this one had not been.
    """


class Malformed(Exception):
    """The backend's own claims contradict each other (counts beyond the rows, say): judged as a failure."""


@contextmanager
def refusals(*types: type[Exception], match: str) -> Iterator[None]:
    """Turn the library's *expected* refusal into `Unsupported(by="library")`. Wrap constructors, never steps.

    `match` is a regular expression that the message must contain; any other exception passes through and is judged.
    """
    try:
        yield
    except types as error:
        if not re.search(match, str(error)):
            raise
        raise Unsupported(str(error), by="library") from error


# ---- what is asked for ---------------------------------------------------------------------------------------


Strategy = Literal["random", "biased", "round_robin", "worst_rank", "one_expert", "one_node", "alternating", "ratio"]


@dataclass(frozen=True)
class Config:
    """One neutral configuration, the same for every backend.

    An adapter that ignored a field would test something else than the report says: each starts with `config.only(...)`.
    """

    variant: str = "default"  # one of `Backend.variants`: "alltoall", "allgather", "local", ...
    experts: int = 8  # E
    top_k: int = 2  # K
    hidden: int = 32  # D
    ffn: int = 16  # F
    dtype: torch.dtype = torch.float32
    weights_applied: Literal["native", "input", "output"] = "native"  # native: wherever the backend applies them
    score: Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"] = "softmax"  # *_topk: over the chosen K only
    normalise: bool = False  # the K weights of a token are divided by their sum
    scale: float = 1.0  # multiplies the weights last
    groups: tuple[int, int] | None = None  # (number of expert groups, groups chosen)
    group_score: Literal["top2_sum", "topk_sum", "max"] = "top2_sum"  # topk_sum: of the best K / groups chosen
    balance_bias: bool = False  # a bias per expert that selects and does not weigh
    # Who decides in place of the router's scores: strategies, each with its parameter. Two are refused. Random and
    # biased (the bias's deviation; below zero one bias is kept) force logits, all others ids.
    forced: tuple[tuple[Strategy, float | None], ...] = ()
    shared_ffn: tuple[int, ...] = ()  # widths F of the shared experts of a layer; fused into one where they are several
    shared_gate: bool = False  # one sigmoid per token multiplies what the shared experts add
    shared_bias: bool = False  # every shared expert adds an output bias of its own, inside the gate
    shared_overlap: bool = False  # they run while the routed exchange is under way
    capacity_factor: float | None = None  # an expert takes C = ceil(factor K T / E) slots of a rank; None: all of them
    min_capacity: int = 0  # C is never less
    drop_policy: Literal["weights", "position"] = "weights"  # who stays: the heaviest, or the first tokens
    pad_to_capacity: bool = False  # each rank sends each expert C rows; without a factor the largest load of the group
    row_multiple: int = 1  # a permutation pads every expert's rows to a multiple of it
    # All ranks of an exchange dispatch as many tokens, rows without a slot among them: the largest T of the group, or a
    # bound that no T may exceed; "no": only where the exchange itself cannot do without.
    pad_tokens: Literal["no", "group_max", "bound"] = "no"
    token_alignment: int = 1  # that many tokens are a multiple of it
    token_bound: int | None = None
    packed: bool = False  # sequences lie one after the other, so that every T differs; who needs equal T refuses it
    budget_factor: float | None = None  # experts' rows lie in a buffer of fixed size: so often a rank's balanced load
    row_budget: int | None = None  # or, not both, of that many rows
    over_budget: Literal["refuse", "drop"] = "refuse"  # what the buffer cannot hold: an `Overflow`, or left out of it
    token_copies: bool = False  # all ranks of a tp group hold the same tokens, and count once: no sequence parallelism
    wire: Literal["plain", "float8"] = "plain"  # float8: tokens travel to the experts in eight bits, with scales
    extra: tuple[tuple[str, Any], ...] = ()  # knobs of one backend, passed on under their own names

    def only(self, *mapped: str) -> Config:
        """Return the config itself, or raise `Unsupported` if a field outside `mapped` differs from its default."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if odd := [f"{name}={getattr(self, name)!r}" for name in changed if name not in mapped]:
            raise Unsupported(f"this adapter does not map {', '.join(odd)}")
        return self


@dataclass(frozen=True)
class Limit:
    """A declared limit of a backend: outside `allowed` it is not run, and the report says why.

    `spread_experts` says whether ep > 1 and `sharded_experts` whether etp > 1; `in_flight` counts microbatches between
    forward and backward, `halves_in_flight` those between dispatch and combine; `steps` counts how often the gradients
    of what was built once are finished. Between two steps the suite sets them to None, or to zero in place.
    `deterministic` runs are under `torch.use_deterministic_algorithms`, from before the session is opened.
    `wrong_use` is what one rank gives that no exchange can be made of, and the others may wait for it for ever. What
    breaks a promise of the config, more tokens than `token_bound` or `token_copies` that differ, is none of it.
    `uneven_tokens` is no excuse where `Config.packed` asks for them: what cannot take them is not to be built then.

    `proof="refused"`: break it and the library refuses cleanly; the suite breaks it and wants to see that.
    `proof="undefined"`: breaking it may hang or corrupt the device; it is believed, left out, and shown as unproved.
    """

    on: Literal[
        "dtype", "device", "spread_experts", "sharded_experts", "uneven_tokens", "zero_tokens", "token_dims",
        "uneven_tp_tokens", "duplicate_experts", "dropped_slots", "in_flight", "halves_in_flight",
        "steps", "deterministic", "wrong_use",
    ]  # fmt: skip
    allowed: tuple[Any, ...]  # values of the case that may run, e.g. (torch.float32,) or (False,)
    reason: str  # quoted or derived from the library's own documentation or code
    proof: Literal["refused", "undefined"] = "refused"


# ---- what is routed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Who goes where. Slot order carries no meaning; T rows are x's leading dims flattened in row-major order."""

    ids_TK: Tensor  # int64 global expert ids, -1 = empty slot (dropped, padding), anywhere in a row
    weights_TK: Tensor  # float; a leaf that requires grad when the suite wants its gradient
    experts: int  # E

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return (weights_TE, map_TE bool), differentiable in the weights.

        Refuses an expert that occurs twice in a row: a map has no place for it.
        """
        held_TK = self.ids_TK >= 0
        at_TK, T = self.ids_TK.clamp_min(0), self.ids_TK.shape[0]
        count_TE = at_TK.new_zeros(T, self.experts).scatter_add(1, at_TK, held_TK.long())
        if bool((count_TE > 1).any()):
            raise Unsupported("an expert twice in one row has no dense form")
        zero_TE = self.weights_TK.new_zeros(T, self.experts)
        weights_TK = torch.where(held_TK, self.weights_TK, 0.0)  # whatever an empty slot has for a weight
        return zero_TE.scatter_add(1, at_TK, weights_TK), count_TE.bool()

    @classmethod
    def from_dense(cls, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        """Return the (T, K) form; K is the largest row count of the map (capacity pads above and drops below top-k)."""
        K = int(map_TE.sum(1).max()) if map_TE.numel() else 0
        held_TK, ids_TK = map_TE.to(torch.int8).topk(K, dim=1)
        ids_TK = torch.where(held_TK.bool(), ids_TK, -1)
        weights_TK = weights_TE.gather(1, ids_TK.clamp_min(0))
        return cls(ids_TK, torch.where(ids_TK >= 0, weights_TK, 0.0), map_TE.shape[1])


# ---- what reaches the experts --------------------------------------------------------------------------------


Counts = Tensor | Sequence[int]
Unrouted = Literal["padding", "zero"]


def _cpu(counts: Counts) -> Tensor:
    return torch.as_tensor(counts).detach().to("cpu", torch.int64)


@dataclass(frozen=True)
class Delivery:
    """What one call of the local experts is handed: the backend's own layout, made explicit by a constructor.

    The experts compute out_r = sum_j w_rj * f_e(row_r) with e = local_experts[ids_rj], where w = 1 if `weights_RJ`
    is None (the backend has applied them or will). Rows with no id >= 0 (they may be uninitialised) and all-zero
    rows are padding: the suite's expert answers them with a large finite value, which must reach no output. With
    `unrouted="zero"` a row with no id is a token whose experts are elsewhere, and its empty sum of zero is wanted.
    """

    rows_RD: Tensor
    ids_RJ: Tensor  # int64 index into the exchange's local_experts, -1 = nothing
    weights_RJ: Tensor | None
    counts_N: Tensor | None  # as claimed by the backend, untouched; None if it claims none
    shape: tuple[int, ...]  # of the rows as the backend holds them; the experts' output comes back in it
    unrouted: Unrouted = "padding"  # zero: the backend adds up the answers of several ranks
    overflowed: bool | None = None  # as claimed with `over_budget="drop"`: this rank's buffer could not hold all rows

    @classmethod
    def grouped(cls, rows_RD: Tensor, counts_N: Counts, weights_R: Tensor | None = None) -> Delivery:
        """Expert-major rows. Counts may include padding rows; rows beyond sum(counts) are an unspecified tail."""
        claimed_N = _cpu(counts_N)
        total = int(claimed_N.sum())
        if total > rows_RD.shape[0] or bool((claimed_N < 0).any()):
            raise Malformed(f"counts {claimed_N.tolist()} for {rows_RD.shape[0]} rows")
        ids_RJ = torch.full((rows_RD.shape[0], 1), -1)
        ids_RJ[:total, 0] = torch.arange(len(claimed_N)).repeat_interleave(claimed_N)
        weights_RJ = None if weights_R is None else weights_R.reshape(-1, 1)
        return cls(rows_RD, ids_RJ.to(rows_RD.device), weights_RJ, claimed_N, tuple(rows_RD.shape))

    @classmethod
    def listed(
        cls, rows_RD: Tensor, ids_RJ: Tensor, weights_RJ: Tensor | None = None, counts_N: Counts | None = None,
        unrouted: Unrouted = "padding",
    ) -> Delivery:  # fmt: skip
        """One row per token and rank with J slots. The adapter maps ids that mean "not mine" to -1."""
        claimed_N = None if counts_N is None else _cpu(counts_N)
        return cls(rows_RD, ids_RJ.to(torch.int64), weights_RJ, claimed_N, tuple(rows_RD.shape), unrouted)

    @classmethod
    def batched(cls, rows_NCD: Tensor, counts_N: Counts | None = None, weights_NC: Tensor | None = None) -> Delivery:
        """C places per expert, the first counts[n] of them filled; without counts all are, and zero rows pad."""
        N, C, D = rows_NCD.shape
        ids_NC = torch.arange(N, device=rows_NCD.device)[:, None].expand(N, C)
        claimed_N = None if counts_N is None else _cpu(counts_N)
        if claimed_N is not None:
            if bool((claimed_N > C).any()) or bool((claimed_N < 0).any()):
                raise Malformed(f"counts {claimed_N.tolist()} for capacity {C}")
            filled_NC = torch.arange(C, device=ids_NC.device) < claimed_N.to(ids_NC.device)[:, None]
            ids_NC = torch.where(filled_NC, ids_NC, -1)
        weights_RJ = None if weights_NC is None else weights_NC.reshape(-1, 1)
        return cls(rows_NCD.reshape(N * C, D), ids_NC.reshape(-1, 1), weights_RJ, claimed_N, (N, C, D))


# Call it on every forward, with no rows too; in chunks is fine, again in a backward (recomputation) is not.
ExpertFn = Callable[[Delivery], Tensor]


# ---- surfaces: what a session may build ----------------------------------------------------------------------


@runtime_checkable
class Resolved(Protocol):
    """What every built surface tells of itself."""

    @property
    def resolved(self) -> Mapping[str, str]:
        """What was built, read from the built object (class, path, fused or not): a silent fallback shows here."""


WIRES = ("pairs", "tokens", "all", "copies")
HANDED = ("routed", "tokens", "static")
ROUTINGS = ("slots", "maps")


class Placed(Resolved, Protocol):
    """What every exchange tells of the experts that this rank holds.

    `resolved["wire"]` says what its dispatch sends to other ranks: "pairs", a row for each routed pair, unless it says
    otherwise; "tokens", one row for each token and rank that needs it; "all", every token to every rank; "copies", that
    the adapter first copied the tokens of every tensor rank to all of them, as the backend wants them: not counted.
    Where whole maps (T, E) travel with "all", one of marks in bytes and one of weights in no more than float32 each,
    `resolved["routing"]` says "maps" instead of "slots".
    `resolved["handed"]` says how many rows the experts are handed: "routed", as many as are for them, unless it says
    otherwise; "tokens", every token of the exchange group; "static", a number that was agreed upon before. Where the
    rows of an expert are padded to a multiple, `resolved["multiple"]` says to which, and budgets count what that adds.
    With `token_copies`, dL/dx and dL/dw are "complete" on every copy, unless `resolved["copies"]` says "parts", which
    add up to them over tp.
    """

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts, in the order that delivered ids count in."""


class Exchange(Placed, Protocol):
    """Dispatch, the given experts, combine. x: (*lead, D) -> y: (*lead, D) with prod(lead) == T.

    ep = 1 is a local permute. Backward is the library's; where the adapter had to write it, say
    `resolved["autograd"] = "adapter"`.
    """

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Return y for x; call `expert` on what reached this rank."""


@runtime_checkable
class SplitExchange(Placed, Protocol):
    """An exchange in two halves; implement this or `Exchange`, not both (`whole` makes one of the other).

    State goes into the handle. A backend that keeps it on itself returns None for a handle and declares
    `Limit("halves_in_flight", (1,), ...)`.
    """

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Return what reached this rank's experts, and the handle that combine needs."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return y from the experts' output, which has the delivery's shape."""


def whole(exchange: Exchange | SplitExchange) -> Callable[[Tensor, Routing, ExpertFn], Tensor]:
    """Return the exchange as one call, whichever of the two forms it has."""
    if not isinstance(exchange, SplitExchange):
        return exchange
    split = exchange

    def call(x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        delivery, handle = split.dispatch(x, routing)
        return split.combine(expert(delivery), handle)

    return call


@dataclass(frozen=True)
class Named:
    """A window on (part of) one parameter, in canonical orientation: gate, up (F, D); down (D, F); router (E, D).

    The suite writes values and reads gradients through it, so `view` is a *view* (slice, chunk, transpose) of
    `read(parameter)`, never a copy.
    """

    name: str  # "gate" "up" "down" "router" "balance_bias"; of shared experts see `surfaces.Layer`
    expert: int | None  # global id, None for what is not an expert's
    view: Tensor
    shard: tuple[int, int, int] | None = None  # (dim, index, of): this etp rank holds chunk `index` of `of` along dim


Read = Callable[[Tensor], Tensor]  # the suite's: a parameter or buffer -> its data, or -> its gradient


class Parametrised(Protocol):
    """Something with parameters that the suite sets and whose gradients it reads."""

    def named(self, read: Read) -> Iterator[Named]:
        """Yield a window on every parameter (and on the balance bias, a buffer, if there is one)."""


class Experts(Parametrised, Resolved, Protocol):
    """The backend's own experts for this rank, in the exchange's local order: SwiGLU, down(silu(gate x) * up x)."""

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output in `delivery.shape`, weighted if the delivery carries weights.

        It is this etp rank's part of the sum if `Session.expert_output_is_partial`.
        """


@dataclass(frozen=True)
class Routed:
    """What a router decided for its tokens."""

    routing: Routing
    logits_TE: Tensor | None = None  # that were scored: where logits are forced, the forced ones
    counts_E: Tensor | None = None  # the load that the backend believes it saw


class Router(Parametrised, Resolved, Protocol):
    """Scores, selection and weights for the tokens of this rank. x: (*lead, D), prod(lead) == T.

    `resolved["dtype"]` says what it computes in where that is not the dtype of x.
    """

    def __call__(self, x: Tensor) -> Routed:
        """Return the routing of x, differentiable in x and in the router's parameters."""


# ---- the backend ---------------------------------------------------------------------------------------------


class Topology(Protocol):
    """Where this rank stands. The suite makes it; an adapter reads it."""

    @property
    def rank(self) -> int:
        """Rank in the world."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by name: world, tp, cp, pp, dp, ep, etp, edp."""

    def ranks(self, name: str) -> tuple[int, ...]:
        """World ranks of this rank's group: world, tp, cp, pp, dp, dp_cp, ep, etp, ep_etp, edp."""

    def group(self, name: str) -> dist.ProcessGroup:
        """Process group of the same names, of one rank too. It belongs to the suite: do not destroy it."""


class Session:
    """One topology on one rank; at most one session is open in a process.

    Subclass it, or `surfaces.Session`, and override what the backend has: a surface that is not overridden is "not
    offered". Class attributes state how the backend works; the suite observes whether they are true.
    """

    # Where the weights are applied by default. An exchange that differs says so in `resolved["weights_at"]`, which is
    # read after every forward.
    weights_at: Literal["input", "expert", "combine"] = "combine"
    expert_output_is_partial: bool = False  # etp > 1: combine sums the parts
    grad_attr: str = "grad"  # where gradients lie after finish_gradients ("main_grad")
    loss_convention: Literal["sum", "mean_over_dp"] = "sum"  # finish_gradients: summed, or averaged over dp*cp

    def exchange(self, config: Config) -> Exchange | SplitExchange:
        """Build an exchange; collective."""
        raise Unsupported("this backend offers no exchange")

    def experts(self, config: Config) -> Experts:
        """Build the backend's own experts for this rank; collective."""
        raise Unsupported("this backend offers no experts")

    def router(self, config: Config) -> Router:
        """Build a router; collective."""
        raise Unsupported("this backend offers no router")

    def finish_gradients(self, *built: Parametrised) -> None:
        """Do all that the backend's trainer does to gradients between the last backward and the step."""
        raise Unsupported("this backend offers no gradient reduction")

    def close(self) -> None:  # not abstract: most sessions hold nothing
        """Give up what the session holds (process groups of its own, global state)."""


class Backend(Protocol):
    """An implementation under test. Importing its module must not import the library.

    Optional and pure: `groups(sizes) -> Mapping[str, tuple[tuple[int, ...], ...]]`, the rank lists that the library
    would build for sizes world, tp, cp, pp, ep, etp, under the names of `Topology.ranks` (and "expert_pp", where the
    expert fold has its own); an exception where it refuses them. With `orders: tuple[str, ...]`, further orders of axes
    by the library's names, it is called as `groups(sizes, order)` too.

    Optional: `sampled: tuple[str, ...]`, variants that share most of what they do with others. The quick profile
    tries them on two layouts; the other profiles leave nothing out.
    """

    name: str
    variants: tuple[str, ...]

    def versions(self) -> Mapping[str, str]:
        """Versions that verdicts depend on; `Unsupported` if the library is not installed, with what to install."""

    def limits(self, variant: str) -> Sequence[Limit]:
        """Limits of that variant."""

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session; collective."""
