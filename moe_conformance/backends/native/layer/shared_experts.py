"""Shared experts: SwiGLU experts that every token sees, several of them fused into a wider one, cut over tp.

S shared experts of widths F_0, F_1, ...; F is what this rank holds of all of them: F_j / tp hidden units of each, in
order. The ranks of tp hold different tokens and different units: tokens are gathered, every rank computes its part of
all of them, and one reduce-scatter adds up the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.deferred import Put, WeightGradients
from moe_conformance.backends.native.layer.experts import swiglu
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.contract import Config, Named, Read, Topology


class Score(Replicated):
    """The gate of the shared experts: one factor per token, sigmoid(<v, x_t>).

    Implements: SHARE-03.
    """

    replicas = ("dp_cp", "tp")  # every rank of the pipeline stage has tokens of its own

    def __init__(self, config: Config, device: torch.device) -> None:
        """Make the parameter, NaN until someone writes it."""
        super().__init__()
        self.score_1D = nn.Parameter(torch.full((1, config.hidden), torch.nan, dtype=config.dtype, device=device))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the factors (T, 1), in float32 at least."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        return functional.linear(x_TD.to(wide), self.score_1D.to(wide)).sigmoid()


class OutputBias(Replicated):
    """The output biases of the shared experts, (S, D), which are added to the sum of all parts on a rank's own tokens.

    Added to the parts instead, they would be in the sum tp times.

    Implements: SHARE-06.
    """

    replicas = ("dp_cp", "tp")  # as of `Score`: a rank of tp saw its own tokens only

    def __init__(self, config: Config, device: torch.device) -> None:
        """Make the parameter, NaN until someone writes it."""
        super().__init__()
        size = len(config.shared.ffn), config.hidden
        self.bias_SD = nn.Parameter(torch.full(size, torch.nan, dtype=config.dtype, device=device))

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the bias of every shared expert by its number."""
        for j, bias_D in enumerate(read(self.bias_SD)):
            yield Named("shared_bias", j, bias_D)

    def forward(self, h_TD: Tensor) -> Tensor:
        """Return the sum of the shared experts with the sum of their biases."""
        return h_TD + self.bias_SD.sum(0)


class SharedExperts(Replicated):
    """All shared experts as one, without their biases: gate and up (F, D), down (D, F).

    Implements: SHARE-08.
    """

    replicas = ("dp_cp",)  # a rank of tp saw the tokens of all of them, and holds units of its own

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Make the parameters; they are NaN until someone writes them.

        Raises:
            CannotBuild: a width does not divide over tp.
        """
        super().__init__()
        ranks = topology.ranks("tp")
        self.group, self.part = topology.group("tp"), (ranks.index(topology.rank), len(ranks))
        if odd := [width for width in config.shared.ffn if width % len(ranks)]:
            raise CannotBuild(f"shared.ffn = {odd[0]} does not divide over tp = {len(ranks)} ranks")
        self.units = [width // len(ranks) for width in config.shared.ffn]
        nan = torch.full((sum(self.units), config.hidden), torch.nan, dtype=config.dtype, device=device)
        self.deferred: WeightGradients | None = None  # set while a step runs that puts weight gradients off
        self.gate_FD, self.up_FD = nn.Parameter(nan.clone()), nn.Parameter(nan.clone())
        self.down_DF = nn.Parameter(nan.T.clone(memory_format=torch.contiguous_format))

    def named(self, read: Read) -> Iterator[Named]:
        """Yield gate, up and down of every shared expert by its number."""
        gate_FD, up_FD, down_DF = read(self.gate_FD), read(self.up_FD), read(self.down_DF)
        parts = zip(gate_FD.split(self.units), up_FD.split(self.units), down_DF.split(self.units, 1), strict=True)
        for j, (gate, up, down) in enumerate(parts):
            yield Named("shared_gate", j, gate, (0, *self.part))
            yield Named("shared_up", j, up, (0, *self.part))
            yield Named("shared_down", j, down, (1, *self.part))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the sum of the shared experts of this rank's tokens.

        Implements: SHARE-06.
        """
        sizes_W = self._sizes(x_TD)
        return self._scatter(self._part(self._gather(x_TD, sizes_W)), sizes_W)

    def _part(self, x_TD: Tensor) -> Tensor:
        """Return this rank's part of the output of every token."""
        if self.deferred is None:
            return swiglu(x_TD, self.gate_FD, self.up_FD, self.down_DF)
        gate, up, down = map(Put, (self.gate_FD, self.up_FD, self.down_DF))
        return swiglu(x_TD, gate, up, down, self.deferred.linear)

    def _sizes(self, x_TD: Tensor) -> Sequence[int]:
        """Return how many tokens every rank of tp has."""
        local_size = torch.tensor([len(x_TD)], device=x_TD.device)
        sizes: list[int] = collectives.all_gather(local_size, [1] * self.group.size(), self.group).tolist()
        return sizes

    def _gather(self, x_TD: Tensor, sizes_W: Sequence[int]) -> Tensor:
        return collectives.all_gather(x_TD, sizes_W, self.group)

    def _scatter(self, part: Tensor, sizes_W: Sequence[int]) -> Tensor:
        return collectives.reduce_scatter(part, sizes_W, self.group)
