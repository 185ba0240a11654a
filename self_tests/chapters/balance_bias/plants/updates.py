"""BIAS: bugs in what an update does: its sign and size, whose loads it uses, and quantiles of the step's scores."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.quantile_balancing import QuantileRouters
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import EP2, SINGLE, TP2_EP2, Expectation, planted

PP2_EP2 = Layout(4, pp=2, ep=2)

# ---- sign and size ---------------------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-01", "bias-microbatches", "finish", "likely cause: it follows the load instead of going against"),
    layout=SINGLE,
)
class LoadFollowed(BalancingRouters):
    """The sign is that of the load minus its mean."""

    def change(self, n_E: Tensor) -> Tensor:
        return -super().change(n_E)


@planted(
    Expectation("BIAS-01", "bias-microbatches", "finish", "update 0 of step 0 moved the bias of expert"), layout=SINGLE
)
class ChangedBySize(BalancingRouters):
    """A change is as large as the load is far from the mean."""

    def change(self, n_E: Tensor) -> Tensor:
        mean = n_E.double().mean().clamp_min(1)
        return (self.config.balance.rate * (mean - n_E) / mean).float()


@planted(
    Expectation("BIAS-01", "bias-microbatches", "finish", "likely cause: an expert at the mean load is moved"),
    layout=SINGLE,
)
class MovedAtTheMean(BalancingRouters):
    """An expert whose load is the mean has its bias lowered."""

    def change(self, n_E: Tensor) -> Tensor:
        below_E = len(n_E) * n_E < n_E.sum()
        return self.config.balance.rate * (2.0 * below_E - 1) * bool(n_E.any())


# ---- ranks -----------------------------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-02", "bias-microbatches", "finish", "likely cause: every rank has counted its own tokens only"),
    Expectation("BIAS-03", "bias-microbatches", "finish", "they were updated by different loads"),
    layout=EP2,
)
class RanksAlone(BalancingRouters):
    """Loads are not summed over ranks."""

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        return loads_LE


@planted(
    Expectation("BIAS-02", "bias-microbatches", "finish", "loads are summed over all ranks of the world"),
    real="NVIDIA/Megatron-LM commit aa786b72c0 (#4782)",
    layout=PP2_EP2,
)
class DefaultGroup(BalancingRouters):
    """Loads are summed over the default group, in which other ranks train other routers."""

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        dist.all_reduce(loads_LE, group=self.topology.group("world"))
        return loads_LE


@planted(
    Expectation("BIAS-02", "bias-microbatches", "finish", "loads are not summed over tensor parallel ranks"),
    Expectation("BIAS-03", "bias-microbatches", "finish", "they were updated by different loads"),
    layout=TP2_EP2,
)
class TensorRanksLeftOut(BalancingRouters):
    """Loads are summed over data and context parallel ranks alone, although tokens are divided over tp."""

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        dist.all_reduce(loads_LE, group=self.topology.group("dp_cp"))
        return loads_LE


# ---- microbatches and layers -----------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-04", "bias-microbatches", "finish", "likely cause: the last microbatch alone is counted"),
    layout=SINGLE,
)
class LastMicrobatch(BalancingRouters):
    """Counters are overwritten by every microbatch, and cannot be read."""

    def count(self, number: int, load_E: Tensor) -> None:
        self.loads_LE[number] = load_E

    def loads(self) -> None:
        return None


@planted(
    Expectation("BIAS-04", "bias-microbatches", "finish", "the counters of router 0 hold", "expected zeros"),
    layout=SINGLE,
)
class CountersKept(BalancingRouters):
    """Counters go on from update to update."""

    def begin(self) -> None:
        return


@planted(
    Expectation("BIAS-04", "bias-microbatches", "finish", "likely cause: counters are not set to zero by an update"),
    layout=EP2,
)
class HiddenCountersKept(BalancingRouters):
    """Counters go on from update to update, and cannot be read."""

    def begin(self) -> None:
        return

    def loads(self) -> None:
        return None


@planted(
    Expectation("BIAS-04", "bias-microbatches", "route", "forward 0 (training)", "it is updated by every forward"),
    layout=SINGLE,
)
class UpdatedByForwards(BalancingRouters):
    """Every microbatch updates the bias."""

    def count(self, number: int, load_E: Tensor) -> None:
        super().count(number, load_E)
        self.update()


@planted(
    Expectation("BIAS-11", "bias-layers", "finish", "likely cause: loads are those of another layer"), layout=SINGLE
)
class LayersShifted(BalancingRouters):
    """Counters are found by the number of the layer in the model, dense ones included."""

    def count(self, number: int, load_E: Tensor) -> None:
        super().count((number + self.config.balance.dense_layers) % len(self.routers), load_E)


@planted(Expectation("BIAS-11", "bias-layers", "finish", "update 0 of step 0 moved the bias of expert"), layout=SINGLE)
class LayersTogether(BalancingRouters):
    """All layers are updated by the loads of all."""

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        return super().over_ranks(loads_LE).sum(0, keepdim=True).expand_as(loads_LE)


_OUTSIDE = "outside the two quantiles of the step's scores"


@planted(
    Expectation("BIAS-12", "bias-quantile", "finish", _OUTSIDE, "every rank takes quantiles of its own tokens"),
    layout=EP2,
)
class QuantilesOfOneRank(QuantileRouters):
    """Every rank takes quantiles of the scores of its own tokens."""

    def gathered(self, own_VE: Tensor) -> Tensor:
        return own_VE


@planted(
    Expectation("BIAS-12", "bias-quantile-padding", "finish", _OUTSIDE, "padding tokens are counted"), layout=SINGLE
)
class QuantilesOfPadding(QuantileRouters):
    """Scores of padding are kept as those of other tokens."""

    def valid(self, scores_TE: Tensor, padding_mask_T: Tensor | None) -> Tensor:
        return scores_TE


@planted(Expectation("BIAS-12", "bias-quantile", "finish", _OUTSIDE, "the last microbatch alone"), layout=SINGLE)
class QuantilesOfTheLastMicrobatch(QuantileRouters):
    """The scores of a microbatch take the place of those before it."""

    def count(self, number: int, load_E: Tensor) -> None:
        super().count(number, load_E)
        self.scores[number] = self.scores[number][-1:]


@planted(Expectation("BIAS-12", "bias-quantile", "finish", _OUTSIDE), layout=SINGLE)
class OneTokenTooMany(QuantileRouters):
    """The share is taken for K + 1 slots of a token."""

    def balanced(self, scores_VE: Tensor, bias_E: Tensor) -> Tensor:
        V, E = scores_VE.shape
        cutoff_V = (scores_VE + bias_E).sort(1, descending=True).values[:, self.config.top_k]
        over_VE = (scores_VE - cutoff_V[:, None]).sort(0, descending=True).values
        return -over_VE[min(V - 1, (self.config.top_k + 1) * V // E)]
