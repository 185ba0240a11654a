"""COST: bugs by which later steps cost more, memory is kept, or backward costs more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Delivery, Routing, Topology
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


@planted(Expectation("COST-07", "repeated-even", "run", "makes different calls in equal forward passes", "] calls"))
class CallsMoreEachStep(AllToAllExchange):
    """A list of buffers that is never emptied is agreed upon, one by one, in each step."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self._buffers: list[Tensor] = []

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        self._buffers.append(torch.zeros(1))
        for buffer in self._buffers:
            dist.all_reduce(buffer, group=self.topology.group("ep"))
        return super().dispatch(x, routing)


@planted(Expectation("COST-07", "repeated-even", "run", "rank 0 has another number of process groups after each step"))
class GroupOfEachStep(AllToAllExchange):
    """Every dispatch makes a process group for itself, and nobody destroys it."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        dist.new_group(list(self.topology.ranks("ep")))
        return super().dispatch(x, routing)


@planted(Expectation("COST-07", "repeated-even", "run", "bytes allocated after each of 4 equal steps with"))
class KeepsGraphs(AllToAllExchange):
    """The rows of every dispatch are kept for a statistic that is never taken, and with them their graph."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self._rows: list[Tensor] = []

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        self._rows.append(rows)
        return super().combine(rows, handle)


@planted(Expectation("COST-07", "repeated-even", "run", "bytes allocated after each of 4 equal steps with"))
class KeepsBytes(AllToAllExchange):
    """What every combine returns is kept outside of torch, to be written to a file one day."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self._outputs: list[bytes] = []

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        self._outputs.append(y.detach().numpy().tobytes())
        return y


@planted(
    Expectation("COST-10", "even", "dispatch", "rank 0 delivers 64 rows to its experts", "routed pairs"),
    Expectation("COST-10", "rank-without-tokens", "dispatch", "rows to its experts in microbatch 0"),
)
class WorstCaseBuffer(AllToAllExchange):
    """The buffer of received rows is as long as if every rank sent everything here; the counts say what is filled."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        filled = len(delivery.rows_RD)
        unused = max(64 - filled, filled)
        rows_RD = F.pad(delivery.rows_RD, (0, 0, 0, unused))
        ids_RJ = F.pad(delivery.ids_RJ, (0, 0, 0, unused), value=-1)
        return replace(delivery, rows_RD=rows_RD, ids_RJ=ids_RJ, shape=tuple(rows_RD.shape)), (handle, filled)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        permuted, filled = handle
        return super().combine(rows[:filled], permuted)


@planted(
    Expectation(
        *("COST-08", "own-even", "finish"),
        *("elements by all_reduce on group (0, 1, 2, 3)", "the replicas of its experts are"),
    ),
    layout=EP2_EDP2,
)
class ReducesEverywhereRowByRow(GradientFinisher):
    """Gradients of experts travel over all ranks in calls that carry a row each, and what comes back is thrown away."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        for row in torch.zeros_like(gradient).flatten(0, -2):
            dist.all_reduce(row, group=self.topology.group("world"))
        return super()._summed(gradient, replicas)


class _ReducesInBackward(Experts):
    """Gradients are reduced as soon as they are there, and what comes back is thrown away."""

    over: ClassVar[str]

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self._group = topology.group(self.over)
        for parameter in self.parameters():
            parameter.register_hook(self._reduce)

    def _reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(torch.zeros_like(gradient), group=self._group)


@planted(
    Expectation(
        "COST-08", "own-even", "finish", "elements by all_reduce on group (0, 1, 2, 3)", "in backward:0; the replicas"
    ),
    layout=EP2_EDP2,
)
class ReducesEverywhereInBackward(_ReducesInBackward):
    """Every backward reduces gradients of experts over all ranks."""

    over = "world"


@planted(
    Expectation(
        "COST-08", "own-one-token-even", "finish", "elements by all_reduce on group (0, 1)", "in backward:0; the repl"
    )
)
class ReducesOverOwnersInBackward(_ReducesInBackward):
    """Every backward reduces gradients of experts over ranks that hold others."""

    over = "ep"


@planted(Expectation("COST-03", "top-all-even", "run", "dispatch:0 moves", "; allowed: "))
class SavesOnTheWayBack(AllToAllExchange):
    """Rows go out twice; that answers come back added up, fewer than pairs, does not make up for it."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        rows = x.detach().reshape(-1, x.shape[-1])
        group = self.topology.group("ep")
        dist.all_gather_into_tensor(rows.new_empty(len(rows) * group.size(), rows.shape[1]), rows, group=group)
        return super().dispatch(x, routing)


@planted(Expectation("COST-07", "shared-repeated-even", "run", "bytes allocated after each of 3 equal steps"))
class KeepsLogitsAlone(Router):
    """The logits of every forward are kept for a loss that nobody asks for, without their graph."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        self._seen: list[Tensor] = []

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        self._seen.append(logits_TE.detach())
        return logits_TE


@planted(Expectation("COST-07", "shared-repeated-even", "run", "bytes allocated after each of 3 equal steps"))
class ExpertsKeepRows(Experts):
    """Experts keep the rows of every forward."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._rows: list[Tensor] = []

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        self._rows.append(rows_PD.detach())
        return super()._loop(rows_PD, counts_N)
