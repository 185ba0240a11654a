"""Judges of scatter-adds of rows: the sums, determinism, and changed arguments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_conformance.contract import Unsupported
from moe_conformance.judging.compare.bounded import Target, compare, too_narrow, within
from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import ChangedInput, WrongForm, WrongOutput
from moe_conformance.reference.scatter.addition import scatter_add, scatter_add_bound
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Call

IN_PLACE = "add_"
_UNSUPPORTED = f"{Unsupported.__module__}.{Unsupported.__qualname__}"


def offered(outcome: Outcome) -> Iterator[tuple[int, Call]]:
    """Yield the calls of a script by number, without in-place ones that no rank offers."""
    for number, call in enumerate(outcome.workload.calls):
        kinds = {answer.error_type for answer in answers(outcome, number)}
        if call.method != IN_PLACE or kinds != {_UNSUPPORTED}:
            yield number, call


@judge(WrongOutput, "combine")
def judge_sums(outcome: Outcome) -> Comparisons:
    """Decide whether every row of a result is its output row plus the source rows whose index names it.

    A row that no index names must keep its bits, including the sign of a zero.

    Raises:
        WrongForm: the result has another shape or dtype than out.
        WrongOutput: a sum is out of its bound, or a row that no index names has other bits.
    """
    for number, call in offered(outcome):
        for rank, y_ND in enumerate(values(outcome, number)):
            given = call.given[rank]
            out_ND, index_J, src_JD = given["out_ND"], given["index_J"], given["src_JD"]
            if y_ND.shape != out_ND.shape or y_ND.dtype != out_ND.dtype:
                form = f"{y_ND.dtype} {tuple(y_ND.shape)} instead of {out_ND.dtype} {tuple(out_ND.shape)}"
                raise WrongForm("combine", f"rank {rank}: the result of {call.method} is {form}", ranks=(rank,))
            allowed_ND = scatter_add_bound(out_ND, index_J, src_JD, unit_roundoff(out_ND.dtype))
            target = Target(scatter_add(out_ND, index_J, src_JD), allowed_ND)
            worst = compare(y_ND, *target)
            if not worst.holds:
                cause = _cause(y_ND, out_ND, index_J, src_JD, target)
                yield _wrong(rank, f"the result of {call.method} is {worst}{cause}", worst.counted)
                continue
            yield Comparison(rank, pairs=1, elements=y_ND.numel(), worst=worst.ratio)
            unnamed_N = torch.bincount(index_J, minlength=len(out_ND)) == 0
            if (other := _other_bits(y_ND[unnamed_N], out_ND[unnamed_N])) is not None:
                row = int(unnamed_N.nonzero()[other, 0])
                said = f"the result of {call.method} has other bits than out in row {row}, which no index names"
                yield _wrong(rank, f"{said}; likely cause: zeros were added to it")


@judge(WrongOutput, "combine")
def judge_bits(outcome: Outcome) -> Comparisons:
    """Decide whether all calls, which have the same inputs, return the same bits on every rank.

    Raises:
        WrongOutput: a call gave other bits than the first one of rank 0.
    """
    first = values(outcome, 0)[0]
    for number, call in offered(outcome):
        for rank, y_ND in enumerate(values(outcome, number)):
            if (row := _other_bits(y_ND, first)) is not None:
                said = f"call {number}, {call.method}, gives other bits in row {row} than call 0 of rank 0"
                yield _wrong(rank, f"{said}, on the same inputs; likely cause: the order of addition varies")
            yield Comparison(rank, elements=y_ND.numel(), pairs=1)


@judge(ChangedInput, "combine")
def judge_memory(outcome: Outcome) -> Comparisons:
    """Decide whether `add` changes none of its arguments, and `add_` its output only.

    Raises:
        ChangedInput: another argument was changed, the result of `add` shares memory with an argument, or that of
            `add_` is another tensor than its output.
        Raised: a call raised.
    """
    for number, call in offered(outcome):
        values(outcome, number)  # a call that raised has no result
        writes = {"out_ND"} if call.method == IN_PLACE else set()
        for rank, answer in enumerate(answers(outcome, number)):
            for name in answer.changed:
                if name not in writes:
                    yield _wrong(rank, f"{call.method} changed {name}; expected: its bytes as before")
            if call.method == IN_PLACE and answer.memory["out_ND"] != "same tensor":
                yield _wrong(rank, f"{IN_PLACE} returned another tensor instead of out_ND itself")
            shared = [name for name, lies in answer.memory.items() if lies != "apart" and name not in writes]
            if shared:
                yield _wrong(rank, f"the result of {call.method} shares memory with {', '.join(shared)}")
            yield Comparison(rank, pairs=len(call.given[rank]))


def _wrong(rank: int, sentence: str, worst: float = 0.0) -> Comparison:
    return Comparison(rank, f"rank {rank}: {sentence}", worst=worst, kind=sentence.partition(" ")[0])


def _cause(y_ND: Tensor, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, target: Target) -> str:
    """Return the likely cause of a wrong sum as a note, "" if none is recognised."""
    last_ND = out_ND.double().index_put((index_J,), out_ND.double()[index_J] + src_JD.double())
    causes = {
        "of source rows that name the same row one alone was added": last_ND,
        "out was not added": target.expected - out_ND.double(),
    }
    found = [words for words, guess in causes.items() if within(y_ND, guess, target.allowed)]
    narrow = too_narrow(y_ND, target, out_ND.dtype)
    cause = found[0] if found else narrow
    return f"; likely cause: {cause}" if cause else ""


def _other_bits(one_ND: Tensor, other_ND: Tensor) -> int | None:
    """Return the first row in which the bits of two tensors of one dtype differ, or None."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one_ND.element_size()]
    off_N = (one_ND.contiguous().view(bits) != other_ND.contiguous().view(bits)).any(1)
    return int(off_N.nonzero()[0, 0]) if bool(off_N.any()) else None
