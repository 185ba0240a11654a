"""EXPT: bugs in the backend's own experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.contract import Config, Delivery, Named, Read, Topology
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted


@planted(Expectation("EXPT-01", "own-even", "experts", "y is wrong; likely cause: gate and up were swapped"))
class GateAndUpSwapped(Experts):
    """The two halves of the first projection are taken for each other."""

    def named(self, read: Read) -> Iterator[Named]:
        other = {"gate": "up", "up": "gate", "down": "down"}
        return (replace(window, name=other[window.name]) for window in super().named(read))


@planted(Expectation("EXPT-01", "own-even", "experts", "likely cause: the activation of the gate was nothing"))
class NoActivation(Experts):
    """The gate is not passed through its activation."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        groups = zip(rows_PD.split(counts_N), self.gate_NFD, self.up_NFD, self.down_NDF, strict=True)
        return torch.cat([F.linear(F.linear(rows, gate) * F.linear(rows, up), down) for rows, gate, up, down in groups])


@planted(
    Expectation("EXPT-01", "own-even", "experts", "y of rank 0 token"),
    real="NVIDIA/Megatron-LM commit 8b4e00cf25 (#2817)",
)
class NeighboursWeights(Experts):
    """Rows are split by other counts than they were padded with, and reach the next expert's weights."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        return super()._loop(rows_PD, [*counts_N[1:], counts_N[0]])


@planted(
    Expectation("EXPT-01", "own-even", "experts", "computed with the precision of bfloat16"),
    Expectation("GRAD-05", "own-even", "gradient", "computed with the precision of bfloat16"),
)
class Bfloat16Inside(Experts):
    """The matrix products are computed in bfloat16, whatever was asked for."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super()._loop(rows_PD, counts_N).to(rows_PD.dtype)


@planted(
    Expectation("EXPT-01", "own-idle-rank-even", "run", "rank 1 raised in forward:0: RuntimeError", "needs rows"),
    real="NVIDIA/Megatron-LM commit eef48ef31c",
)
class NoRowsRefused(Experts):
    """The grouped matrix product is called with no rows at all and refuses them."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if not len(rows_PD):
            raise RuntimeError("a grouped product needs rows")
        return super()._loop(rows_PD, counts_N)


@planted(Expectation("EXPT-02", "own-even", "experts", "the window on down of expert 0 is a copy, not a view"))
class CopiedWindows(Experts):
    """The down projection is shown as a contiguous copy: what is written into it goes nowhere."""

    def named(self, read: Read) -> Iterator[Named]:
        for window in super().named(read):
            yield replace(window, view=window.view.clone()) if window.name == "down" else window


@planted(
    Expectation("EXPT-02", "own-even", "experts", "elements of a", "parameter have no window"),
    real="NVIDIA/Megatron-LM PRs #5844, #5845",
)
class LastExpertUnnamed(Experts):
    """A table of parameter names ends one expert early."""

    def named(self, read: Read) -> Iterator[Named]:
        return (window for window in super().named(read) if window.expert != self.placement.ids[-1])


@planted(
    Expectation("EXPT-02", "own-even", "experts", "gate of expert 4 is yielded by 'named' on no rank"),
    real="deepspeedai/DeepSpeed issue #6589",
)
class NamedByLocalNumber(Experts):
    """Experts are named by their local numbers, so that all ranks name the same ones."""

    def named(self, read: Read) -> Iterator[Named]:
        return (replace(window, expert=window.expert - self.placement.first) for window in super().named(read))


@planted(
    Expectation("EXPT-05", "own-even", "experts", "part 0 of 2 along dimension 0 of gate, part 1 of 2", "of up"),
    layout=EP2_ETP2,
)
class UpOfTheOtherShard(Experts):
    """A fused matrix of gate and up is cut in the middle of each half, and the halves of up are handed out in turn."""

    def named(self, read: Read) -> Iterator[Named]:
        for window in super().named(read):
            if window.name == "up" and window.shard is not None:
                dim, index, of = window.shard
                window = replace(window, shard=(dim, (index + 1) % of, of))
            yield window


@planted(
    Expectation("EXPT-05", "own-even", "experts", "y is wrong; likely cause: gate and up were swapped"), layout=EP2_ETP2
)
class GateAndUpExchanged(Experts):
    """The halves of a fused matrix are taken for each other: up is activated, and gate is not."""

    def forward(self, delivery: Delivery) -> Tensor:
        self.gate_NFD, self.up_NFD = self.up_NFD, self.gate_NFD
        try:
            return super().forward(delivery)
        finally:
            self.gate_NFD, self.up_NFD = self.up_NFD, self.gate_NFD


@planted(
    Expectation(
        "EXPT-03", "own-input-weights-even", "experts", "likely cause: the weights were applied at the experts' output"
    )
)
class WeightsBehindTheExpert(AllToAllExchange):
    """Weights asked for at the experts' input are applied to their answers."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(replace(config, weights_applied="output"), topology)


@planted(
    Expectation(
        "EXPT-03", "own-output-weights-even", "experts", "likely cause: the weights were applied at the experts' input"
    )
)
class WeightsBeforeTheExpert(AllToAllExchange):
    """Weights are applied to the rows before they leave, whatever was asked for."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(replace(config, weights_applied="input"), topology)


@planted(
    Expectation("EXPT-08", "own-unweighted-even", "experts", "run with one token on every rank", "y of rank"),
    Expectation("EXPT-08", "own-unweighted-even-bfloat16", "experts", "run with one token on every rank", "y of rank"),
)
class OneScaleForAllRows(Experts):
    """Rows are rounded to a grid that the largest element of the call spans, as int4 with one scale does it."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if rows_PD.numel():
            largest = rows_PD.detach().abs().max()
            rounded_PD = (rows_PD.detach() / largest * 7).round() / 7 * largest
            rows_PD = rows_PD + (rounded_PD - rows_PD.detach())
        return super()._loop(rows_PD, counts_N)


@planted(
    Expectation("EXPT-08", "own-unweighted-even", "experts", "one token on every rank, all for one expert, y of rank")
)
class AnotherKernelBesideIdleExperts(Experts):
    """Where an expert of this rank is idle, the others run in a kernel that rounds the hidden units to bfloat16."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if all(counts_N):
            return super()._loop(rows_PD, counts_N)
        weights = zip(self.gate_NFD.unbind(), self.up_NFD.unbind(), self.down_NDF.unbind(), strict=True)
        answers = []
        for rows, (gate, up, down) in zip(rows_PD.split(counts_N), weights, strict=True):
            hidden = F.silu(F.linear(rows, gate)) * F.linear(rows, up)
            answers.append(F.linear(hidden.bfloat16().to(rows.dtype), down))
        return torch.cat(answers)
