"""TRAIN, and GRAD-12 to GRAD-14: whole training steps, from a global batch to changed parameters."""

from __future__ import annotations

import torch

from moe_conformance.chapters.training.judge.reported import judge_loss, judge_norm
from moe_conformance.chapters.training.judge.state import judge_first_kept, judge_idle, judge_skipped, judge_steps
from moe_conformance.chapters.training.workloads import ON_TRAINER
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.workload import Workload


def finite(workload: Workload) -> bool:
    """Select scripts whose gradients are all finite."""
    batches = (batch for call in workload.calls for given in call.given for batch in given["batches"])
    return all(bool(torch.isfinite(batch.target_TD).all()) for batch in batches)


def not_finite(workload: Workload) -> bool:
    """Select scripts with a step whose gradient is not finite."""
    return not finite(workload)


def clipped(workload: Workload) -> bool:
    """Select scripts whose gradients are clipped."""
    return finite(workload) and workload.config.training.largest_norm is not None


def unclipped(workload: Workload) -> bool:
    """Select scripts whose first moments, or momenta, are the gradient of the first step, which is not clipped."""
    return finite(workload) and workload.config.training.largest_norm is None


def accumulated(workload: Workload) -> bool:
    """Select steps of several microbatches, whose gradients are not clipped."""
    return unclipped(workload) and len(workload.calls[0].given[0]["batches"]) > 1


def decayed(workload: Workload) -> bool:
    """Select scripts with a decay."""
    return finite(workload) and workload.config.training.decay > 0


class TestGradients:
    test_norm = Row("GRAD-12", ON_TRAINER, judge_norm, when=finite)
    """The norm is that of the whole model, every distinct element counted once, the same on all ranks."""

    test_one_factor = Row("GRAD-13", ON_TRAINER, judge_first_kept, when=clipped)
    """What the optimiser keeps of the first gradient is clipped by one factor, dense and expert."""

    test_counted_tokens = Row("GRAD-14", ON_TRAINER, judge_first_kept, when=unclipped)
    """What the optimiser keeps of the first gradient is divided by the counted tokens of the whole step."""


class TestSteps:
    test_steps_of_one_device = Row("TRAIN-01", ON_TRAINER, judge_steps, when=finite)
    """Parameters and moments are those of one device after each step."""

    test_experts_without_tokens = Row("TRAIN-02", ON_TRAINER, judge_idle, when=decayed)
    """They are decayed, and their moments are updated."""

    test_accumulation = Row("TRAIN-03", ON_TRAINER, judge_steps, when=accumulated)
    """Microbatches give the step of one batch that has all their tokens."""

    test_loss = Row("TRAIN-04", ON_TRAINER, judge_loss, when=finite)
    """It is the mean over the counted tokens of all ranks and microbatches, on every rank."""

    test_steps_not_finite = Row("TRAIN-05", ON_TRAINER, judge_skipped, when=not_finite)
    """They are skipped on all ranks, and leave everything as it was; or on none, which is claimed."""
