"""DROP: bugs in exchanges that fill up to a capacity, lose tokens, or have too little room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.fused.managers import HybridEPManager
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Config, Delivery, Overflow, Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

# ---- filled up to a capacity ---------------------------------------------------------------------------------------


@planted(Expectation("DROP-08", "lossless-uneven", "dispatch", "rank 0 receives", "rows for expert", "of each rank"))
class LargestOfOwn(AllToAllExchange):
    """Every rank fills up to its own largest load, and no rank asks the others for theirs."""

    def _room(self, routing: Routing) -> int | None:
        if self.config.capacity.factor is not None:
            return super()._room(routing)
        counts_E = torch.bincount(routing.ids_TK[routing.ids_TK >= 0], minlength=routing.experts)
        return max(self.config.capacity.minimum, int(counts_E.max()))


@planted(
    Expectation("DROP-08", "lossless-one-expert", "dispatch", "rank 0 receives 26 rows for expert 0 instead of 18"),
    layout=EP2_EDP2,
)
class LargestOfAll(AllToAllExchange):
    """The largest load is taken over all ranks, those that exchange nothing with this one included."""

    def _room(self, routing: Routing) -> int | None:
        if not self.config.capacity.padded or self.config.capacity.factor is not None:
            return super()._room(routing)
        counts_E = torch.bincount(routing.ids_TK[routing.ids_TK >= 0], minlength=routing.experts)
        largest = counts_E.max().reshape(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


@planted(
    Expectation(
        "DROP-08", "lossless-uneven", "dispatch", "rank 0 all-reduces (MAX) numbers of one shape and dtype 2 times"
    ),
    Expectation(
        "DROP-08", "lossless-by-turns", "dispatch", "before the rows of forward:0 are sent, rank 0 all-reduces (MAX)"
    ),
)
class LargestAskedAgain(AllToAllExchange):
    """The capacity is found once to fill rows up, and once more for the sizes that are told to the owners."""

    def _room(self, routing: Routing) -> int | None:
        super()._room(routing)
        return super()._room(routing)


@planted(
    Expectation(
        "DROP-08",
        "lossless-even",
        "dispatch",
        "over group (0, 1, 2, 3) instead of group (0, 1), in which its rows are exchanged",
    ),
    layout=EP2_EDP2,
)
class LargestThroughAll(AllToAllExchange):
    """Every rank tells its largest load to all ranks, and takes the largest of its group: the number is right."""

    def _room(self, routing: Routing) -> int | None:
        if not self.config.capacity.padded or self.config.capacity.factor is not None:
            return super()._room(routing)
        counts_E = torch.bincount(routing.ids_TK[routing.ids_TK >= 0], minlength=routing.experts)
        largest_W = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        largest_W[dist.get_rank()] = counts_E.max()
        dist.all_reduce(largest_W, dist.ReduceOp.MAX)
        return max(self.config.capacity.minimum, int(largest_W[list(self.topology.ranks("ep_etp"))].max()))


@planted(
    Expectation("DROP-08", "lossless-even", "run", "rows for expert", "whose capacity is"),
    real="deepspeedai/DeepSpeed commit 5a2e705b8 (#5156)",
)
class LargestOfFirstChoices(AllToAllExchange):
    """The capacity that is to drop nothing counts first choices only, so that second ones find no room."""

    def _room(self, routing: Routing) -> int | None:
        return super()._room(replace(routing, ids_TK=routing.ids_TK[:, :1], weights_TK=routing.weights_TK[:, :1]))


@planted(
    Expectation("DROP-12", "to-capacity-uneven", "combine", "y of rank 0", "token"),
    real="NVIDIA/Megatron-LM commit 9bbb40dd65 (!2532)",
)
class TakenWithoutThePadding(AllToAllExchange):
    """On the way back rows are looked up where they would lie without the rows that fill up."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        return super()._unpermute(rows_QD[: len(permuted.weights_P)], replace(permuted, blocks=None))


@planted(Expectation("DROP-12", "to-capacity-even", "dispatch", "rank 0 receives 6 rows for expert 0 instead of 4"))
class OneRowMore(AllToAllExchange):
    """Experts are filled up to one row more than the capacity, as if it were an index."""

    def _room(self, routing: Routing) -> int | None:
        room = super()._room(routing)
        return None if room is None else room + 1


@planted(Expectation("DROP-12", "to-capacity-even", "combine", "token"))
class PaddingAnswered(AllToAllExchange):
    """Rows that fill up carry index 0, so that token 0 gets the answers to all of them."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        y = super()._unpermute(rows_QD, permuted)
        if permuted.blocks is None or not len(y):
            return y
        free_Q = torch.ones(len(rows_QD), dtype=torch.bool).index_fill(0, permuted.blocks.place_P, False)
        first = rows_QD[free_Q].sum(0, keepdim=True)
        return torch.cat([(y.flatten(0, -2)[:1] + first), y.flatten(0, -2)[1:]]).reshape(y.shape)


# ---- slots that were dropped ---------------------------------------------------------------------------------------


@planted(
    Expectation(
        "DROP-10",
        "dropped-even",
        "combine",
        "rank 0 token 0 had all slots dropped; its output is 0.125 instead of 0 in column 0",
    )
)
class OutputNotCleared(AllToAllExchange):
    """The output is written where rows come back, and not cleared before: other tokens keep what the buffer held."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        y = super()._unpermute(rows_QD, permuted)
        came_T = torch.zeros(permuted.pairs.shape[0], dtype=torch.bool).index_fill(0, permuted.pairs.token_P, True)
        return torch.where(came_T.reshape(*y.shape[:-1], 1), y, 0.125)


@planted(
    Expectation(
        "DROP-10", "dropping-half-even", "combine", "had all slots dropped; y is not the output of its shared experts"
    )
)
class SharedPartOfTheRouted(Layer):
    """The shared part is added where a routed one has come back, and left out where none has."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        came = (y.detach() != 0).any(-1, keepdim=True)
        return y if shared is None else y + torch.where(came, shared, 0.0)


@planted(
    Expectation(
        "DROP-09",
        "dropping-half-even",
        "combine",
        "kept 1 of 2 slots; y is not the sum over these and the shared experts",
    ),
    Expectation(
        "DROP-09",
        "dropping-half-gate-even",
        "combine",
        "kept 1 of 2 slots; y is not the sum over these and the shared experts",
    ),
)
class DividesAgainWhereItDrops(Layer):
    """The router is right, and the layer divides weights by the sum of the kept ones where there is a capacity."""

    def _dispatched(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.config.capacity.factor is not None:
            kept_TK = routing.weights_TK * (routing.ids_TK >= 0)
            routing = replace(routing, weights_TK=kept_TK / kept_TK.sum(1, keepdim=True).clamp_min(1e-20))
        return super()._dispatched(x, routing)


@planted(
    Expectation(
        *("DROP-11", "dropped-even", "gradient"),
        *("the gradient of the routing weight of rank 0", "instead of 0; the slot was dropped"),
    )
)
class DroppedLearnLikeTheKept(AllToAllExchange):
    """What was dropped weighs nothing and learns all the same, by way of the slots that its token kept."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        dropped_T = torch.where(routing.ids_TK < 0, routing.weights_TK, 0.0).sum(1)
        return super()._weights(routing, pairs) + (dropped_T - dropped_T.detach())[pairs.token_P]


@planted(
    Expectation("DROP-10", "layer-dropped-even", "combine", "y is not zero", "likely cause: no slot was dropped"),
    Expectation("DROP-09", "layer-dropped-even", "combine", "kept 1 of 2 slots; y is not the sum over these: "),
    Expectation("DROP-10", "layer-dropped-position-even", "combine", "had all slots dropped; y is not zero"),
)
class LayerIgnoresItsCapacity(Layer):
    """The router alone drops as it should; in the layer it is built without the capacity."""

    def __init__(self, config: Config, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.router.config = config.changed({"capacity.factor": None})


@planted(
    Expectation("DROP-09", "layer-dropped-even", "combine", "is not the sum over these", "are kept as by position")
)
class LayerDropsByPosition(Layer):
    """The layer hands its router no drop policy, which is by position then."""

    def __init__(self, config: Config, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.router.config = config.changed({"capacity.drop_policy": "position"})


class _Undropping(Layer):
    """Native's layer, for plants in which the router runs once more, without its capacity."""

    @contextmanager
    def _without_capacity(self) -> Iterator[None]:
        config, self.router.config = self.router.config, self.config.changed({"capacity.factor": None})
        yield
        self.router.config = config


@planted(
    Expectation(
        "DROP-11", "dropping-half-even", "gradient", "dx is wrong; likely cause: no slot was dropped; for example dx of"
    ),
    Expectation(
        *("DROP-11", "dropping-all-even", "gradient"),
        *("dx is wrong; likely cause: no slot was dropped", "had all slots dropped"),
    ),
)
class RecomputedWithoutDropping(_Undropping):
    """The backward recomputes the layer from its input, and the router that runs again has no capacity."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).detach()
        with self._without_capacity():
            again = super().forward(x)
        return y + (again - again.detach())


@planted(
    Expectation("DROP-11", "dropping-half-gate-even", "gradient", "on rank 0", "likely cause: no slot was dropped"),
    Expectation("DROP-11", "dropping-all-even", "gradient", "and no token reached the expert"),
)
class ExpertsLearnFromTheDropped(_Undropping):
    """The gradients of experts' weights are made of a buffer that still holds the rows that were dropped."""

    def _routed(self, delivery: Delivery, handle: Any) -> Tensor:
        y = super()._routed(delivery, handle)
        learnt = super()._routed(*self.exchange.dispatch(*self.lost))
        return y + (learnt - learnt.detach())

    def _dispatched(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        with torch.no_grad(), self._without_capacity():
            every = self.router(x).routing
        dropped_TK = torch.where(routing.ids_TK < 0, every.ids_TK, -1)
        self.lost = x.detach(), replace(every, ids_TK=dropped_TK)
        return super()._dispatched(x, routing)


# ---- room --------------------------------------------------------------------------------------------------------


@planted(Expectation("DROP-13", "one-rank-even", "run", "raised in forward:0", "rows; the receive buffer has"))
class RoomForTheMean(HybridEPManager):
    """The buffer is sized for tokens that spread evenly over the ranks."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        super().__init__(config, exchange)
        self.factor = float(dict(config.extra).get("rank_capacity_factor", 1.0))


@planted(
    Expectation(
        "DROP-13", "one-rank-even", "dispatch", "rows were not delivered to rank 1, to which all tokens are routed"
    )
)
class RoomForOneSlot(AllToAllExchange):
    """The buffer of a source has a row per token, and what does not fit is cut off."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        rows_RD = super()._regroup(rows_RD, order_R)
        most = sum(self.sent_tokens)
        return torch.cat([rows_RD[:most], torch.zeros_like(rows_RD[most:])])

    def _room(self, routing: Routing) -> int | None:
        self.sent_tokens = [len(routing.ids_TK)] * self.topology.group("ep").size()
        return super()._room(routing)


class Budgeted(HybridEPManager):
    """Native's manager, for plants in its budget."""

    def _needed(self, demand: int, device: torch.device) -> int:
        return collectives.largest(demand, self.exchange.group, device)


@planted(Expectation("DROP-14", "budget-exact-even", "dispatch", "rank 0 reports an overflow in microbatch 0"))
class FullIsTooFull(Budgeted):
    """A buffer that is filled to its last row counts as exceeded."""

    def _check(self, demand: int, budget: int, device: torch.device) -> None:
        if self._needed(demand, device) >= budget:
            raise Overflow(f"{demand} rows of {budget}")


@planted(Expectation("DROP-14", "budget-by-turns", "dispatch", "reports an overflow in microbatch 1"))
class FlagLeftOver(Budgeted):
    """The flag is set by a batch that is too large and never cleared."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        super().__init__(config, exchange)
        self.over = False

    def _check(self, demand: int, budget: int, device: torch.device) -> None:
        self.over |= self._needed(demand, device) > budget
        if self.over:
            raise Overflow(f"{demand} rows of {budget}")


@planted(Expectation("DROP-15", "budget-one-short-even", "run", "hung: waits in a collective"))
class OverflowRefusedAlone(Budgeted):
    """A rank that has too little room refuses by itself, and the others wait for it in their combine."""

    def _check(self, demand: int, budget: int, device: torch.device) -> None:
        self._needed(demand, device)
        if demand > budget:
            raise Overflow(f"{demand} rows of {budget}")


@planted(Expectation("DROP-15", "budget-by-turns", "combine", "y of rank 0", "microbatch 1"))
class RowsOfTheRefused(Budgeted):
    """The buffer is filled before it is found too small, and what is in it is added to what comes next."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        super().__init__(config, exchange)
        self.left = 0.0

    def _check(self, demand: int, budget: int, device: torch.device) -> None:
        if self._needed(demand, device) > budget:
            self.left = 1.0
            raise Overflow(f"{demand} rows of {budget}")

    def combine(self, rows: Tensor, held: Any) -> Tensor:
        left, self.left = self.left, 0.0
        return super().combine(rows, held) + left
