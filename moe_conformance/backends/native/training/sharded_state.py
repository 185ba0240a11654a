"""Optimiser state that is sharded over data parallel ranks: each updates its slice of all elements of a part.

The elements of a part are laid out one parameter after the other and padded, so that every rank has equally many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.training.trainer import Trainer
from moe_conformance.contract import Topology, Training

_UNIT = 64  # elements of a slice are a multiple of this
_SHARDED = ("dp_cp", "edp")  # groups of data parallel ranks, of dense parameters and of experts


class Shard(Replicated):
    """This rank's slice of a part: one parameter of one dimension, which the optimiser has in place of the others."""

    def __init__(self, part: Replicated, topology: Topology) -> None:
        """Lay the elements of the part out."""
        super().__init__()
        self.owners = list(part.parameters())
        self.name = next(name for name in part.replicas if name in _SHARDED)
        self.replicas = tuple(name for name in part.replicas if name != self.name)  # type: ignore[misc]
        self.group, self.ranks = topology.group(self.name), len(topology.ranks(self.name))
        self.index = topology.ranks(self.name).index(topology.rank)
        elements = sum(each.numel() for each in self.owners)
        self.size = -(-elements // (self.ranks * _UNIT)) * _UNIT
        self.own = nn.Parameter(self.owners[0].new_zeros(self.size))

    def slice_of(self, values: Sequence[Tensor], index: int) -> Tensor:
        """Return the slice of a rank of values in the shapes of the part's parameters."""
        flat = torch.cat([value.detach().flatten() for value in values])
        padded = torch.cat([flat, self.padding(flat, self.size * self.ranks - len(flat))])
        return padded[index * self.size : (index + 1) * self.size].clone()

    def padding(self, flat: Tensor, elements: int) -> Tensor:
        """Return what follows the last element: zeros, which add nothing to the norm."""
        return flat.new_zeros(elements)

    def read_parameters(self) -> None:
        """Copy the slice of the parameters."""
        with torch.no_grad():
            self.own.copy_(self.slice_of(self.owners, self.index))

    def read_gradients(self) -> None:
        """Copy the slice of the finished gradients."""
        gradients = [each.grad for each in self.owners if each.grad is not None]  # all of them: they are finished
        self.own.grad = self.slice_of(gradients, self.index)

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Return the slices of all ranks in the shapes of the part's parameters; collective."""
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return self.shaped(parts)

    def shaped(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the slices of all ranks in the shapes of the part's parameters."""
        sizes = [each.numel() for each in self.owners]
        flat = torch.cat(list(slices))[: sum(sizes)]
        return [part.view_as(each) for part, each in zip(flat.split(sizes), self.owners, strict=True)]

    def write_parameters(self) -> None:
        """Copy the slices of all ranks into the parameters; collective."""
        with torch.no_grad():
            for parameter, value in zip(self.owners, self.updated(), strict=True):
                parameter.copy_(value)

    def updated(self) -> list[Tensor]:
        """Return the parameters after an update; collective."""
        return self.gathered(self.own.detach())


class ShardedTrainer(Trainer):
    """A trainer whose optimiser has shards alone."""

    shard_type: type[Shard] = Shard

    def optimiser_of(self, options: Training) -> torch.optim.Optimizer:
        """Return torch's optimiser of this rank's shards."""
        self.shards = [self.shard_type(part, self.topology) for part in self.parts]
        self.moments: dict[Tensor, dict[str, Tensor]] = {}  # of the last step, by parameter; empty until they are asked
        return super().optimiser_of(options)

    @property
    def optimised(self) -> Sequence[Replicated]:
        """Shards: each element is on one rank of a data parallel group."""
        return self.shards

    def begin(self) -> None:
        """Copy what was written."""
        for shard in self.shards:
            shard.read_parameters()
        super().begin()

    def finish(self) -> None:
        """Sum gradients, and keep the slices."""
        super().finish()
        for shard in self.shards:
            shard.read_gradients()

    def update(self) -> None:
        """Update the shards, and gather parameters from them.

        Implements: TRAIN-01.
        """
        super().update()
        self.moments.clear()
        for shard in self.shards:
            shard.write_parameters()

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return the moments of a parameter, which are gathered once after each step; collective."""
        if not self.moments:
            for shard in self.shards:
                self._gather(shard)
        return self.moments.get(parameter, {})

    def _gather(self, shard: Shard) -> None:
        of_shard = {name: shard.gathered(value) for name, value in super().kept(shard.own).items()}
        for place, owner in enumerate(shard.owners):
            self.moments[owner] = {name: values[place] for name, values in of_shard.items()}
