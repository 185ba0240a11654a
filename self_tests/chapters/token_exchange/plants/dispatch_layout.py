"""EXCH and GROUP: bugs in where tokens are said to go, and in which groups are taken for local."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.fused.dispatch_layout import DispatchLayout, Transport
from moe_conformance.contract import Destinations
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


@planted(Expectation("EXCH-26", "layout", "dispatch", "rank 0 of the tokens per rank (per_rank) is"), layout=SINGLE)
class SlotsForTokens(DispatchLayout):
    """What goes to a rank is counted by slots: a token with two experts there counts twice."""

    def __call__(self, ids_TK: Tensor, owner_E: Tensor, node_of_W: Tensor) -> Destinations:
        made = super().__call__(ids_TK, owner_E, node_of_W)
        rank_P = owner_E[ids_TK[ids_TK >= 0]]
        return replace(made, per_rank_W=torch.bincount(rank_P, minlength=len(node_of_W)))


@planted(Expectation("EXCH-26", "layout", "dispatch", "node 0 of the tokens per node (per_node) is"), layout=SINGLE)
class NodesAddUpRanks(DispatchLayout):
    """What goes to a node is the sum of what goes to its ranks, so that a token counts for each of them."""

    def __call__(self, ids_TK: Tensor, owner_E: Tensor, node_of_W: Tensor) -> Destinations:
        made = super().__call__(ids_TK, owner_E, node_of_W)
        summed_D = torch.zeros_like(made.per_node_D).index_add(0, node_of_W, made.per_rank_W)
        return replace(made, per_node_D=summed_D)


@planted(
    Expectation("EXCH-26", "layout-unequal-nodes", "dispatch", "of the tokens per node (per_node) is"), layout=SINGLE
)
class NodesByDivision(DispatchLayout):
    """Nodes are the ranks divided by how many the first node has."""

    def _node(self, rank_P: Tensor, node_of_W: Tensor) -> Tensor:
        return (rank_P // int((node_of_W == 0).sum())).clamp_max(int(node_of_W.max()))


@planted(
    Expectation(
        "EXCH-26", "layout-empty-slots", "dispatch", "token", "of the destination ranks of the tokens (in_rank) is"
    ),
    real="huggingface/transformers PR #40545",
    layout=SINGLE,
)
class EmptySlotsGoToTheFirst(DispatchLayout):
    """An empty slot is taken for expert 0."""

    def __call__(self, ids_TK: Tensor, owner_E: Tensor, node_of_W: Tensor) -> Destinations:
        return super().__call__(ids_TK.clamp_min(0), owner_E, node_of_W)


@planted(
    Expectation("EXCH-26", "layout-64-ranks", "dispatch", "of the destination ranks of the tokens (in_rank) is"),
    layout=SINGLE,
)
class RanksInAWord(DispatchLayout):
    """The ranks of a token are bits of one word of 32, and rank 32 is taken for rank 0."""

    def _ranks(self, expert_P: Tensor, owner_E: Tensor) -> Tensor:
        return owner_E[expert_P] % 32


@planted(
    Expectation("EXCH-26", "layout-idle-ranks", "dispatch", "the tokens per node (per_node) has the shape (1,)"),
    layout=SINGLE,
)
class OneNodeForEightRanks(DispatchLayout):
    """Eight ranks are one node, wherever they are."""

    def _nodes(self, node_of_W: Tensor) -> int:
        return (len(node_of_W) + 7) // 8

    def _node(self, rank_P: Tensor, node_of_W: Tensor) -> Tensor:
        return rank_P // 8


@planted(
    Expectation(
        *("GROUP-05", "transport-two-hosts", "groups"),
        *("ranks [0, 8]", "returned True instead of False", "domains are a, b"),
    ),
    Expectation(
        "GROUP-05", "transport-two-hosts", "groups", "with 1 visible devices each, returned False instead of True"
    ),
    real="NVIDIA/Megatron-LM PR #4816",
    layout=SINGLE,
)
class NoMoreThanDevices(Transport):
    """A group is local if it has no more ranks than this process sees devices."""

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        return len(members) <= visible_devices


@planted(
    Expectation("GROUP-05", "transport-unequal-hosts", "groups", "returned False instead of True: their domains are b"),
    layout=SINGLE,
)
class HostsByDivision(Transport):
    """Hosts are the ranks divided by how many the first host has."""

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        per_host = domain_of.count(domain_of[0])
        return len({rank // per_host for rank in members}) == 1


@planted(
    Expectation(
        *("GROUP-05", "transport-scattered", "groups"),
        *("ranks [0, 1, 2]", "returned True instead of False", "domains are a, b"),
    ),
    layout=SINGLE,
)
class EndsAlone(Transport):
    """The domains of the first and the last member decide, as if those between them lay between them."""

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        return domain_of[members[0]] == domain_of[members[-1]]
