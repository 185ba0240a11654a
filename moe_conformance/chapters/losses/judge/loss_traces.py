"""Judges of losses: no effect in evaluation or on routing weights, and finite values."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.chapters.losses.judge.loss_rules import CALLED
from moe_conformance.chapters.losses.judge.loss_steps import steps_of
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.verdict import ChangedState, WrongGradient, WrongWeight
from moe_conformance.scenarios.outcome import Outcome


@judge(ChangedState, "loss")
def judge_evaluation(outcome: Outcome) -> Comparisons:
    """Decide whether forwards in evaluation report no loss, and change no bit of later steps.

    Raises:
        ChangedState: they report a loss, or change later steps.
    """
    steps = steps_of(outcome)
    for step in steps:
        for rank in range(outcome.workload.layout.world):
            for place, batch in enumerate(step.batches(rank)):
                if batch.mode == "training":
                    continue
                said = f"rank {rank}: a forward in mode {batch.mode} of {step.name} returned a loss; expected: none"
                returned = step.forwards[rank][place]["loss"] is not None
                yield Comparison(rank, Finding("returned", said, (rank,)) if returned else "", pairs=1)
            for name, value in step.reports[rank].items():
                if not step.trained and float(value) != 0:
                    said = f"rank {rank} reports {CALLED[name]} as {float(value):.6g} after {step.name}"
                    said = f"{said}, in which no forward trains; expected: nothing"
                    yield Comparison(rank, Finding("reported", said, (rank,)))
    trained = [step for step in steps if step.trained]
    for step in trained[1:]:
        for rank in range(outcome.workload.layout.world):
            for name, value in step.reports[rank].items():
                if not torch.equal(value, trained[0].reports[rank].get(name, value + 1)):
                    before = float(trained[0].reports[rank].get(name, torch.tensor(torch.nan)))
                    said = f"rank {rank} reports {CALLED[name]} as {float(value):.9g} after {step.name}"
                    other = f"and as {before:.9g} after {trained[0].name}, of the same microbatches"
                    cause = "forwards in evaluation or without gradients were counted"
                    yield Comparison(rank, Finding("counted", f"{said}, {other}; likely cause: {cause}", (rank,)))
            for layer, (now, then) in enumerate(zip(step.finals[rank], trained[0].finals[rank], strict=True)):
                if now is not None and then is not None and torch.equal(now, then):
                    yield Comparison(rank, elements=now.numel())
                    continue
                said = f"rank {rank}: the gradient of router {layer} has other bits in {step.name}"
                other = f"than in {trained[0].name}, of the same microbatches"
                cause = "forwards in evaluation or without gradients left counts"
                yield Comparison(rank, Finding("bits", f"{said} {other}; likely cause: {cause}", (rank,)))


@judge(WrongWeight, "loss")
def judge_weights_kept(outcome: Outcome) -> Comparisons:
    """Decide whether routing weights with a loss equal, bit for bit, those in evaluation, which has no loss.

    Raises:
        WrongWeight: a weight differs.
    """
    for step in steps_of(outcome):
        for rank in range(outcome.workload.layout.world):
            batches = step.batches(rank)
            for place, batch in enumerate(batches):
                for other, without in enumerate(batches):
                    if batch.mode != "training" or without.mode != "evaluation" or not _same_x(batch.x, without.x):
                        continue
                    sides = (step.forwards[rank][at] for at in (place, other))
                    for with_TK, without_TK in zip(*(side["weights"] for side in sides), strict=True):
                        if torch.equal(with_TK, without_TK):
                            yield Comparison(rank, elements=with_TK.numel())
                            continue
                        off = float((with_TK - without_TK).abs().max())
                        said = f"rank {rank}: routing weights in training differ by {off:.2g} from those in evaluation"
                        cause = "of the same tokens; likely cause: a loss was added to them instead of attached"
                        yield Comparison(rank, Finding("weights", f"{said}, {cause}", (rank,)))


def _same_x(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@judge(WrongGradient, "loss")
def judge_finite(outcome: Outcome) -> Comparisons:
    """Decide whether losses and gradients are finite.

    Raises:
        WrongGradient: a loss or a gradient is not finite.
    """
    for step in steps_of(outcome):
        for rank in range(outcome.workload.layout.world):
            named = {f"the report of {CALLED[name]}": value for name, value in step.reports[rank].items()}
            named |= {f"the gradient of router {layer}": gradient for layer, gradient in enumerate(step.finals[rank])}  # type: ignore[misc]
            for place in step.trained:
                named |= {f"dL/dx of forward {place}": gradient for gradient in step.forwards[rank][place]["dx"]}
            for name, value in named.items():
                if value is not None and bool(torch.isfinite(value).all()):
                    yield Comparison(rank, elements=value.numel())
                    continue
                said = f"rank {rank}: {name} in {step.name} is {'absent' if value is None else 'not finite'}"
                yield Comparison(rank, Finding("finite", said, (rank,)))
