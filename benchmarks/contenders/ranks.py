"""What contenders run on each rank: the case; all but the engine also gather outcomes and judge them on rank 0."""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import cases
from benchmarks.timeline import Assignment, assigned
from moe_conformance.engine import RankContext


def run_and_judge(assignment: Assignment, number: int) -> None:
    """Runs one case on this rank of the default group.

    Raises:
        AssertionError: on rank 0, the outcomes are wrong.
    """
    rank = dist.get_rank()
    outcomes = _gather(cases.step(assignment.case(number), rank), rank)
    if rank == 0:
        assignment.judge(number, outcomes)


def _gather(outcome: cases.Outcome, rank: int) -> list[cases.Outcome]:
    """Returns all ranks' outcomes on rank 0, nothing elsewhere; they travel as one tensor, since shapes are equal."""
    tensors: list[Tensor] = [getattr(outcome, field.name) for field in fields(outcome)]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if rank != 0:
        dist.gather(flat, None)
        return []
    flats = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.gather(flat, flats)
    sizes = [tensor.numel() for tensor in tensors]
    return [
        cases.Outcome(*(part.reshape(tensor.shape) for part, tensor in zip(each.split(sizes), tensors, strict=True)))
        for each in flats
    ]


def step(context: RankContext, number: int) -> cases.Outcome:
    """Runs the step of one case on this rank, for the engine."""
    return cases.step(assigned().case(number), context.rank)
