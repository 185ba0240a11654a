"""EXCH, PACK: what belongs to all ranks of a group is taken for what belongs to this rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange
from moe_conformance.backends.native.exchange.token_padding import PaddedExchange
from moe_conformance.backends.native.row_ops.permutation import sort_pairs
from moe_conformance.contract import Config, Delivery, Routing, Topology
from self_tests.planted_bugs.plant import EP2_EDP2, TP2_EP2, Expectation, planted


@planted(Expectation("EXCH-05", "even", "combine", "y of rank 1 token 0"), real="vllm-project/vllm PR #52639")
class CombineWithGatheredIds(AllToAllExchange):
    """Ids that dispatch gathers are kept under the name of the rank's own: combine reads those of the first rank."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, sent = super().dispatch(x, routing)
        group = self.topology.group("ep")
        sizes_W = collectives.all_gather(torch.tensor([len(routing.ids_TK)]), [1] * group.size(), group).tolist()
        ids_TK = collectives.all_gather(routing.ids_TK, sizes_W, group)[: len(routing.ids_TK)]
        pairs = sort_pairs(ids_TK, routing.experts)
        weights_P = self._weights(routing, pairs)
        return delivery, replace(sent, permuted=replace(sent.permuted, pairs=pairs, weights_P=weights_P))


@planted(
    Expectation("EXCH-07", "even", "combine", "y of rank 0 in microbatch 0 has the shape (16, 32) instead of (8, 32)"),
    real="pytorch/torchtitan commits b38bbdea8 (#3662), 565cb810c (#3664)",
)
class OutputOfTheWholeGroup(AllGatherExchange):
    """The output is as long as the tokens of all ranks, and every rank returns the sums of all."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        own = super().combine(rows, handle)
        return collectives.all_gather(own, handle.sizes_W, self.topology.group("ep_etp"))


class _Everybody(Topology):
    """A topology in which all ranks exchange with each other."""

    def __init__(self, own: Topology) -> None:
        self.own = own

    @property
    def rank(self) -> int:
        return self.own.rank

    @property
    def sizes(self) -> Any:
        return self.own.sizes

    def ranks(self, name: str) -> tuple[int, ...]:
        return self.own.ranks("world" if name == "ep_etp" else name)

    def group(self, name: str) -> dist.ProcessGroup:
        return self.own.group("world" if name == "ep_etp" else name)


@planted(
    Expectation("EXCH-01", "even", "dispatch", "is rank 2 token", "which is not routed to this expert"),
    Expectation("EXCH-05", "even", "dispatch", "every element of y is 2.000 x the expected value", "or edp"),
    real="sgl-project/sglang PR #32962",
    layout=EP2_EDP2,
)
class EveryReplicaAnswers(AllGatherExchange):
    """Tokens are gathered from all ranks: every replica of an expert answers, and the answers are summed."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self.topology = _Everybody(topology)


@planted(
    Expectation("PACK-03", "padded-uneven", "dispatch", "rows of zeros for expert 0", "padding tokens were routed"),
    real="NVIDIA/Megatron-LM commit 3a253ac5c2 (#4922)",
    layout=TP2_EP2,
)
class PaddingBeginsBehindTheGroup(PaddedExchange):
    """Where padding begins is counted in the rows of the tp group, and compared with the places of this rank's."""

    def _pad(self, x_TD: Tensor, routing: Routing, missing: int) -> tuple[Tensor, Routing]:
        x_PD, padded = super()._pad(x_TD, routing, missing)
        assert isinstance(self.inner, AllToAllExchange)
        real = torch.tensor([len(x_TD)])
        dist.all_reduce(real, group=self.inner.topology.group("tp"))
        ids_PK = torch.cat([routing.ids_TK, torch.zeros_like(padded.ids_TK[len(x_TD) :])])  # what the buffer holds
        real_P = torch.arange(len(ids_PK)) < real
        return x_PD, replace(padded, ids_TK=torch.where(real_P[:, None], ids_PK, -1))
