"""Judges of what a trainer reports of its steps: the loss, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_conformance.chapters.training.judge.expected import Expected
from moe_conformance.chapters.training.judge.mistakes import mean_of_norms, norm_of
from moe_conformance.judging.compare.bounded import compare, compared, factor
from moe_conformance.judging.compare.bounds import allowed
from moe_conformance.judging.comparisons import Comparisons, judge
from moe_conformance.judging.findings import Finding, ratio_names, ratio_words
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import Deviation, NotOffered, WrongGradient, WrongLoss
from moe_conformance.reference.gradients.norms import legal_norms
from moe_conformance.reference.training.model import Key
from moe_conformance.scenarios.outcome import Outcome

_NEAR = 1e-4  # relative: how near a norm is to that of a mistake


@judge(WrongLoss, "loss")
def judge_loss(outcome: Outcome) -> Comparisons:
    """Decide whether the reported loss of every step is the mean over its counted tokens, on every rank.

    Raises:
        WrongLoss: it is not.
    """
    expected = Expected.of(outcome)
    names = ratio_names({**outcome.workload.layout.sizes()})
    for step, each in enumerate(expected.steps):
        error = allowed(expected.errors[step].loss, outcome.workload.config.dtype, addends=1)
        for rank, loss in enumerate(values(outcome, step, "loss")):
            worst = compare(loss.double(), each.loss, error)
            said = f"rank {rank} reports as the loss of step {step} {worst}"
            times = _factor(loss, each.loss, error, names)
            if not worst.holds:
                said += _cause_of_loss(expected, step, rank, loss, error) or (times and f"; it is {times}")
            yield compared(rank, worst, "loss", said, 1, Deviation("loss", worst.size, f"step {step}", times))


def _factor(actual: Tensor, expected: Tensor, error: Tensor, names: Mapping[str, float]) -> str:
    """Return in words the factor by which a number is wrong; "" if no size of the run has that value."""
    ratio = factor(actual.double().reshape(1), expected.reshape(1), error.reshape(1), names)
    return ratio_words(ratio, names) if ratio is not None and ratio in names.values() else ""


def _cause_of_loss(expected: Expected, step: int, rank: int, loss: Tensor, error: Tensor) -> str:
    """Return what explains a wrong loss, in words."""
    places = expected.places(step)
    own = [place for place in places if place[1] == rank]
    n = int(expected.tokens(step).counted_T.sum())
    means = [expected.graded(step, [place]).loss for place in places]
    guesses = {
        "only the tokens of this rank are in it": expected.graded(step, own, divisor=n).loss,
        "it is the mean over the tokens of this rank alone": expected.graded(step, own).loss,
        "it is the mean of the means of microbatches and ranks": torch.stack(means).mean(),
    }
    for words, guess in guesses.items():
        if bool((loss.double() - guess).abs() <= error):
            return f"; likely cause: {words}"
    return ""


@judge(WrongGradient, "finish")
def judge_norm(outcome: Outcome) -> Comparisons:
    """Decide whether the reported norm of every step is that of the whole gradient, the same on all ranks.

    Raises:
        WrongGradient: it is not.
        NotOffered: the trainer reports no norm.
    """
    expected = Expected.of(outcome)
    if all(norm is None for step in range(len(expected.steps)) for norm in values(outcome, step, "norm")):
        raise NotOffered("the trainer reports no norm of its gradients")
    names = ratio_names({**outcome.workload.layout.sizes()})
    for step, each in enumerate(expected.steps):
        norms = values(outcome, step, "norm")
        if lacking := tuple(rank for rank, norm in enumerate(norms) if norm is None):
            yield Finding("absent", f"rank {lacking[0]} reports no norm of step {step}, and others do", lacking)
            continue
        told = [float(norm) for norm in norms]
        if not legal_norms(told, abs(told[0])):
            said = ", ".join(f"{norm:.9g}" for norm in told)
            ranks = tuple(range(len(told)))
            yield Finding("ranks", f"ranks report different norms of the gradient of step {step}: {said}", ranks)
        error = allowed(expected.errors[step].norm, outcome.workload.config.dtype, addends=1)
        for rank, norm in enumerate(norms):
            worst = compare(norm.double(), each.norm, error)
            said = f"rank {rank} reports as the norm of the gradient of step {step} {worst}"
            causes = [] if worst.holds else _causes_of_norm(expected, step, rank, told[rank])
            said += f"; likely cause: {causes[0]}" if causes else ""
            times = _factor(norm, each.norm, error, names)
            yield compared(rank, worst, "norm", said, 1, Deviation("norm", worst.size, f"step {step}", times))


def _causes_of_norm(expected: Expected, step: int, rank: int, norm: float) -> list[str]:
    """Return what explains a wrong norm, in words."""
    found = [words for words, other in _other_norms(expected, step, rank) if abs(norm - other) <= _NEAR * other]
    sharded = expected.workload.config.training.sharded_state
    if not found and sharded and norm > float(expected.steps[step].norm):
        found.append("it has more in it than the gradients, such as the padding of shards")
    return found


def _other_norms(expected: Expected, step: int, rank: int) -> Iterator[tuple[str, float]]:
    """Yield the norms that mistakes would give."""
    whole = expected.graded(step).gradients
    held = {key: g for key, g in whole.items() if key[1] is None or _holds(expected, rank, key)}
    yield "it is the norm of clipped gradients", norm_of(expected.steps[step].clipped)
    yield "it is the norm of dense gradients alone", norm_of(whole, expert_times=0)
    yield "it is the norm of expert gradients alone", norm_of(whole, dense_times=0)
    yield "of experts, only those of this rank are in it", norm_of(held)
    if expected.workload.layout.ep > 1:
        yield "it is the mean of the ranks' norms", mean_of_norms(expected, whole)
    for size, names in expected.axes().items():
        yield f"experts are counted {size} times in it: {names}", norm_of(whole, expert_times=size)
        yield f"experts are counted {size} times too little in it: {names}", norm_of(whole, expert_times=1 / size)
        yield f"dense parameters are counted {size} times in it: {names}", norm_of(whole, dense_times=size)
        yield f"it is {size} times as large as it should be: {names}", size * norm_of(whole)
    yield "it was taken before gradients were summed over ranks", _norm_before(expected, step)


def _norm_before(expected: Expected, step: int) -> float:
    """Return the norm of all ranks' gradients, each distinct element once, where each has those of its own tokens."""
    n, layout = int(expected.tokens(step).counted_T.sum()), expected.workload.layout
    total = 0.0
    for rank in range(layout.world):
        group = next(ranks for ranks in layout.groups()["ep_etp"] if rank in ranks)
        own, near = ([place for place in expected.places(step) if place[1] in ranks] for ranks in ((rank,), group))
        dense = expected.graded(step, own, divisor=n).gradients
        experts = expected.graded(step, near, divisor=n).gradients
        held = {key: g for key, g in experts.items() if key[1] is not None and _holds(expected, rank, key)}
        total += norm_of({key: g for key, g in dense.items() if key[1] is None}) ** 2 / layout.world
        total += norm_of(held) ** 2 / (layout.edp * layout.etp)
    return float(total**0.5)


def _holds(expected: Expected, rank: int, key: Key) -> bool:
    layout = expected.workload.layout
    ranks = next(group for group in layout.groups()["ep"] if rank in group)
    assert key[1] is not None
    return key[1] // (expected.workload.config.experts // layout.ep) == ranks.index(rank)
