"""The records of one rank about overlapped steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey


@dataclass(frozen=True)
class StepSeen:
    """The record of one step of a model of several layers; keys are ("layer0/gate", 3), for example."""

    y: tuple[Tensor, ...]  # by microbatch
    dx_TD: tuple[Grad, ...]
    local: Mapping[ParameterKey, Grad]  # gradients of parameters when the step returned
    final: Mapping[ParameterKey, Grad] | None  # after finish_gradients; None where none is offered
    calls: tuple[int, int]  # numbers of its first collective, and of the first after it


@dataclass(frozen=True)
class OverlapSeen:
    """The records of the sequential step and of two overlapped steps of one model, on one rank.

    The first overlapped step begins without gradients. The second one follows the first microbatch, which runs alone.
    """

    sequential: StepSeen
    overlapped: tuple[StepSeen, StepSeen]
    added: tuple[Mapping[ParameterKey, Tensor], ...]  # to gradients, by microbatch of the sequential step; float64
    products: Mapping[int, tuple[str, ...]]  # first: weights of the products run during a collective, by its number
    worked: bool  # whether the first ran any product of non-empty tensors
    written: tuple[str, ...]  # second: the weights whose gradients were written in place, in order
