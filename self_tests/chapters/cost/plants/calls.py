"""COST: bugs that cost calls or larger ones and change no value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange, Gathered
from moe_conformance.contract import Claims, Delivery, Routing
from self_tests.planted_bugs.plant import EP2_EDP2, SINGLE, Expectation, planted


@planted(
    Expectation("COST-01", "even", "run", "rank 0 calls all_to_all_single on group (0)", "in forward:0"), layout=SINGLE
)
class CallsItself(AllToAllExchange):
    """Counts are exchanged though all experts are here: the group is not looked at."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        counts_E = torch.zeros(routing.experts)
        dist.all_to_all_single(torch.empty_like(counts_E), counts_E, group=self.topology.group("ep"))
        return super().dispatch(x, routing)


@planted(
    Expectation("COST-02", "by-turns-uneven", "run", "forward takes different numbers of collectives", "in forward:1")
)
class ChunksByTokens(AllToAllExchange):
    """A group whose ranks have more than 16 tokens takes a round more, as one that sends them in chunks."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        most = torch.tensor([x.shape[0]])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.topology.group("ep"))
        if most.item() > 16:
            dist.all_reduce(most, group=self.topology.group("ep"))
        return super().dispatch(x, routing)


@planted(Expectation("COST-02", "sizes-by-turns-even", "run", "[3, 3] in forward:0, [1, 1] in forward:1"))
class SkipsEmptySteps(AllToAllExchange):
    """Where no rank of the group has a token, nothing is sent."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        tokens = torch.tensor([x.shape[0]])
        dist.all_reduce(tokens, group=self.topology.group("ep"))
        if tokens.item():
            return super().dispatch(x, routing)
        return Delivery.grouped(x, torch.zeros(len(self.local_experts), dtype=torch.int64)), None

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return rows if handle is None else super().combine(rows, handle)


@planted(Expectation("COST-02", "sizes-by-turns-even", "run", "[3, 3] in forward:3, [4, 4] in forward:4"))
class AsksWhereAllIsForOne(AllToAllExchange):
    """Where one expert gets all pairs of the group, the ranks agree on it by another call."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        loads_E = torch.bincount(routing.ids_TK.flatten(), minlength=routing.experts)
        dist.all_reduce(loads_E, group=self.topology.group("ep"))
        if loads_E.max() == loads_E.sum() > 2:
            dist.all_reduce(loads_E, group=self.topology.group("ep"))
        return super().dispatch(x, routing)


@planted(
    Expectation("COST-02", "even", "run", "forward:0 takes [10, 10, 10, 10] collectives", "[18, 18, 18, 18] with 16"),
    layout=EP2_EDP2,
)
class AsksEveryExpert(AllToAllExchange):
    """The load of each expert is summed over the group by a call of its own."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        for load in torch.bincount(routing.ids_TK.flatten() + 1, minlength=routing.experts + 1)[1:]:
            dist.all_reduce(load, group=self.topology.group("ep"))
        return super().dispatch(x, routing)


@planted(
    Expectation("COST-02", "even", "run", "collectives on the ranks with 8 experts and 2 slots", "16 experts and 4"),
    layout=EP2_EDP2,
)
class AsksEveryExpertAndSlot(AllToAllExchange):
    """How many slots of each rank select an expert is summed over the group by a call for every expert and slot."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        for ids_T in routing.ids_TK.unbind(1):
            for expert in range(routing.experts):
                dist.all_reduce((ids_T == expert).sum(), group=self.topology.group("ep"))
        return super().dispatch(x, routing)


@planted(Expectation("COST-03", "even", "run", "dispatch:0 moves", "times the smallest number", "; allowed: "))
class GathersToo(AllToAllExchange):
    """All tokens go to all ranks before the pairs go to their experts, and nobody reads them."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        rows = x.detach().reshape(-1, x.shape[-1])
        group = self.topology.group("ep")
        sizes = torch.zeros(group.size(), dtype=torch.int64)
        dist.all_gather_into_tensor(sizes, torch.tensor([len(rows)]), group=group)
        everything = list(rows.new_empty(int(sizes.sum()), rows.shape[1]).split(sizes.tolist()))
        dist.all_to_all(everything, [rows] * group.size(), group=group)
        return super().dispatch(x, routing)


@planted(
    Expectation("COST-04", "even", "run", "dispatch:0 moves", "rows; needed: "), real="ISEEKYAN/Megatron-LM PR #182"
)
class PackageMissing(AllToAllExchange):
    """The package of the fused dispatcher is missing, and the all-to-all takes its place under its name."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="tokens")


@planted(Expectation("COST-05", "even", "gradient", "backward:0 exchanges int64 again", "all_to_all_single"))
class CountsAgain(AllToAllExchange):
    """The backward of dispatch exchanges the counts once more instead of keeping them."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        delivery.rows_RD.register_hook(self._ask)
        return delivery, handle

    def _ask(self, gradient_RD: Tensor) -> None:
        counts = torch.zeros(self.topology.group("ep").size(), dtype=torch.int64)
        dist.all_to_all_single(torch.empty_like(counts), counts, group=self.topology.group("ep"))


@planted(
    Expectation(
        "COST-05", "even", "gradient", "backward:0 sends", "bytes of other data; forward:0 sends", "weights in 0 bytes"
    )
)
class CountsAgainAsNumbers(AllToAllExchange):
    """The backward of dispatch exchanges the counts once more, as floating numbers."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        delivery.rows_RD.register_hook(self._ask)
        return delivery, handle

    def _ask(self, gradient_RD: Tensor) -> None:
        counts = torch.zeros(self.topology.group("ep").size())
        dist.all_to_all_single(torch.empty_like(counts), counts, group=self.topology.group("ep"))


@planted(Expectation("COST-06", "even", "dispatch", "bytes in addition to", "rows in forward:0; allowed: "))
class SquareOfExperts(AllToAllExchange):
    """What every rank learns of the loads grows with the square of the number of experts."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        loads = torch.zeros(64 * routing.experts**2, dtype=torch.int64)
        dist.all_reduce(loads, group=self.topology.group("ep"))
        return super().dispatch(x, routing)


class GathersMaps(AllGatherExchange):
    """Whole maps are gathered, and that is said: no bug, see `Maps`."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, routing="maps")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        weights_TE, map_TE = routing.dense()
        sizes_W = self._sizes(len(map_TE), x.device)
        everything = Routing.from_dense(self._gather(weights_TE, sizes_W), self._gather(map_TE, sizes_W))
        rows_TD, local_TK = self._gather(x, sizes_W), self._local_ids(everything.ids_TK)
        rows_RD, permuted = self._permute(rows_TD, replace(everything, ids_TK=local_TK, experts=self._held), None)
        return Delivery.grouped(rows_RD, permuted.rows_E), Gathered(sizes_W, permuted, tuple(x.shape))

    @property
    def _held(self) -> int:
        return self.placement.held

    def _gather(self, values: Tensor, sizes_W: list[int]) -> Tensor:
        return collectives.all_gather(values, sizes_W, self.topology.group("ep_etp"))


class Maps(Native):
    """Native, whose all-gather exchange gathers whole maps."""

    session_class = NativeSession.building(GathersMaps)


@planted(
    Expectation(
        "COST-06", "even", "dispatch", "claims routing = 'maps', and rank 0 sends no maps of weights instead of 1"
    )
)
class MapsInFloat64(GathersMaps):
    """Whole maps are gathered, as is declared, the weights in twice the bytes of a weight."""

    def _gather(self, values: Tensor, sizes_W: list[int]) -> Tensor:
        wide = values.double() if values.is_floating_point() and values.shape[-1] == self.config.experts else values
        return super()._gather(wide, sizes_W).to(values.dtype)


@planted(
    Expectation(
        *("COST-06", "even", "dispatch"),
        *("no maps of marks and no maps of weights instead of 1 each, of shape (8, 8), in forward:0", "uint8"),
    )
)
class SaysMaps(AllGatherExchange):
    """Whole maps are declared, and something else that is as large is gathered with ids and weights."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, routing="maps")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        T = len(routing.ids_TK)
        table = torch.zeros(T, 2 * routing.experts, dtype=torch.uint8, device=x.device)
        collectives.all_gather(table, self._sizes(T, x.device), self.topology.group("ep_etp"))
        return super().dispatch(x, routing)


@planted(
    Expectation(
        "COST-06", "even", "dispatch", "rank 0 sends 536 bytes in addition to", "allowed: 464, whole maps and counts"
    )
)
class MapsAndIds(GathersMaps):
    """Whole maps are gathered, as is declared, and ids and weights of the slots too."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        for values in (routing.ids_TK, routing.weights_TK.detach()):
            self._gather(values, self._sizes(len(values), x.device))
        return super().dispatch(x, routing)


@planted(
    Expectation("COST-06", "even", "dispatch", "claims routing = 'maps', and wire = 'pairs'; expected wire = 'all'")
)
class MapsOfPairs(AllToAllExchange):
    """Whole maps are declared by an exchange that brings no token to all ranks."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, routing="maps")
