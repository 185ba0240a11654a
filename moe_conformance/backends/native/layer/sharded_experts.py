"""Experts that are shared out among their replicas: each keeps a part of the gradients, or of the parameters as well.

Parts are of the hidden units F, which the experts' etp shards have cut already: replica i of edp keeps the i-th of edp
equal parts of the units of its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.contract import Config, Named, Read, Topology

_UNITS = (1, 1, 2)  # the dimension of gate, up and down (N, F, D), (N, F, D), (N, D, F) that is cut


class _Sharded(Experts):
    """The common base of sharded gradients and sharded parameters."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Make whole parameters.

        Raises:
            CannotBuild: as of all experts, or the hidden units of a rank do not divide over its replicas.
        """
        super().__init__(config, topology, device)
        self.group = topology.group("edp")
        self.replica, self.of = topology.ranks("edp").index(topology.rank), len(topology.ranks("edp"))
        self.units = self.gate_NFD.shape[1]
        if self.units % self.of:
            raise CannotBuild(f"{self.units} hidden units do not divide over the {self.of} replicas of an expert")

    def _own(self, whole: Tensor, dim: int) -> Tensor:
        """Return this replica's part of a tensor, a view."""
        width = self.units // self.of
        return whole.narrow(dim, self.replica * width, width)

    def _own_part(self) -> tuple[int, int]:
        """Return which part of an expert's units this replica keeps, and of how many."""
        return self.placement.shard * self.of + self.replica, self.placement.shards * self.of


class ShardedGradients(_Sharded):
    """Every replica has whole parameters, and of finished gradients its own part alone, as with ZeRO's second stage.

    Implements: GRAD-16.
    """

    in_parts = False  # whether gradients are finished, so that only a part of them is right

    def forward(self, delivery: Any) -> Tensor:
        """Return what the experts make of it; gradients that are accumulated from now on are whole ones."""
        self.in_parts = False
        return super().forward(delivery)

    def after_reduction(self) -> None:
        """Keep the own part, and zeros elsewhere."""
        for parameter, dim in zip((self.gate_NFD, self.up_NFD, self.down_NDF), _UNITS, strict=True):
            assert parameter.grad is not None
            kept = self._own(parameter.grad, dim).clone()
            parameter.grad.zero_()
            self._own(parameter.grad, dim).copy_(kept)
        self.in_parts = True

    def named(self, read: Read) -> Iterator[Named]:
        """Yield windows on all that this rank has, or on its own part once gradients are finished."""
        for window in super().named(read):
            if not self.in_parts:
                yield window
                continue
            assert window.shard is not None
            dim = window.shard[0]
            yield Named(window.name, window.expert, self._own(window.view, dim), (dim, *self._own_part()))


class ShardedParameters(_Sharded):
    """Every replica has its own part of the parameters, and gathers the others for each pass, as with FSDP.

    Gradients are summed over the replicas as they are scattered, in every backward.

    Implements: GRAD-16.
    """

    replicas: ClassVar[tuple[str, ...]] = ()  # no two ranks have the same part

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Make the own part.

        Raises:
            CannotBuild: as of all experts, or the hidden units of a rank do not divide over its replicas.
        """
        super().__init__(config, topology, device)
        for name, dim in zip(("gate_NFD", "up_NFD", "down_NDF"), _UNITS, strict=True):
            setattr(self, name, nn.Parameter(self._own(getattr(self, name).detach(), dim).clone()))

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, which takes no shortcut."""
        return {**super().resolved, "optional": "none"}

    def _part(self) -> tuple[int, int]:
        return self._own_part()

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        gate_NFD, up_NFD, down_NDF = (
            self._gathered(weight, dim) for weight, dim in zip(super()._weights(), _UNITS, strict=True)
        )
        return gate_NFD, up_NFD, down_NDF

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        """Run the loop: nothing is kept that was gathered."""
        return self._loop(rows_PD, counts_N)

    def _gathered(self, local_shard: Tensor, dim: int) -> Tensor:
        """Return the parts of all replicas, one behind the other; one replica has the whole."""
        if self.of == 1:
            return local_shard
        whole: Tensor = _Gather.apply(local_shard, dim, self)  # type: ignore[no-untyped-call]
        return whole

    def scattered(self, gradient: Tensor, dim: int) -> Tensor:
        """Return the own part of the sum of all replicas' gradients, summed in float32 at least."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        dist.all_reduce(total, group=self.group)
        return self._own(total, dim).to(gradient.dtype)


class _Gather(torch.autograd.Function):
    """All parts of a parameter; its gradient goes back to them as a sum."""

    @staticmethod
    def forward(ctx: Any, local_shard: Tensor, dim: int, experts: ShardedParameters) -> Tensor:
        ctx.dim, ctx.experts = dim, experts
        parts = [torch.empty_like(local_shard) for _ in range(experts.of)]
        dist.all_gather(parts, local_shard.contiguous(), group=experts.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.experts.scattered(gradients[0], ctx.dim), None, None
