"""TRAIN-01, GRAD-12: bugs of optimiser state that is sharded over data parallel ranks."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.backends.native.training.sharded_state import Shard, ShardedTrainer
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


class NeighboursGradients(Shard):
    """Reads the slice of gradients that belongs to the next rank."""

    def read_gradients(self) -> None:
        own, self.index = self.index, (self.index + 1) % self.ranks
        super().read_gradients()
        self.index = own


@planted(
    Expectation("TRAIN-01", "train-adamw-sharded", "finish", "as if shards had been exchanged"),
    layout=EP2_EDP2,
)
class StateOfItsNeighboursGradients(ShardedTrainer):
    """A shard of the state is updated with the gradients of its neighbour's."""

    shard_type = NeighboursGradients


class OwnAlone(Shard):
    """Has this rank's slice after the update, and the others as they were before."""

    def updated(self) -> list[Tensor]:
        slices = [self.slice_of(self.owners, index) for index in range(self.ranks)]
        slices[self.index] = self.own.detach()
        return self.shaped(slices)


@planted(
    Expectation("TRAIN-01", "train-adamw-sharded", "finish", "its shards of the update were not gathered"),
    layout=EP2_EDP2,
)
class ShardsNotGathered(ShardedTrainer):
    """After the step every rank has the elements of its own shard updated, and no others."""

    shard_type = OwnAlone


class FilledPadding(Shard):
    """Finds in the padding what was there before."""

    def padding(self, flat: Tensor, elements: int) -> Tensor:
        return flat.new_ones(elements)


@planted(
    Expectation("GRAD-12", "train-adamw-sharded", "finish", "likely cause", "the padding of shards"),
    layout=EP2_EDP2,
)
class PaddingInTheNorm(ShardedTrainer):
    """The padding of a shard is not zeroed, and is in the norm, by which all gradients are clipped."""

    shard_type = FilledPadding
