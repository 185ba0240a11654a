"""Judges of experts whose parameters change between calls: outputs and gradients use the present values.

A backend may compute in less precision than the dtype of its rows, which EXPT-01 judges. So the precision of a backend
is measured by the first forward of a script, before any change, and sets the bounds of later ones. Only elements whose
old and new values differ by more than these bounds are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Target, Worst, compare, within
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import SLIPS, answers, judge_no_slip, values
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    Raised,
    Tally,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import Parameters, swiglu_experts
from moe_conformance.reference.fast_paths.choices import equal_counts
from moe_conformance.reference.fast_paths.present import segments
from moe_conformance.reference.rounding.expert_magnitudes import swiglu_measured
from moe_conformance.reference.rounding.magnitudes import magnitudes
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Call, Workload

_NAMES = ("gate", "up", "down")
_LAID = {
    "rows": "every second row",
    "columns": "every second column",
    "transposed": "the transpose",
    "packed": "columns in the middle",
}
# Unit roundoffs with which products may be computed: of the rows' dtype, of TF32 and of bfloat16.
_TF32 = 2.0**-11


@dataclass(frozen=True)
class Forward:
    """One forward of a script on one rank, with the present and the previous values of the parameters."""

    number: int
    rank: int
    call: Call
    given: Mapping[str, Any]
    experts: Sequence[int]  # global ids of this rank's experts
    present: Parameters
    before: Parameters | None  # the previous values, None before the first change
    way: str  # the number of the call that changed them last

    @property
    def modes(self) -> str:
        """The mode of the forward, as messages write it."""
        return f"under {self.call.modes[-1]}" if self.call.modes else "with gradients"

    @property
    def rows(self) -> Tensor:
        """The rows that are passed to the experts."""
        rows_RD: Tensor = self.given["rows_RD"]
        return rows_RD

    def ids(self, counts: Sequence[int] | None = None) -> Tensor:
        """Return the expert of each row, (R,), by the forward's counts or by other counts."""
        return segments(self.given["counts_N"] if counts is None else counts, self.experts)

    def solved(self, parameters: Parameters | None = None, ids_R: Tensor | None = None) -> layer.Gradients:
        """Return the oracle's results for the present parameters and counts, or for others."""
        batch = self._batch(ids_R)
        return layer.gradients(*batch, swiglu_experts, self.present if parameters is None else parameters)

    def errors(self) -> layer.Gradients:
        """Return the largest errors of a correct implementation, to first order."""
        dtype = self.rows.dtype
        return magnitudes(*self._batch(None), swiglu_measured, self.present, rounding=bounds.rounding(dtype))

    def target(self) -> Target:
        """Return the expected output and its bounds."""
        return Target(self.solved().y_TD, self._allowed(self.errors().y_TD))

    def gradient_targets(self) -> dict[str, Target]:
        """Return the expected gradients: of the rows, under "", and of the parameters of this rank's experts."""
        solved, errors = self.solved(), self.errors()
        found = {"": Target(solved.dx_TD, self._allowed(errors.dx_TD))}
        for (name, e), expected in solved.parameters.items():
            if e in self.experts:
                found[f"{name} of expert {e}"] = Target(expected, self._allowed(errors.parameters[name, e]))
        return found

    def _allowed(self, error: Tensor) -> Tensor:
        return bounds.allowed(error, self.rows.dtype, addends=len(self.rows) + self.rows.shape[1])

    def _batch(self, ids_R: Tensor | None) -> layer.Batch:
        ids = self.ids() if ids_R is None else ids_R
        upstream = self.call.upstream[self.rank][""] if self.call.upstream else torch.zeros_like(self.rows)
        return layer.Batch(self.rows, ids[:, None], torch.ones(len(ids), 1), upstream)


def forwards(outcome: Outcome) -> Iterator[Forward]:
    """Yield every forward of a script, by rank and in the order of the calls."""
    workload = outcome.workload
    for rank in range(workload.layout.world):
        present: Parameters = {key: value.double() for key, value in workload.parameters.items()}  # type: ignore[misc]
        before, way = None, ""
        for number, call in enumerate(workload.calls):
            if call.method == "change":
                given = call.given[rank]
                before, way = present, given["way"]
                present = {**present, **{key: value.double() for key, value in given["values"].items()}}
            if call.method == "forward":
                given = call.given[rank]
                yield Forward(number, rank, call, given, _held(workload, rank), present, before, way)


def _held(workload: Workload, rank: int) -> range:
    held = workload.config.experts // workload.layout.ep
    place = next(ranks.index(rank) for ranks in workload.layout.groups()["ep"] if rank in ranks)
    return range(place * held, (place + 1) * held)


# ---- outputs -------------------------------------------------------------------------------------------------


def judge_present(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every forward after a change uses the new values.

    Counts the elements in which the outputs of old and new values differ by more than the bounds.

    Raises:
        WrongForm: an output has another shape or dtype than its rows.
        WrongOutput: an element is not that of the new values, or no forward before the change was right.
    """
    scale: dict[int, float] = {}
    findings = []
    for forward in forwards(outcome):
        y_RD, target = _formed(outcome, forward), forward.target()
        worst = compare(y_RD, *target)
        if forward.before is None:
            scale[forward.rank] = _scale(forward, worst, tally)
            continue
        allowed = Target(target.expected, target.allowed * scale[forward.rank])
        if not (worst := compare(y_RD, *allowed)).holds:
            tally.beyond = max(tally.beyond, worst.size)
            changed = f"{_called(forward)}, after parameters were changed by {forward.way},"
            sentence = f"{changed} gives {worst}{_cause_of_values(forward, y_RD, allowed)}"
            findings.append(Finding(forward.way, f"rank {forward.rank}: {sentence}", (forward.rank,), worst.size))
            continue
        old = forward.solved(forward.before).y_TD
        differing = int(((old - allowed.expected).abs() > 2 * allowed.allowed).sum())
        tally.add(elements=differing, rank=forward.rank, worst=worst.ratio)
    if findings:
        fail(WrongOutput, "experts", findings)


def judge_modes(outcome: Outcome, tally: Tally) -> None:
    """Decide whether outputs with gradients, under no_grad and in inference mode are the same.

    Raises:
        WrongForm, WrongOutput: as `judge_present`.
    """
    _judge_counts(outcome, tally, equal=None)


def judge_unequal(outcome: Outcome, tally: Tally) -> None:
    """Decide whether forwards with unequal or unknown counts apply to every row its own expert.

    A backend may refuse rows without counts, by any exception: most experts get them from their exchange, and are
    judged with what it delivers (EXPT-01).

    Raises:
        NotOffered: all calls without counts raised, one of them an internal error: the experts have no answer to them.
        WrongForm, WrongOutput: as `judge_present`.
        Raised: a call with counts raised.
    """
    _judge_counts(outcome, tally, equal=False)


def _judge_counts(outcome: Outcome, tally: Tally, *, equal: bool | None) -> None:
    """Judge all forwards, or those with equal or unequal counts; the first one with gradients sets the bounds."""
    scale: dict[int, float] = {}
    findings = []
    _require_counts_optional(outcome)
    for forward in forwards(outcome):
        if answers(outcome, forward.number)[forward.rank].raised and _may_be_refused(outcome, forward, tally):
            continue
        y_RD, target = _formed(outcome, forward), forward.target()
        worst = compare(y_RD, *target)
        if forward.rank not in scale and not forward.call.modes and len(y_RD):
            scale[forward.rank] = _scale(forward, worst, tally)
        counts = forward.given["counts_N"] if forward.given.get("known", True) else None
        if equal is not None and equal_counts(counts, len(y_RD)) != equal:
            continue
        allowed = Target(target.expected, target.allowed * scale.get(forward.rank, 1.0))
        worst = compare(y_RD, *allowed, tally, forward.rank)
        tally.add(pairs=1, rank=forward.rank)
        if not worst.holds:
            sentence = f"{_called(forward)} gives {worst}{_cause_of_rows(forward, y_RD, allowed)}"
            findings.append(Finding("counts", f"rank {forward.rank}: {sentence}", (forward.rank,), worst.size))
    if findings:
        fail(WrongOutput, "experts", findings)


def _require_counts_optional(outcome: Outcome) -> None:
    """Raise NotOffered if every call without counts raised, and some an internal error, as of `counts_N.tolist()`."""
    unknown = [forward for forward in forwards(outcome) if not forward.given.get("known", True)]
    raised = [answers(outcome, forward.number)[forward.rank] for forward in unknown]
    slips = [answer for answer in raised if answer.error_type in SLIPS]
    if slips and all(answer.raised for answer in raised):
        why = f"{slips[0].error_type.rpartition('.')[2]}: {slips[0].error}"
        raise NotOffered(f"the experts take no delivery without counts (counts_N is None): {why}")


def _may_be_refused(outcome: Outcome, forward: Forward, tally: Tally) -> bool:
    answer = answers(outcome, forward.number)[forward.rank]
    if answer.error_type in SLIPS and not forward.given.get("known", True):
        return True  # nothing is compared: see _require_counts_optional
    judge_no_slip(outcome, forward.number)
    if not forward.call.may_raise:
        sentence = f"rank {forward.rank}: {_called(forward)} raised {answer.error_type}: {answer.error}"
        raise Raised("experts", sentence, ranks=(forward.rank,))
    tally.add(pairs=1, rank=forward.rank)
    return True


# ---- gradients -----------------------------------------------------------------------------------------------


def judge_gradients(outcome: Outcome, tally: Tally) -> None:
    """Decide whether gradients do not depend on earlier forwards without gradients.

    Raises:
        AbsentGradient: a parameter or the rows have none.
        WrongGradient: an element is not that of the present values.
    """
    absent, wrong = [], []
    scale: dict[int, float] = {}
    for forward in forwards(outcome):
        if answers(outcome, forward.number)[forward.rank].raised and _may_be_refused(outcome, forward, tally):
            continue
        y_RD = _formed(outcome, forward)
        if forward.rank not in scale and len(y_RD):
            scale[forward.rank] = _scale(forward, compare(y_RD, *forward.target()), tally)
        if not forward.call.upstream:
            continue
        found = _gradients_of(outcome, forward)
        targets = {name: target for name, target in forward.gradient_targets().items() if name in found}
        for name, (expected, allowed) in targets.items():
            what, value = f"the gradient of {name or 'the rows'} of {_called(forward)}", found[name]
            if value is None:
                absent.append(
                    Finding(
                        "absent",
                        f"rank {forward.rank}: {what} is None{_cause_of_none(forward, outcome)}",
                        (forward.rank,),
                    )
                )
                continue
            worst = compare(value, expected, allowed * scale[forward.rank], tally, forward.rank)
            if not worst.holds:
                wrong.append(Finding("wrong", f"rank {forward.rank}: {what} is {worst}", (forward.rank,), worst.size))
    if absent:
        fail(AbsentGradient, "gradient", absent)
    if wrong:
        fail(WrongGradient, "gradient", wrong)


def judge_strided(outcome: Outcome, tally: Tally) -> None:
    """Decide whether outputs and gradients do not depend on the strides of rows and upstream gradients.

    A backend may refuse strides.

    Raises:
        AbsentGradient, WrongGradient: as `judge_gradients`.
        WrongForm, WrongOutput: as `judge_present`.
    """
    _judge_counts(outcome, tally, equal=None)
    judge_gradients(outcome, tally)


def _gradients_of(outcome: Outcome, forward: Forward) -> dict[str, Tensor | None]:
    """Return the gradients of the rows, under "", and of the parameters that have a window on this rank."""
    answer = answers(outcome, forward.number)[forward.rank]
    read_later = values(outcome, forward.number + 1)[forward.rank] if _unreduced(outcome) else {}
    return {"": answer.gradients["rows_RD"], **read_later}


def _unreduced(outcome: Outcome) -> bool:
    """Return whether the parameter gradients are of this rank's tokens only, not reduced over replicas in backward."""
    return outcome.workload.layout.edp == 1


def _cause_of_none(forward: Forward, outcome: Outcome) -> str:
    earlier = outcome.workload.calls[: forward.number]
    without = any(call.method == "forward" and call.modes for call in earlier)
    return (
        "; likely cause: weights that a forward without gradients derived and kept have no path to it"
        if without
        else ""
    )


# ---- memory --------------------------------------------------------------------------------------------------


@judge(WrongOutput, "experts")
def judge_memory(outcome: Outcome) -> Comparisons:
    """Decide whether no memory holds the values of replaced weights or of deleted experts.

    Memory that held them before any forward belongs to the caller.

    Raises:
        WrongOutput: there are more tensors with the old values than before.
    """
    numbers = [number for number, call in enumerate(outcome.workload.calls) if call.method == "remains"]
    for rank, at_first in enumerate(values(outcome, numbers[0])):
        for number, when in zip(numbers[1:], ("the weights were replaced", "the experts were deleted"), strict=True):
            found = values(outcome, number)[rank]
            sentence = f"{found - at_first} tensors hold values of the old weights after {when} and one forward"
            wrong = f"rank {rank}: {sentence}; expected none; likely cause: weights derived from them are kept"
            yield Comparison(rank, wrong if found > at_first else "", pairs=1, kind=when)


# ---- words ---------------------------------------------------------------------------------------------------


def _formed(outcome: Outcome, forward: Forward) -> Tensor:
    y_RD: Tensor = values(outcome, forward.number)[forward.rank]
    if y_RD.shape != forward.rows.shape or y_RD.dtype != forward.rows.dtype:
        form = f"{y_RD.dtype} {tuple(y_RD.shape)} instead of {forward.rows.dtype} {tuple(forward.rows.shape)}"
        raise WrongForm("experts", f"rank {forward.rank}: {_called(forward)} gives {form}", ranks=(forward.rank,))
    return y_RD


def _scale(forward: Forward, worst: Worst, tally: Tally) -> float:
    """Return the factor of the bounds in the precision that explains the forward by which later ones are measured.

    Raises:
        WrongOutput: no precision explains it.
    """
    of_rows = bounds.unit_roundoff(forward.rows.dtype)
    for roundoff in (of_rows, _TF32, bounds.unit_roundoff(torch.bfloat16)):
        if roundoff >= of_rows and worst.ratio <= roundoff / of_rows:
            return roundoff / of_rows
    tally.beyond = max(tally.beyond, worst.size)
    sentence = f"rank {forward.rank}: {_called(forward)}, by whose error the others are bounded, gives {worst}"
    raise WrongOutput("experts", sentence, ranks=(forward.rank,))


def _called(forward: Forward) -> str:
    counts = list(forward.given["counts_N"]) if forward.given.get("known", True) else "no counts"
    stride = forward.given.get("stride")
    laid = f", rows as {_LAID[stride]} of a tensor" if stride else ""
    return f"forward {forward.number} {forward.modes} on {counts}{laid}"


def _cause_of_values(forward: Forward, y_RD: Tensor, allowed: Target) -> str:
    """Return which parameters have their previous values, if that explains the output, else ""."""
    assert forward.before is not None  # a change precedes this forward
    for size in (1, 2, 3):  # the fewest parameters that explain it
        for names in combinations(_NAMES, size):
            mixed = {key: (forward.before if key[0] in names else forward.present)[key] for key in forward.present}
            if within(y_RD, forward.solved(mixed).y_TD, allowed.allowed):
                return f"; likely cause: the values of {', '.join(names)} are those of before the change"
    return _cause_of_rows(forward, y_RD, allowed)


def _cause_of_rows(forward: Forward, y_RD: Tensor, allowed: Target) -> str:
    R, N = len(y_RD), len(forward.experts)
    swapped = {"gate": "up", "up": "gate", "down": "down"}
    exchanged = {(swapped[name], e): value for (name, e), value in forward.present.items()}
    if within(y_RD, forward.solved(exchanged).y_TD, allowed.allowed):
        return "; likely cause: gate and up are swapped"
    if R and R % N == 0 and within(y_RD, forward.solved(ids_R=forward.ids([R // N] * N)).y_TD, allowed.allowed):
        return f"; likely cause: every expert was given R / N = {R // N} rows"
    return ""
