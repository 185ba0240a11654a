"""What one rank saw of steps of a model of several layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey


@dataclass(frozen=True)
class StepSeen:
    """What one rank saw of one step of a model of several layers; keys are ("layer0/gate", 3), for example."""

    y: tuple[Tensor, ...]  # by microbatch
    dx_TD: tuple[Grad, ...]
    local: Mapping[ParameterKey, Grad]  # gradients of parameters when the step returned
    final: Mapping[ParameterKey, Grad] | None  # after finish_gradients; None where none is offered
    calls: tuple[int, int]  # its collectives: the number of the first, and of the first behind them


@dataclass(frozen=True)
class OverlapSeen:
    """Steps of one model on one rank: the sequential one, and two in the backend's schedule.

    The first of these begins without gradients. The second is behind it, and behind the first microbatch, which goes
    through the layers by itself.
    """

    sequential: StepSeen
    overlapped: tuple[StepSeen, StepSeen]
    added: tuple[Mapping[ParameterKey, Tensor], ...]  # by microbatch of the sequential step: to the gradients, float64
    products: Mapping[int, tuple[str, ...]]  # first: weights of the products run during a collective, by its number
    worked: bool  # whether the first ran any product of something at all
    written: tuple[str, ...]  # second: the weights whose gradients were written in place, in order
