"""GROUP and EXPT: bugs in which ranks belong together, and in which experts they say that they hold."""

# ruff: noqa: D102 - a plant says in its class what its one method does wrong
from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.backends.native import Native
from moe_conformance.backends.native.exchange import AllToAllExchange
from moe_conformance.topology import RankLists
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, EP2_ETP2, Expectation, collect, planted


@planted(
    Expectation("GROUP-01", "", "groups", "the ep group of rank 0 would be [0, 1] instead of [0, 2]", "ep is etp"),
    layout=EP2_ETP2,
)
class ExpertAxesExchanged(Native):
    """The expert fold counts ep fastest, then etp."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        lists = super().groups({**sizes, "ep": sizes["etp"], "etp": sizes["ep"]})
        return {**lists, "ep": lists["etp"], "etp": lists["ep"]}


@planted(
    Expectation("GROUP-01", "", "groups", "the ep group of rank 0 would be [0, 1, 2, 3] instead of [0, 1]"),
    real="deepspeedai/DeepSpeed commit 8cbbbb539 (#7551)",
    layout=EP2_EDP2,
)
class ExpertsForRanks(Native):
    """Expert groups are made as large as there are experts, and there are 8."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        ranks = range(sizes["world"])
        return {**super().groups(sizes), "ep": tuple(tuple(ranks[first : first + 8]) for first in ranks[::8])}


@planted(
    Expectation("GROUP-01", "", "groups", "the etp group of rank 0 would be [0] instead of [0, 1]", "etp is"),
    real="NVIDIA/Megatron-LM issue #1628",
    layout=EP2_ETP2,
)
class DenseShards(Native):
    """Experts are sharded over the tensor parallel ranks of the dense fold, whatever etp says."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        lists = super().groups(sizes)
        return {**lists, "etp": lists["tp"]}


@planted(
    Expectation("EXPT-04", "even", "groups", "expert 0 is on 2 places of an ep group, ranks [0, 1]", "4 is on none"),
    real="deepspeedai/DeepSpeed issue #6589",
    layout=EP2,
)
class LocalNumbers(AllToAllExchange):
    """Every rank numbers its experts from 0."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return tuple(range(self.placement.held))


@planted(
    Expectation("EXPT-04", "even", "groups", "rank 1 holds experts", "and rank 0 of its etp group [0, 1, 2, 3]"),
    layout=EP2_ETP2,
)
class ShardsInAnotherOrder(AllToAllExchange):
    """The second shard of every expert lists its experts from the last to the first."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return self.placement.ids[:: -1 if self.placement.shard else 1]


@planted(
    Expectation("EXPT-04", "even", "groups", "expert 0 is on none", "rank 1 holds experts [8], and there are 8"),
    real="vllm-project/vllm-ascend PR #4232",
    layout=EP2,
)
class CountedFromOne(AllToAllExchange):
    """Placed for one expert more than there is: the last rank has an expert that no router names."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return tuple(expert + 1 for expert in self.placement.ids)


PLANTS = collect(globals())
