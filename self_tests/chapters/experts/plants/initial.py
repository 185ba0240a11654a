"""EXPT: bugs in the parameters of experts of a new model."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.initial_experts import InitialValues
from self_tests.planted_bugs.plant import EP2_EDP2, EP2_ETP2, Expectation, planted


@planted(
    Expectation(
        *("EXPT-11", "initial-experts", "run"),
        *("gate of expert 4 on rank 1 equals that of expert 0 on rank 0", "likely cause: all ranks of ep draw"),
    ),
)
class OneStateForAllOfEp(InitialValues):
    """Without a tracker of random states every rank of ep draws its experts from the one seed of the model."""

    def seed(self) -> int:
        return 7 + self.topology.ranks("etp").index(self.topology.rank)


@planted(
    Expectation(
        *("EXPT-11", "initial-experts", "run"),
        *("gate of expert 0 on rank 2 differs from that of its replica on rank 0", "likely cause: replicas draw"),
    ),
    Expectation("EXPT-11", "initial-experts-biased-bfloat16", "run", "differs from that of its replica on rank 0"),
    layout=EP2_EDP2,
)
class StateOfTheWorldRank(InitialValues):
    """The random state is seeded with the number of the rank in the world, and replicas have different ones."""

    def seed(self) -> int:
        return 7 + self.topology.rank


@planted(
    Expectation(
        *("EXPT-11", "initial-experts", "run"),
        *("gate of expert 0 (part 1 of 2) on rank 1 equals that of", "likely cause: all ranks of etp draw"),
    ),
    layout=EP2_ETP2,
)
class OneStateForAllOfEtp(InitialValues):
    """The random state belongs to the coordinate in ep alone: the shards of an expert are drawn alike."""

    def seed(self) -> int:
        return 7 + self.topology.ranks("ep").index(self.topology.rank)


@planted(
    Expectation(
        *("EXPT-11", "initial-experts", "run"),
        *("gate of expert 1 on rank 0 equals that of expert 0 on rank 0", "likely cause: one draw"),
    ),
)
class OneDrawForAllExperts(InitialValues):
    """A weight is drawn once, as in a dense model, and expanded to all experts of the rank."""

    def drawn(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return super().drawn(shape[1:], generator).expand(shape)


@planted(Expectation("EXPT-11", "initial-experts", "run", "gate of expert 0 on rank 0 is not finite"))
class ExpertsUninitialised(InitialValues):
    """Weights that are stacked by expert are skipped by what initialises matrices, and stay as they were allocated."""

    def drawn(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.empty(shape)


@planted(Expectation("EXPT-11", "initial-experts", "run", "all matrices of expert 0 on rank 0 are constant"))
class WeightsOfZeros(InitialValues):
    """All weights begin as zeros, like biases."""

    def drawn(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.zeros(shape)
