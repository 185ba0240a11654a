"""Judges of overlapped steps, compared with the sequential step of the same layers and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.explain.bounded_gradients import part_name
from moe_conformance.judging.findings import Finding, count, ratio_words
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    Stage,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.overlap import reordered_sum_bound
from moe_conformance.scenarios.outcome import Grad, RankOutcome
from moe_conformance.scenarios.overlapped import OverlapSeen, StepSeen
from moe_conformance.workloads.records.workload import ParameterKey

STEPS = ("the overlapped step", "the overlapped step behind another microbatch")
Which = Literal["first", "second"]


def seen(rank: RankOutcome) -> OverlapSeen:
    """Return what a rank recorded of the overlapped and the sequential steps."""
    assert isinstance(rank.seen, OverlapSeen)
    return rank.seen


def judge_step_tokens(reading: Reading, tally: Tally) -> None:
    """Decide whether y and dL/dx of every microbatch equal those of the sequential step bit for bit.

    Raises:
        AbsentGradient, WrongForm: a tensor is missing, or has another shape.
        WrongOutput, WrongGradient: an element has other bits.
    """
    _judge_outputs(reading, tally)
    _judge_dx(reading, tally)


@judge(WrongOutput, "combine")
def _judge_outputs(reading: Reading) -> Comparisons:
    return _noted(reading, _compare_tokens(reading, "y", lambda step: step.y))


@judge(WrongGradient, "gradient")
def _judge_dx(reading: Reading) -> Comparisons:
    return _noted(reading, _compare_tokens(reading, "dL/dx", lambda step: [grad.value for grad in step.dx_TD]))


def _compare_tokens(
    reading: Reading, name: str, tokens: Callable[[StepSeen], Sequence[Tensor | None]]
) -> Iterator[Comparison]:
    for rank in reading.ranks:
        expected = tokens(seen(rank).sequential)
        for step, words in zip(seen(rank).overlapped, STEPS, strict=True):
            results = tokens(step)
            if len(results) != len(expected):
                returned = f"rank {rank.rank} returns {name} of {len(results)} microbatches in {words}"
                raise WrongForm("combine", f"{returned} instead of {len(expected)}", ranks=(rank.rank,))
            for m, actual in enumerate(results):
                what = f"{name} of microbatch {m} on rank {rank.rank} in {words}"
                yield _same_tokens(what, rank.rank, actual, expected, m)


def _same_tokens(what: str, rank: int, actual: Tensor | None, expected: Sequence[Tensor | None], m: int) -> Comparison:
    """Compare tokens with those of the sequential step; a finding says whether they are another microbatch's."""
    right = expected[m]
    if actual is None or right is None:
        if actual is right:
            return Comparison(rank)
        raise AbsentGradient("gradient", f"{what} is None in one of the two steps", ranks=(rank,))
    if actual.shape != right.shape or actual.dtype != right.dtype:
        shapes = f"{tuple(actual.shape)} {actual.dtype} instead of {tuple(right.shape)} {right.dtype}"
        raise WrongForm("gradient", f"{what} is {shapes}", ranks=(rank,))
    wrong_TD = (actual != right) & ~(actual.isnan() & right.isnan())
    if not bool(wrong_TD.any()):
        return Comparison(rank, elements=actual.numel(), pairs=not actual.numel())
    others = [n for n, other in enumerate(expected) if n != m and other is not None and torch.equal(actual, other)]
    t, d = wrong_TD.nonzero()[0].tolist()
    said = f"is that of microbatch {others[0]}" if others else _unlike(actual, right, wrong_TD, (t, d))
    kind = "not finite" if bool(actual.isnan().any()) else "microbatch" if others else "bits"
    size = float((actual - right).abs().max().nan_to_num(0.0))
    return Comparison(rank, Finding(kind, f"{what} {said}", (rank,), size))


def _unlike(actual: Tensor, right: Tensor, wrong_TD: Tensor, at: tuple[int, int]) -> str:
    values = f"{float(actual[at]):.9g} instead of {float(right[at]):.9g} at token {at[0]}, column {at[1]}"
    return f"differs from the sequential step in {count(int(wrong_TD.sum()), 'element')}: {values}"


class _Compared(NamedTuple):
    """The gradients of a parameter on a rank, of an overlapped and of the sequential step."""

    rank: int
    key: ParameterKey
    actual: Grad
    right: Grad
    added: list[Tensor]  # by microbatch


def judge_step_gradients(reading: Reading, tally: Tally, which: Which, *more: Which, finished: bool) -> None:
    """Decide whether parameters have the same gradients as in the sequential step.

    `which`, and `more`, are the first or the second overlapped step; gradients are compared as a step leaves them, or
    `finished`. With one or two microbatches they are equal bit for bit, with more within the errors of another order of
    summation.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: a parameter or a part of one has no window, or a rank names other ones than before.
        AbsentGradient, WrongForm: a gradient is missing, or has another shape.
        WrongGradient: an element differs by more.
    """
    _require_covered(reading)
    stage: Stage = "finish" if finished else "gradient"
    for step in (which, *more):
        judge(WrongGradient, stage)(_compare_gradients)(reading, tally, ("first", "second").index(step), finished)


def _compare_gradients(reading: Reading, step: int, finished: bool) -> Comparisons:
    gradients = list(_compared(reading, step, finished))
    allowed = {(gradient.rank, gradient.key): _allowed(gradient) for gradient in gradients}

    def bound(gradient: _Compared) -> Tensor:
        of_rank = allowed[gradient.rank, gradient.key]
        if not finished:
            return of_rank
        # the sum over holders has the errors of all of them
        of_holders = [error for (_, key), error in allowed.items() if key == gradient.key]
        return torch.stack([error for error in of_holders if error.shape == of_rank.shape]).sum(0)

    return _noted(reading, (_same(gradient, bound(gradient), STEPS[step], finished) for gradient in gradients))


def _require_covered(reading: Reading) -> None:
    for rank in reading.ranks:
        if rank.uncovered:
            raise Uncovered("gradient", f"'named' on rank {rank.rank}: {rank.uncovered[0]}", ranks=(rank.rank,))


def _compared(reading: Reading, step: int, finished: bool) -> Iterator[_Compared]:
    for rank in reading.ranks:
        right, actual = seen(rank).sequential, seen(rank).overlapped[step]
        before, after = (right.final, actual.final) if finished else (right.local, actual.local)
        if before is None or after is None:
            raise NotOffered("the backend finishes no gradients")
        if before.keys() != after.keys():
            raise Uncovered("gradient", f"'named' yields other parameters after a step on rank {rank.rank}")
        for key, grad in after.items():
            added = [gradients[key] for gradients in seen(rank).added if key in gradients]
            yield _Compared(rank.rank, key, grad, before[key], added)


def _allowed(gradient: _Compared) -> Tensor:
    """Return the error of another order of summation over microbatches, in the dtype of the gradient."""
    value = gradient.right.value if gradient.right.value is not None else gradient.actual.value
    if value is None or not gradient.added:
        return torch.zeros(0 if value is None else value.shape, dtype=torch.float64)
    return reordered_sum_bound(gradient.added, torch.finfo(value.dtype).eps / 2)


def _same(gradient: _Compared, bound: Tensor, step: str, finished: bool) -> Comparison:
    """Compare one gradient with that of the sequential step; an absent one stands for zeros."""
    layer, _, name = gradient.key[0].partition("/")
    whose = f"{part_name((name, gradient.key[1]), gradient.right.shard)} of layer {layer.removeprefix('layer')}"
    what = f"the {'finished ' if finished else ''}gradient of {whose} on rank {gradient.rank} in {step}"
    right = gradient.right.value
    if right is None and gradient.actual.value is None:
        return Comparison(gradient.rank)
    right = torch.zeros_like(gradient.actual.value) if right is None and gradient.actual.value is not None else right
    assert right is not None
    if gradient.actual.value is None and bool(right.any()):
        raise AbsentGradient("gradient", f"{what} is None; the sequential step has a gradient", ranks=(gradient.rank,))
    actual = torch.zeros_like(right) if gradient.actual.value is None else gradient.actual.value
    if actual.shape != right.shape:
        shapes = f"{tuple(actual.shape)} instead of {tuple(right.shape)}"
        raise WrongForm("gradient", f"{what} has the shape {shapes}", ranks=(gradient.rank,))
    off = (actual.double() - right.double()).abs()
    beyond = ~(off <= bound)
    if not bool(beyond.any()):
        return Comparison(gradient.rank, elements=actual.numel(), pairs=not actual.numel())
    at = tuple(beyond.nonzero()[0].tolist())
    values = f"{float(actual[at]):.9g} instead of {float(right[at]):.9g} at {list(at)}"
    cause = _cause(gradient, actual, right)
    kind = "not finite" if bool(actual.isnan().any()) else cause.partition(" ")[0] or "off"
    size = float(off.nan_to_num(0.0).max())
    return Comparison(gradient.rank, Finding(kind, f"{what} is wrong: {values}{cause}", (gradient.rank,), size))


def _cause(gradient: _Compared, actual: Tensor, right: Tensor) -> str:
    """Return a note with the microbatches that would explain a gradient, "" if none do."""
    if not bool(actual.any()):
        return "; likely cause: it was never computed"
    total, found = right.double(), actual.double()
    tolerance = 2.0**-6 if right.dtype.itemsize < 4 else 2.0**-16

    def alike(other: Tensor) -> bool:
        return bool(((found - other).abs() <= tolerance * total.abs().max()).all())

    last = len(gradient.added) - 1
    if last and alike(gradient.added[last]):
        return f"; likely cause: it is that of microbatch {last} alone, which replaced what was there"
    for m, addend in enumerate(gradient.added):
        if not bool(addend.any()):
            continue
        if alike(total - addend):
            return f"; likely cause: that of microbatch {m} is missing"
        if alike(total + addend):
            return f"; likely cause: that of microbatch {m} was added twice"
    square = float(total.flatten() @ total.flatten())
    ratio = float(found.flatten() @ total.flatten()) / square if square else 0.0
    return f"; it is {ratio_words(ratio, {})}" if square and abs(ratio - 1) > tolerance and alike(ratio * total) else ""


def _noted(reading: Reading, comparisons: Iterable[Comparison]) -> Comparisons:
    """Yield comparisons, and a note that a value was read too early, if collective outputs are NaN until the wait."""
    finite = True
    for compared in comparisons:
        finite = finite and all(finding.kind != "not finite" for finding in compared.findings())
        yield compared
    if not finite and reading.outcome.workload.asynchrony == "poisoned":
        yield Note(
            "; likely cause: the output of an asynchronous collective was read before wait(), until which it is NaN"
        )
