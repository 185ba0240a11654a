"""Comparison of a run with equivalent runs: results that the spec requires to be equal, differences by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import note_beyond
from moe_conformance.judging.comparisons import Comparisons, Start, judge
from moe_conformance.judging.explain.row_identity import likeness
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading, read, tokens_of
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.equivalence.deliveries import judge_same_deliveries
from moe_conformance.judging.shared.equivalence.parameters import judge_same_parameters
from moe_conformance.judging.shared.experts.expected import ExpertsExpected
from moe_conformance.judging.shared.experts.experts import expected_of
from moe_conformance.judging.verdict import (
    ChangedInput,
    Mismatch,
    NotOffered,
    Stage,
    Tally,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.scenarios.outcome import Microbatch, Outcome, RankOutcome
from moe_conformance.workloads import laws
from moe_conformance.workloads.twins import Rows, Twin, picked


@dataclass(frozen=True)
class Ran:
    """An equivalent run and its outcome, or the reason why it was not run."""

    twin: Twin
    outcome: Outcome | None
    why_not: str = ""


class RunTwins(Protocol):
    """Runs equivalent runs for a check."""

    @property
    def variants(self) -> Sequence[str]:
        """All variants of the backend."""

    def __call__(self, twins: Sequence[Twin]) -> list[Ran]:
        """Run equivalent runs on the ranks of the original, one after the other."""


class Sides(NamedTuple):
    """A run, an equivalent run of it, and the reading of the equivalent run."""

    original: Reading
    twin: Twin
    other: Reading


def judge_alike(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether every equivalent run gives the same y, dx, dweights and finished parameter gradients.

    Equal are every byte where the equivalent run requires it, else every value with the suite's experts, which are
    exact; with the backend's own experts every element agrees within the rounding errors of both runs. Inputs and
    process state that the original did not change are not changed by the equivalent run; nor are outputs and gradients,
    if the order of microbatches is the same.

    Raises:
        NotOffered: the backend ran none of the equivalent runs.
        ChangedInput: something was overwritten that the original did not change.
        WrongForm, WrongDelivery, WrongOutput, AbsentGradient, WrongGradient: something differs.
        Raised, Hung, Died, RunFailed: the equivalent run did not finish, or was refused what the run was built with.
    """
    for twin_run in those_that_ran(ran):
        sides = Sides(reading, twin_run.twin, read_twin(twin_run))
        _judge_left_alone(sides, tally)
        if twin_run.twin.bits and not twin_run.twin.partial:
            judge_same_deliveries(sides.original, tally, sides.twin, sides.other)
        for judged in _JUDGED:
            _judge_tokens(sides, judged, tally)
        if twin_run.twin.finals and reading.outcome.workload.parameters:
            judge_same_parameters(*sides, tally)


def judge_repeated(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide `judge_alike` of the first equivalent run, and of all others compared with the first.

    Raises:
        NotOffered: the first was not run, or none of the others.
        As `judge_alike`.
    """
    first, *others = ran
    judge_alike(reading, [first], tally)
    judge_alike(read_twin(first), others, tally)


def judge_recomputed_steps(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide `judge_alike` of the second equivalent run compared with the first, and of all further ones.

    The further ones are compared with the original.

    Raises:
        NotOffered: the first was not run, and there are no further ones.
        As `judge_alike`.
    """
    first, second, *others = ran
    if first.outcome is not None:
        judge_alike(read_twin(first), [second], tally)
    elif not others:
        raise NotOffered(first.why_not)
    if others:
        judge_alike(reading, others, tally)


def judge_same_answers(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether y of every token agrees with the original within the rounding errors of both runs.

    Raises:
        NotOffered: the backend ran none of the equivalent runs.
        WrongForm, WrongOutput: an element differs.
        Raised, Hung, Died, RunFailed: the equivalent run did not finish, or was refused what the run was built with.
    """
    for twin_run in those_that_ran(ran):
        _judge_tokens(Sides(reading, twin_run.twin, read_twin(twin_run)), _JUDGED[0], tally)


def judge_same_gradients(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether dx and the finished parameter gradients equal those of the original to the bit; y may differ.

    Raises:
        NotOffered: the backend ran none of the equivalent runs.
        WrongForm, AbsentGradient, WrongGradient: something differs.
        Raised, Hung, Died, RunFailed: the equivalent run did not finish, or was refused what the run was built with.
    """
    for twin_run in those_that_ran(ran):
        sides = Sides(reading, twin_run.twin, read_twin(twin_run))
        _judge_tokens(sides, _JUDGED[1], tally)
        judge_same_parameters(*sides, tally)


def those_that_ran(ran: Sequence[Ran]) -> list[Ran]:
    """Return the equivalent runs that have an outcome.

    Raises:
        NotOffered: no equivalent run has an outcome.
    """
    present = [twin_run for twin_run in ran if twin_run.outcome is not None]
    if not present:
        raise NotOffered(
            "; ".join(f"{twin_run.twin.how}: {twin_run.why_not}" for twin_run in ran)
            or "there is no run to compare with"
        )
    return present


def judge_scaled(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide `judge_alike` of runs with other weights, unless weights are applied before the experts.

    Raises:
        NotOffered: the backend applies weights at the experts' input.
    """
    if any("input" in of_rank for of_rank in reading.applied):
        raise NotOffered("weights are applied at the experts' input, in which the experts' output is not linear")
    judge_alike(reading, ran, tally)


def judge_across(reading: Reading, twins: RunTwins, tally: Tally) -> None:
    """Decide `judge_alike` of runs through other exchanges of the backend that apply weights at the same place.

    Raises:
        NotOffered: there is no such exchange.
    """

    def side(outcome: Outcome) -> bool:
        return any(rank.weights_at == "input" for rank in outcome.ranks)

    comparable = [
        replace(twin_run, outcome=None, why_not="it applies weights at the experts' other end (input or output)")
        if twin_run.outcome is not None and side(twin_run.outcome) != side(reading.outcome)
        else twin_run
        for twin_run in twins(laws.exchanged(reading.outcome.workload, twins.variants))
    ]
    judge_alike(reading, comparable, tally)


def read_twin(ran: Ran) -> Reading:
    """Return the reading of an equivalent run; the message of a failure states how that run differs."""
    assert ran.outcome is not None
    try:
        return read(ran.outcome)
    except Mismatch as mismatch:
        raise mismatch.retold(start=f"run {ran.twin.how}, ") from mismatch


# ---- what is left alone --------------------------------------------------------------------------------------------


@judge(ChangedInput, "run")
def _judge_left_alone(sides: Sides) -> Comparisons:
    """Decide whether the equivalent run changed no memory or state that the original did not change on any rank.

    Outputs and gradients are compared only if the order of microbatches is the same: GRAD-07 decides the other orders.
    """
    handed_out = sides.twin.workload.schedule == sides.original.outcome.workload.schedule
    known = {name for rank in sides.original.ranks for name in _changed(rank, handed_out)}
    yield Start(f"run {sides.twin.how}, ")
    for rank in sides.other.ranks:
        for name in _changed(rank, handed_out):
            words = f"{name} is overwritten on rank {rank.rank}; in the original run it is unchanged"
            if name not in known:
                yield Finding(name, words, (rank.rank,))


def _changed(rank: RankOutcome, handed_out: bool) -> Iterator[str]:
    """Yield the names of what changed on a rank: state and inputs, with `handed_out` also outputs and gradients."""
    yield from rank.state_changed
    for seen in rank.microbatches:
        yield from seen.inputs_changed
        if handed_out:
            yield from seen.outputs_changed
            yield from (f"the gradient of {name}" for name in seen.gradients_changed)


# ---- tokens --------------------------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    """A result that has one row per token, and how it is judged."""

    name: str
    error: type[Mismatch]
    value: Callable[[Microbatch], Tensor | None]
    allowed: Callable[[ExpertsExpected, Place], Tensor]
    of_input: str = ""  # the input that the gradient belongs to

    @property
    def backward(self) -> bool:
        """Whether the result is computed by a backward."""
        return bool(self.of_input)


_JUDGED = (
    _Judged("y", WrongOutput, lambda seen: seen.y, lambda own, at: own.y(at).allowed),
    _Judged("dx", WrongGradient, lambda seen: seen.dx_TD.value, lambda own, at: own.dx(at).allowed, "x"),
    _Judged(
        name="dweights",
        error=WrongGradient,
        value=lambda seen: seen.dweights_TK.value,
        allowed=lambda own, at: own.dweights(at).allowed,
        of_input="weights",
    ),
)


def _judge_tokens(sides: Sides, judged: _Judged, tally: Tally) -> None:
    findings = list(_differences(sides, judged, tally))
    if not findings:
        return
    bounded = bool(sides.original.outcome.workload.parameters)
    stage: Stage = "gradient" if judged.backward else "experts" if bounded else "combine"
    fail(judged.error, stage, findings, start=f"run {sides.twin.how}, ")


def _differences(sides: Sides, judged: _Judged, tally: Tally) -> Iterator[Finding]:
    """Yield a finding for every token that differs, and count the others."""
    known = list[list[Tensor | None]]()
    for m, batches in enumerate(sides.original.batches):
        known.append([judged.value(sides.original.seen(m, rank)) for rank in range(len(batches))])
    for m, ranks in enumerate(sides.twin.origin):
        if judged.backward and not sides.other.goes_backward(m):
            continue
        for rank, rows in enumerate(ranks):
            actual = judged.value(sides.other.seen(m, rank))
            if judged.of_input in sides.twin.workload.twist.unasked:
                if actual is not None:
                    wrong = f"{judged.name} of rank {rank} is a tensor instead of None"
                    yield Finding("not required", f"{wrong}: its input does not require grad", (rank,))
                continue
            was = _expected(rows, known, judged.name)
            whose = f"{judged.name} of rank {rank}" + (f" in microbatch {m}" if len(sides.twin.origin) > 1 else "")
            if actual is None or was is None:
                if (actual is None) != (was is None) and len(rows.source_T3):
                    now, then = ("None", "a tensor") if actual is None else ("a tensor", "None")
                    yield Finding("absent", f"{whose} is {now} instead of {then} in the original run", (rank,))
                continue
            if (actual.shape, actual.dtype) != (was.shape, was.dtype):
                forms = f"{tuple(actual.shape)} of {actual.dtype} instead of {tuple(was.shape)} of {was.dtype}"
                sentence = f"run {sides.twin.how}, {whose} has the shape {forms} in the original run"
                raise WrongForm("combine", sentence, ranks=(rank,))
            differs = _differs(sides, judged, (m, rank), actual, was, tally)
            for t in differs.any(1).nonzero().flatten().tolist():
                yield _finding(sides, judged.name, (m, rank, t), actual, was, differs[t], known)
            if not bool(differs.any()):
                tally.add(elements=actual.numel(), rank=rank)
                if not sides.twin.bits:
                    tally.of_two_runs += actual.numel()
                    tally.other_bits += int((_as_integers(actual) != _as_integers(was)).sum())


def _expected(rows: Rows, known: Sequence[Sequence[Tensor | None]], name: str) -> Tensor | None:
    """Return the rows of the original that an equivalent run's rows must equal; None if one of them is None."""
    values = [[value for value in ranks if value is not None] for ranks in known]
    if any(known[m][rank] is None for m, rank, _ in rows.source_T3.tolist()) or not any(values):
        return None
    filled = [[torch.empty(0, 0) if value is None else value for value in ranks] for ranks in known]
    like = next(value for ranks in values for value in ranks)
    was = picked(rows.source_T3, filled) if len(rows.source_T3) else like[:0]
    if name == "dweights":
        return was.gather(1, rows.slots_TK)
    return torch.ldexp(was.double(), rows.powers_T[:, None]).to(was.dtype)


def _differs(sides: Sides, judged: _Judged, place: Place, actual: Tensor, was: Tensor, tally: Tally) -> Tensor:
    """Return a mask of the elements that differ by more than the spec allows; the tally records bounded errors."""
    if sides.twin.bits:
        return _as_integers(actual) != _as_integers(was)
    if not sides.original.outcome.workload.parameters:
        return actual.double() != was.double()
    off = (actual.double() - was.double()).abs()
    if not bool((off != 0).any()):  # no need for bounds, which cost more than everything else here
        return torch.zeros_like(off, dtype=torch.bool)
    m, rank = place
    rows = sides.twin.origin[m][rank]
    before = expected_of(sides.original)
    world = range(len(sides.original.ranks))
    ours = [[judged.allowed(before, (m0, r)) for r in world] for m0 in range(len(sides.original.batches))]
    allowed = picked(rows.source_T3, ours) if len(rows.source_T3) else torch.zeros_like(was, dtype=torch.float64)
    if judged.name == "dweights" and len(rows.source_T3):
        allowed = allowed.gather(1, rows.slots_TK)
    allowed = allowed + judged.allowed(expected_of(sides.other), place)
    note_beyond(tally, actual, was.double(), allowed)
    return ~(off <= allowed)


def _as_integers(values: Tensor) -> Tensor:
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(widths[values.element_size()])


def _finding(
    sides: Sides,
    name: str,
    at: tuple[int, int, int],
    actual: Tensor,
    was: Tensor,
    differs: Tensor,
    known: Sequence[Sequence[Tensor | None]],
) -> Finding:
    """Return a finding about one token: its worst element, and the known row that it resembles."""
    m, rank, t = at
    source = tuple(sides.twin.origin[m][rank].source_T3[t].tolist())
    off = torch.nan_to_num((actual[t].double() - was[t].double()).abs(), nan=torch.inf) * differs
    worst = int(off.argmax()) if bool((off > 0).any()) else int(differs.nonzero()[0])
    unit = "slot" if name == "dweights" else "column"
    of_m = f" of microbatch {m}" if len(sides.twin.origin) > 1 else ""
    where = f" (rank {source[1]} token {source[2]} of microbatch {source[0]})" if source != at else ""
    sentence = (
        f"{name} of rank {rank} token {t}{of_m} in {unit} {worst} is {_number(actual[t, worst], was[t, worst])} "
        f"instead of {_number(was[t, worst], actual[t, worst])} in the original run{where}"
    )
    if name != "dweights" and all(value is not None for ranks in known for value in ranks):
        rows, names = tokens_of(sides.original, known)  # type: ignore[arg-type]  # no element is None
        said = likeness(actual[t], rows, names)
        name_of_source = f"rank {source[1]} token {source[2]}"
        if name_of_source not in said and not said.startswith("no token's"):
            sentence += f": it is {said}"
    return Finding(f"{name} differs", sentence, (rank,), float(off[worst]))


def _number(value: Tensor, other_value: Tensor) -> str:
    """Return a number as text that differs from the text of the other number, if the numbers differ."""
    one, other = float(value), float(other_value)
    return f"{one:.{6 if f'{one:.6g}' != f'{other:.6g}' else 17}g}"
