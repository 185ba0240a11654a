"""The surfaces that most backends have: exchange, experts and router. Import them from `contract`.

Shapes by letter: T tokens on this rank, K top-k, E experts, N experts of this rank (replicas count), D hidden size, F
intermediate size of an expert, R rows received, J slots per row, C capacity. One process is one rank; everything below
is the part of that rank. Returned tensors are ready on the current stream: the adapter waits for events and
asynchronous results first.

A `Session` builds them from a `Config`; the surface.py of a chapter may define further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_conformance.contract.errors import Malformed, Unsupported

if TYPE_CHECKING:
    from moe_conformance.contract.claims import Claims


# ---- what is routed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Expert ids and routing weights of each token.

    The order of slots has no meaning. T counts the tokens of x over its leading dimensions, row-major.
    """

    ids_TK: Tensor  # int64 global expert ids, -1 = empty slot (dropped, padding), anywhere in a row
    # float32, or float64 with tokens of float64: also beside tokens of bfloat16 and float16, as routers compute them. A
    # leaf that requires grad when the suite wants its gradient.
    weights_TK: Tensor
    experts: int  # E

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return (weights_TE, map_TE bool), differentiable in the weights.

        The map distinguishes a routed slot of weight 0 from no slot. An exchange that reads the map off the weights
        (weight != 0)
        declares `Limit("zero_weights", (False,), reason, proof="undefined")`.

        Raises:
            Unsupported: an expert occurs twice in a token, which no map can represent; declare a limit on
                `duplicate_experts`, since in a step that runs this is a failure.
            ValueError: an id is neither that of an expert nor -1.
        """
        if bool(((self.ids_TK < -1) | (self.ids_TK >= self.experts)).any()):
            raise ValueError(f"ids must be -1 (an empty slot) or those of experts 0 to {self.experts - 1}")
        held_TK = self.ids_TK >= 0
        at_TK, T = self.ids_TK.clamp_min(0), self.ids_TK.shape[0]
        count_TE = at_TK.new_zeros(T, self.experts).scatter_add(1, at_TK, held_TK.long())
        if bool((count_TE > 1).any()):
            raise Unsupported("an expert twice in one row has no dense form: declare a limit on duplicate_experts")
        zero_TE = self.weights_TK.new_zeros(T, self.experts)
        weights_TK = torch.where(held_TK, self.weights_TK, 0.0)  # the weight of an empty slot may be anything
        return zero_TE.scatter_add(1, at_TK, weights_TK), count_TE.bool()

    @classmethod
    def from_dense(cls, weights_TE: Tensor, map_TE: Tensor, top_k: int | None = None) -> Routing:
        """Return the (T, K) form, with K = `top_k`, or the largest number of experts of a token in the map.

        A router that selects K experts of every token passes K, so that there are K slots also with T = 0.
        """
        K = top_k if top_k is not None else int(map_TE.sum(1).max()) if map_TE.numel() else 0
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
    """The input of one call of the local experts, in the backend's layout. There is a constructor for each layout.

    The experts compute out_r = sum_j w_rj * f_e(row_r) with e = local_experts[ids_rj], where w = 1 if `weights_RJ`
    is None (the backend applies the weights elsewhere). Rows without an id >= 0 (they may be uninitialised) and
    all-zero rows are padding: the suite's expert returns a large finite value for them, which must reach no output.
    With `unrouted="zero"` a row without an id is a token whose experts are on other ranks; its output is zero.

    Weights have the dtype of `Routing.weights_TK`, which may be wider than that of the rows. Counts are what the
    library reports: `listed` and `batched` deliveries may have none.
    """

    rows_RD: Tensor
    ids_RJ: Tensor  # int64 index into the exchange's local_experts, -1 = nothing
    weights_RJ: Tensor | None
    counts_N: Tensor | None  # tokens per local expert as the backend reports them; None if it reports none
    shape: tuple[int, ...]  # of the rows in the backend's layout; the expert output is returned in it
    unrouted: Unrouted = "padding"  # zero: the backend sums the expert outputs of several ranks
    overflowed: bool | None = (
        None  # reported with `receive_buffer.overflow="drop"`: rows were dropped at this rank's buffer
    )

    @classmethod
    def grouped(cls, rows_RD: Tensor, counts_N: Counts, weights_R: Tensor | None = None) -> Delivery:
        """Return a delivery of rows sorted by expert.

        Counts may include padding rows; rows beyond sum(counts) are unspecified.
        """
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
        """Return a delivery of one row per token and rank, with J slots.

        The adapter maps ids of experts on other ranks to -1.
        """
        claimed_N = None if counts_N is None else _cpu(counts_N)
        return cls(rows_RD, ids_RJ.to(torch.int64), weights_RJ, claimed_N, tuple(rows_RD.shape), unrouted)

    @classmethod
    def batched(cls, rows_NCD: Tensor, counts_N: Counts | None = None, weights_NC: Tensor | None = None) -> Delivery:
        """Return a delivery of C rows per expert, of which the first counts[n] are filled.

        Without counts all are filled, and zero rows are padding.
        """
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


# The expert that the suite passes. Call it in every forward, also with zero rows. Calls in chunks are allowed; a second
# call in a backward is not. Combine may write into the tensor that the expert returned, so the last operation of the
# expert must not have saved it for its backward.
ExpertFn = Callable[[Delivery], Tensor]


# ---- surfaces: what a session may build ----------------------------------------------------------------------


@runtime_checkable
class Resolved(Protocol):
    """A built surface, which reports for display what was built.

    Checks read two entries, since requirements are about them, and trust neither: "forced", the strategy of a router
    by its name in `Config`, with its parameter ("biased by 0.5"); "optional", see `Session.without_optional`.
    """

    @property
    def resolved(self) -> Mapping[str, str]:
        """What was built, read from the built object (class, path, fused or not), so that a silent fallback shows."""


class Claiming(Resolved, Protocol):
    """A surface that claims to differ from the default. Optional: all others claim `Claims()`."""

    @property
    def claims(self) -> Claims:
        """What the surface claims: read from the built object after the run, `weights_at` after every forward."""


class Placed(Resolved, Protocol):
    """An exchange of any kind, which reports the experts of this rank. How it sends rows is in its `claims`.

    A replica of an expert is a rank that holds the same expert: by default all of them are in other ep groups, along
    edp, and a token reaches the one of its own group. An exchange with redundant experts, of which one ep group holds
    several replicas, claims `placement` "replicas". No rank lists an expert twice.
    """

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts, in the order of the local ids of a delivery."""


class Exchange(Placed, Protocol):
    """Dispatch, the given experts and combine as one call. x: (*lead, D) -> y: (*lead, D) with prod(lead) == T.

    y has the dtype of x, though routing weights are float32 at least: their products with rows are cast back, by the
    library or, where those who call it do so, by the adapter.

    ep = 1 is a local permute. Backward is the library's; if the adapter implements it, `resolved` shows so.
    """

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Return y for x; call `expert` on the rows that reached this rank."""


@runtime_checkable
class SplitExchange(Placed, Protocol):
    """An exchange as two calls, dispatch and combine. Implement this or `Exchange`, not both.

    `whole` turns this into one call. State goes into the handle. A backend that stores state on the object itself
    returns None as the handle and declares
    `Limit("halves_in_flight", (1,), ...)`.
    """

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Return the rows for this rank's experts, and the handle that combine needs."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return y from the expert output, which has the delivery's shape."""


def whole(exchange: Exchange | SplitExchange) -> Callable[[Tensor, Routing, ExpertFn], Tensor]:
    """Return an exchange of either form as one call: dispatch, experts, combine."""
    if not isinstance(exchange, SplitExchange):
        return exchange
    split = exchange

    def call(x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        delivery, handle = split.dispatch(x, routing)
        return split.combine(expert(delivery), handle)

    return call


@dataclass(frozen=True)
class Named:
    """A view of (a part of) one parameter, in canonical orientation: gate, up (F, D); down (D, F); router (E, D).

    Biases of experts: bias_gate, bias_up (F,), and bias (D,) behind down. Every etp rank that adds its `bias`, or a
    fraction of it, names it, and finishes the gradient of the whole; a rank that adds none may leave it out.

    The suite writes values and reads gradients through it, so `view` has to be a *view* (slice, chunk, transpose) of
    `read(parameter)`, not a copy.
    """

    # "gate" "up" "down" "bias_gate" "bias_up" "bias" "router" "gate_bias" "balance_bias"; of shared experts see
    # `Layer`
    name: str
    expert: int | None  # global id; None for parameters that belong to no expert
    view: Tensor
    shard: tuple[int, int, int] | None = None  # (dim, index, of): this etp rank holds chunk `index` of `of` along dim


Read = Callable[[Tensor], Tensor]  # given by the suite: a parameter or buffer -> its data, or -> its gradient


class Parametrised(Protocol):
    """A surface with parameters, which the suite sets and whose gradients it reads."""

    def named(self, read: Read) -> Iterator[Named]:
        """Yield a view of every parameter (and of the expert bias, a buffer, if there is one)."""


class Experts(Parametrised, Resolved, Protocol):
    """The backend's own experts for this rank, in the exchange's local order: SwiGLU, down(silu(gate x) * up x).

    It reads `activation`, `expert_biases` and `sharding`, which the exchange of the same config maps too, and ignores.
    It is called with the deliveries of the backend's own exchange and, by FAST-12, with one that has ids and no counts:
    experts that need counts raise.

    Optional, for the checks that change weights between two forwards. `module`: the nn.Module that holds the
    parameters, where that is not the surface itself; it loads, casts and replaces them. `weights_changed()`: what the
    backend has users call after a change that leaves no trace at a tensor (`weight.data`, a fused optimiser).
    `reshard()`: frees parameters that were gathered from shards, where the backend keeps them gathered. `counters`:
    counts which shortcuts are taken, see `Counters`.
    """

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output in `delivery.shape`, multiplied by the routing weights if the delivery has them.

        It is this etp rank's partial sum if `Session.expert_output_is_partial`.
        """


@dataclass(frozen=True)
class Routed:
    """The result of a router for its tokens."""

    routing: Routing
    logits_TE: Tensor | None = None  # from which the scores were computed; with forced logits, the forced ones
    counts_E: Tensor | None = None  # tokens per expert as the backend reports them


class Router(Parametrised, Resolved, Protocol):
    """Scores, selection and weights for the tokens of this rank. x: (*lead, D), prod(lead) == T.

    It claims the `dtype` in which it computes, if that is not the dtype of x.
    """

    def __call__(self, x: Tensor) -> Routed:
        """Return the routing of x, differentiable in x and in the router's parameters."""
