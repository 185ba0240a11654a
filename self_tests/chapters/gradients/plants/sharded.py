"""GRAD: bugs of experts that are shared out among their replicas."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.sharded_experts import ShardedGradients, ShardedParameters
from moe_conformance.contract import Named, Read
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


@planted(Expectation("GRAD-16", "own-sharded-parameters", "gradient", "0.500 x the expected value"), layout=EP2_EDP2)
class AveragedWhereScattered(ShardedParameters):
    """Where gradients are scattered they are averaged over the replicas, as FSDP does unless it is told not to."""

    def scattered(self, gradient: Tensor, dim: int) -> Tensor:
        return super().scattered(gradient, dim) / self.of


@planted(Expectation("GRAD-16", "own-sharded-parameters", "gradient", "only the tokens of its own"), layout=EP2_EDP2)
class ScatteredUnsummed(ShardedParameters):
    """Every replica cuts its part out of its own gradient, and the others' tokens are lost."""

    def scattered(self, gradient: Tensor, dim: int) -> Tensor:
        return self._own(gradient, dim).clone()


@planted(Expectation("GRAD-16", "own-sharded-gradients", "finish", "every expert gradient is zero"), layout=EP2_EDP2)
class PartOfTheNext(ShardedGradients):
    """A replica shows the part that the next one has kept, of which it has zeros."""

    def named(self, read: Read) -> Iterator[Named]:
        kept = self.replica
        if self.in_parts:
            self.replica = (kept + 1) % self.of
        yield from super().named(read)
        self.replica = kept


@planted(
    Expectation(
        "GRAD-16", "own-sharded-gradients", "finish", "is whole on each of its 2 replicas", "accepted and ignored"
    ),
    layout=EP2_EDP2,
)
class NotShardedAtAll(ShardedGradients):
    """Sharding is asked for, and every replica keeps all of it."""

    def after_reduction(self) -> None:
        Experts.after_reduction(self)


@planted(
    Expectation("GRAD-16", "own-sharded-gradients", "finish", "the gradient of gate of expert 0 (part 2 of 4)"),
    layout=Layout(4, etp=2),
    real="NVIDIA-NeMo/Megatron-Bridge PR #1817",
)
class PartsByReplicaFirst(ShardedGradients):
    """Units are cut by shard, then by replica, and their parts are numbered by replica, then by shard."""

    def _own_part(self) -> tuple[int, int]:
        return self.replica * self.placement.shards + self.placement.shard, self.placement.shards * self.of


@planted(Expectation("GRAD-16", "own-sharded-gradients", "finish", "gate of expert 0", "only"), layout=EP2_EDP2)
class LastReplicaHasNone(ShardedGradients):
    """The last replica is taken for one that has nothing to keep."""

    def named(self, read: Read) -> Iterator[Named]:
        for window in super().named(read):
            if not (self.in_parts and self.replica == self.of - 1):
                yield window


@planted(Expectation("GRAD-16", "own-sharded-parameters", "experts", "y of rank"), layout=EP2_EDP2)
class GatheredInReverse(ShardedParameters):
    """Of gate and up alone the parts are gathered in reverse order: units of the one meet those of another in down."""

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        gate_NFD, up_NFD, down_NDF = super()._weights()
        return (*(torch.cat(each.chunk(self.of, 1)[::-1], 1) for each in (gate_NFD, up_NFD)), down_NDF)  # type: ignore[return-value]


@planted(
    Expectation("GRAD-16", "own-sharded-parameters", "gradient", "dx of rank 0 token 0 is"),
    layout=EP2_EDP2,
    real="NVIDIA/Megatron-LM commit f285ea5fae (#4990)",
)
class NotGatheredAgain(ShardedParameters):
    """Behind the forward all parts but the own are let go, and before the backward gate and up alone are gathered."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        y_PD = super()._loop(rows_PD, counts_N)
        with torch.no_grad():
            down_NDF = self.gathered[2].data  # changed as an allocator would, unseen by autograd
            kept = self._own(down_NDF, 2).clone()
            self._own(down_NDF.zero_(), 2).copy_(kept)
        return y_PD

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        self.gathered = super()._weights()
        return self.gathered
