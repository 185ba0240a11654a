"""GROUP and EXPT: bugs in which ranks belong together, and in which experts they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.contract import Config, Topology, refusals
from moe_conformance.contract.topology import Layout, RankLists
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, EP2_ETP2, Expectation, planted


@planted(
    Expectation(
        *("GROUP-01", "", "groups"),
        "the ep group of rank 0 would be [0, 1] instead of [0, 2]",
        "likely cause: the etp groups were returned as ep",
    ),
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
    Expectation(
        *("GROUP-01", "", "groups"),
        *("the etp group of rank 0 would be [0] instead of [0, 1]", "groups were returned as etp"),
    ),
    real="NVIDIA/Megatron-LM issue #1628",
    layout=EP2_ETP2,
)
class DenseShards(Native):
    """Experts are sharded over the tensor parallel ranks of the dense fold, whatever etp says."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        lists = super().groups(sizes)
        return {**lists, "etp": lists["tp"]}


@planted(
    Expectation("GROUP-02", "", "groups", "cp = 3", "was accepted, although", "3 does not divide the world of 4"),
    layout=EP2_EDP2,
)
class LeftOutRanks(Native):
    """Where sizes do not divide the world, the ranks that are left over belong to no group."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        step = lcm(sizes["tp"] * sizes["cp"] * sizes["pp"], sizes["etp"] * sizes["ep"] * sizes["pp"])
        fitting = sizes["world"] // step * step if step > 0 else 0
        return super().groups({**sizes, "world": fitting or sizes["world"]})


@planted(
    Expectation("GROUP-02", "", "groups", "tp = 4, ", "raised ValueError: ep = 2 does not divide dp"), layout=EP2_EDP2
)
class EpWithinDp(Native):
    """Experts are spread over data parallel ranks only, as before the two folds were parted."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        lists = super().groups(sizes)
        dp = len(lists["dp"][0])
        if dp % sizes["ep"]:
            raise ValueError(f"ep = {sizes['ep']} does not divide dp = {dp}")
        return lists


@planted(
    Expectation(
        "GROUP-02", "", "groups", "raised an internal error instead of refusing the sizes: ZeroDivisionError", "= 0"
    ),
    layout=EP2_EDP2,
)
class DividesBeforeItLooks(Native):
    """Sizes are divided by before anybody has looked at them."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        replicas = sizes["world"] // (sizes["tp"] * sizes["cp"] * sizes["pp"])
        return super().groups(sizes) if replicas else super().groups({**sizes, "tp": -1})


def _require(held: bool, otherwise: str) -> None:
    """Refuse as the library."""
    if not held:
        raise ValueError(otherwise)


@planted(Expectation("GROUP-02", "", "groups", "cp = 1", "was refused: 6 ranks are no power of two"), layout=Layout(6))
class PowersOfTwo(Native):
    """Worlds are powers of two, as those that it was tried on were."""

    library_modules = (__name__,)

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        with refusals(ValueError, match="no power of two"):
            _require(sizes["world"] & (sizes["world"] - 1) == 0, f"{sizes['world']} ranks are no power of two")
        return super().groups(sizes)


@planted(
    Expectation("GROUP-04", "", "groups", "the edp group [0, 2] has ranks of the stages [0, 1] with", "pp = 2"),
    layout=EP2_EDP2,
)
class StagesBeforeReplicas(Native):
    """The expert fold counts its replicas slower than the stages, the dense fold the other way round."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        lists = dict(super().groups(sizes))
        block = sizes["etp"] * sizes["ep"]
        if sizes["pp"] == 1:
            return lists
        jump = block * sizes["pp"]
        firsts = [stage * block + at for stage in range(sizes["pp"]) for at in range(block)]
        return {**lists, "edp": tuple(tuple(range(first, sizes["world"], jump)) for first in firsts)}


@planted(Expectation("GROUP-02", "", "groups", "cp = 1", "was refused: no ep means no experts"), layout=EP2_EDP2)
class NothingWithoutEp(Native):
    """Without expert parallelism no groups are made at all."""

    library_modules = (__name__,)

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        with refusals(ValueError, match="no experts"):
            _require(sizes["ep"] > 1, "no ep means no experts")
        return super().groups(sizes)


@planted(
    Expectation("GROUP-04", "", "groups", "the pp groups are [(0,), (1,), (2,), (3,)] with", "pp = 2"), layout=EP2_EDP2
)
class StagesAlone(Native):
    """Every rank is a pipeline by itself, so that nobody is in another stage than anybody."""

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        return {**super().groups(sizes), "pp": tuple((rank,) for rank in range(sizes["world"]))}


@planted(
    Expectation(
        "GROUP-03", "indivisible-experts", "run", "exchange accepted a configuration with E = 3 experts over ep"
    ),
    layout=EP2,
)
class ExpertsLeftOver(AllToAllExchange):
    """The experts that are left over by a division are on no rank."""

    def __init__(self, config: Config, topology: Topology) -> None:
        ep = topology.sizes["ep"]
        super().__init__(replace(config, experts=max(config.experts // ep, 1) * ep), topology)


@planted(
    Expectation("GROUP-03", "no-experts", "run", "exchange accepted a configuration with E = 0 experts over ep = 2"),
    layout=EP2,
)
class NoneDivide(AllToAllExchange):
    """Only a remainder is looked at, and no experts at all leave none."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config if config.experts else replace(config, experts=topology.sizes["ep"]), topology)


@planted(
    Expectation("GROUP-03", "indivisible-width", "run", "experts accepted a configuration with width F = 17 over etp"),
    layout=EP2_ETP2,
)
class ColumnsLeftOver(Experts):
    """The hidden units that are left over by a division are in no shard."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        etp = topology.sizes["etp"]
        super().__init__(replace(config, ffn=max(config.ffn // etp, 1) * etp), topology, device)


@planted(
    Expectation("GROUP-03", "indivisible-experts", "run", "does not name 3 and 2: 'wrong number of experts'"),
    layout=EP2,
)
class WordlessRefusal(AllToAllExchange):
    """It is refused, and nobody learns what was wrong."""

    def __init__(self, config: Config, topology: Topology) -> None:
        try:
            super().__init__(config, topology)
        except CannotBuild:
            raise CannotBuild("wrong number of experts") from None


@planted(
    Expectation(
        *("EXPT-04", "even", "groups"),
        *("expert 0 is on 2 places of an ep group instead of one: ranks [0, 1]", "4 is on none"),
    ),
    real="deepspeedai/DeepSpeed issue #6589",
    layout=EP2,
)
class LocalNumbers(AllToAllExchange):
    """Every rank numbers its experts from 0."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return tuple(range(self.placement.held))


@planted(
    Expectation(
        *("EXPT-04", "even", "groups"),
        *("rank 1 holds experts", "instead of [0, 1, 2, 3], which rank 0 of its etp group holds"),
    ),
    layout=EP2_ETP2,
)
class ShardsInAnotherOrder(AllToAllExchange):
    """The second shard of every expert lists its experts from the last to the first."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return self.placement.ids[:: -1 if self.placement.shard else 1]


@planted(
    Expectation("EXPT-04", "even", "groups", "expert 0 is on none", "rank 1 holds experts [8]; expected ids below 8"),
    real="vllm-project/vllm-ascend PRs #4232, #4793, #5311",
    layout=EP2,
)
class CountedFromOne(AllToAllExchange):
    """Placed for one expert more than there is: the last rank has an expert that no router names."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return tuple(expert + 1 for expert in self.placement.ids)


@planted(
    Expectation("GROUP-07", "proxy-even", "finish", "the gradient of block0/gate of expert 0 on rank 0 is"),
    real="NVIDIA/Megatron-LM issue #1628",
    layout=EP2_EDP2,
)
class DenseFoldForExperts(GradientFinisher):
    """In a model, experts are reduced over the groups of the dense fold, whose ranks hold other experts."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        return super()._summed(gradient, ("dp_cp",) if replicas == Experts.replicas else replicas)


@planted(
    Expectation("GROUP-07", "proxy-even", "finish", "the gradient of block0/gate of expert", "x the allowed error"),
    layout=EP2_EDP2,
)
class ReducesFloat64InFloat32(GradientFinisher):
    """In a model of float64, gradients of experts are added up in float32."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        narrow = gradient.float() if replicas == Experts.replicas else gradient
        return super()._summed(narrow, replicas)


class FirstSessionForAll(Native):
    """A session is opened once in a process, and is that of every later layout: its groups, ranks and experts."""

    name = "native-first-session-for-all"
    _session: NativeSession | None = None

    def open(self, topology: Topology, device: torch.device) -> NativeSession:
        if self._session is None:
            self._session = super().open(topology, device)
        return self._session


@planted(Expectation("GROUP-08", "exchange-built-again", "run", "process groups after the exchange was built 3 times"))
class GroupForEachExchange(AllToAllExchange):
    """Every exchange that is built makes a group of its own, and nobody destroys it."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        dist.new_group(list(range(topology.sizes["world"])))
