"""Judges of scatter-adds whose output may share memory: bytes, gradients, grad modes, settings and programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.chapters.scatter.judge.scatter import offered
from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.script import answers, judge_no_slip, values
from moe_conformance.judging.verdict import ChangedInput, ChangedState, WrongForm, WrongGradient, WrongOutput
from moe_conformance.reference.scatter.addition import add_routed, records_gradient, scatter_add, scatter_add_bound
from moe_conformance.reference.scatter.memory import in_place_is_lawful, share_bytes, view_of
from moe_conformance.scenarios.outcome import Answer, Outcome
from moe_conformance.workloads.records.memory import Laid, lay
from moe_conformance.workloads.records.workload import Call, Root


def held(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the arguments of a call; two that shared memory share memory in the copies."""
    laid = [value for value in given.values() if isinstance(value, Laid)]
    pair = lay(laid[0].relation, laid[0].memory_M, laid[0].shape) if laid else ()

    def copy(value: Any) -> Tensor:
        if isinstance(value, Laid):
            return pair[("out", "x").index(value.which)]
        return value.leaf.sqrt() if isinstance(value, Root) else value

    return {name: copy(value) for name, value in given.items()}


@judge(WrongOutput, "combine", bytes=ChangedInput)
def judge_routed(outcome: Outcome) -> Comparisons:
    """Decide whether routed rows are added to a shared expert's output, and the layer's input is not changed.

    Raises:
        ChangedInput: x has other bytes.
        WrongOutput: a row is out of its bound.
    """
    for number, call in enumerate(outcome.workload.calls):
        for rank, (y_ND, answer) in enumerate(zip(values(outcome, number), answers(outcome, number), strict=True)):
            given = held(call.given[rank])
            how = f"with out and x {_said(call, rank)}"
            if "x_ND" in answer.changed:
                wrong = f"rank {rank}: add changed x, the input of the layer, {how}; likely cause: it added in place"
                yield Comparison(rank, wrong, kind="bytes")
                continue
            ids_TK = _pairs(given["index_J"], len(given["out_ND"]))
            src_JD = given["src_JD"]
            weights_TK = torch.ones_like(ids_TK, dtype=src_JD.dtype)

            def row(x_RD: Tensor, pair: int, src_JD: Tensor = src_JD) -> Tensor:
                return src_JD[pair].double().expand(len(x_RD), -1)

            expected_ND = add_routed(given["out_ND"], given["x_ND"], ids_TK, weights_TK, row)
            target = Target(expected_ND, _allowed(given))
            yield _within(f"rank {rank}: {how}, the result of add", rank, y_ND, target, "sum")


@judge(ChangedInput, "combine", sum=WrongOutput)
def judge_choice(outcome: Outcome) -> Comparisons:
    """Decide whether in-place addition is chosen only if the output shares no byte with the other arguments.

    If there is nothing to add, the output itself may be returned.

    Raises:
        ChangedInput: an argument was changed, or the result is in the output although that shares bytes with x.
        WrongOutput: a sum is out of its bound.
    """
    for number, call in enumerate(outcome.workload.calls):
        for rank, (y_ND, answer) in enumerate(zip(values(outcome, number), answers(outcome, number), strict=True)):
            given = held(call.given[rank])
            out, x = (view_of(given[name]) for name in ("out_ND", "x_ND"))
            may = in_place_is_lawful(out, x) and not call.differentiable
            written = [name for name in answer.changed if not (may and name == "out_ND")]
            how = f"with out and x {_said(call, rank)}"
            if written:
                said = f"rank {rank}: {how}, add changed {', '.join(written)}; expected: out of place"
                yield Comparison(rank, said if not may else said.partition(";")[0], kind="bytes")
            elif len(given["index_J"]) and not may and answer.memory["out_ND"] != "apart" and share_bytes(out, x):
                wrong = f"rank {rank}: {how}, the result of add lies in out; expected: memory of its own"
                yield Comparison(rank, wrong, kind="lies")
            target = Target(scatter_add(*_sum(given)), _allowed(given))
            yield _within(f"rank {rank}: {how}, the result of add", rank, y_ND, target, "sum")


@judge(WrongGradient, "combine")
def judge_gradients(outcome: Outcome) -> Comparisons:
    """Decide whether out and source rows have the gradients of the out-of-place sum.

    d out and d src are rows of the upstream gradient, without rounding. An operation that saved out before the sum has
    its own gradient: that of a square root may be off by 4 u of its size.

    Raises:
        WrongGradient: a gradient is None or has another value.
    """
    for number, call in enumerate(outcome.workload.calls):
        if not call.upstream:
            continue
        values(outcome, number)
        for rank, answer in enumerate(answers(outcome, number)):
            for name, target in _gradients(call, rank).items():
                gradient = answer.gradients[name]
                said = f"rank {rank}: call {number}, {call.method}: the gradient of {name}"
                if gradient is None:
                    yield Comparison(rank, f"{said} is missing", kind=name)
                else:
                    yield _within(said, rank, gradient, target, name)


def _within(what: str, rank: int, actual: Tensor, target: Target, kind: str) -> Comparison:
    """Compare a tensor with its bounds; the kind is that of the finding."""
    worst = compare(actual, *target)
    wrong = "" if worst.holds else f"{what} is {worst}"
    return Comparison(rank, wrong, pairs=1, elements=actual.numel(), worst=worst.counted, kind=kind)


@judge(WrongOutput, "combine", grad=WrongGradient)
def judge_modes(outcome: Outcome) -> Comparisons:
    """Decide whether all nestings of grad modes give the same bits, and a gradient only where grad is on.

    Raises:
        WrongOutput: other bits than those of the first call.
        WrongGradient: the result requires a gradient where none is recorded, or none where one is.
    """
    first = values(outcome, 0)[0]
    for number, call in enumerate(outcome.workload.calls):
        where = f"under {', then '.join(call.modes) or 'no mode'}"
        for rank, (y_ND, answer) in enumerate(zip(values(outcome, number), answers(outcome, number), strict=True)):
            same = y_ND.shape == first.shape and torch.equal(y_ND.view(torch.int32), first.view(torch.int32))
            words = f"rank {rank}: {where}, {call.method} gives other bits than under no mode"
            yield Comparison(rank, "" if same else words, elements=y_ND.numel(), pairs=1, kind="bits")
            expected = records_gradient(call.modes, [True])
            words = f"rank {rank}: {where}, the result asks for {'a' if answer.differentiable else 'no'} gradient"
            wrong = f"{words}; expected: {'one' if expected else 'none'}" if answer.differentiable != expected else ""
            yield Comparison(rank, wrong, kind="grad")


@judge(ChangedState, "combine")
def judge_setting(outcome: Outcome) -> Comparisons:
    """Decide whether a call does not change the setting of deterministic algorithms, also if it raises.

    Raises:
        ChangedState: the setting differs after the call.
        Raised: valid arguments were refused, or invalid ones raised an internal error.
    """
    for number, call in enumerate(outcome.workload.calls):
        if not call.may_raise:
            values(outcome, number)
        for rank, answer in enumerate(answers(outcome, number)):
            before = (bool(call.modes), call.modes == ("deterministic, warn only",))
            how = "that raised" if answer.raised else "that succeeded"
            left = f"a call of {call.method} {how} left (enabled, warn only) at {answer.deterministic}"
            wrong = f"rank {rank}: {left}; expected: {before}, as before" if answer.deterministic != before else ""
            yield Comparison(rank, wrong, pairs=1, kind=how)


@judge(WrongForm, "combine")
def judge_forms(outcome: Outcome) -> Comparisons:
    """Decide whether results on tensors without data have the shape, dtype and device of those with data.

    Raises:
        WrongForm: the shape, dtype or device differs.
    """
    for number, call in enumerate(outcome.workload.calls):
        for rank, device in enumerate(values(outcome, number, "device given")):
            out_ND = call.given[rank]["out_ND"]
            expected = {"shape": tuple(out_ND.shape), "dtype": out_ND.dtype, "device": device}
            for name, value in expected.items():
                seen = values(outcome, number, name)[rank]
                words = f"rank {rank}: on {call.through} tensors the {name} of the result of {call.method} is {seen}"
                yield Comparison(rank, f"{words}; expected: {value}" if seen != value else "", pairs=1, kind=name)


@judge(WrongOutput, "combine", bytes=ChangedInput, gradient=WrongGradient)
def judge_programs(outcome: Outcome) -> Comparisons:
    """Decide whether a captured or compiled program returns and writes the same bits as the eager call.

    A compiled one may be refused, and its gradients are those of the eager call. Where either call may write the output
    or not, both are right.

    Raises:
        WrongOutput: bits differ.
        ChangedInput: the program changed other arguments.
        WrongGradient: gradients differ.
        Raised: it raised an internal error instead of a refusal.
    """
    for number, call in offered(outcome):
        if not call.through:
            values(outcome, number)
            continue
        if call.may_raise:
            judge_no_slip(outcome, number)
        else:
            values(outcome, number)
        for rank, (eager, other) in enumerate(zip(answers(outcome, number - 1), answers(outcome, number), strict=True)):
            yield Comparison(rank, pairs=1)
            if not other.raised:
                free = {"out_ND"} if "x_ND" in call.given[rank] else set()
                for kind, words in _program(eager, other, free):
                    yield Comparison(rank, f"rank {rank}: {call.method}, {_PROGRAMS[call.through]}, {words}", kind=kind)


_PROGRAMS = {"export": "exported and run", "compile": "compiled as one graph"}


def _program(eager: Answer, other: Answer, free: set[str]) -> Iterator[tuple[str, str]]:
    """Yield how a program differs from the eager call."""
    if not torch.equal(eager.values[""], other.values[""]):
        yield "bits", "gives other values than the eager call"
    if {*eager.changed} - free != {*other.changed} - free:
        names = [", ".join(answer.changed) or "nothing" for answer in (other, eager)]
        yield "bytes", f"changed {names[0]}; the eager call changed {names[1]}"
    for name, gradient in eager.gradients.items():
        seen = other.gradients[name]
        if (gradient is None) != (seen is None) or (
            gradient is not None and seen is not None and not torch.equal(gradient, seen)
        ):
            yield "gradient", f"gives {name} another gradient than the eager call"


def _said(call: Call, rank: int) -> str:
    """Return how the output and the tokens share memory, as messages write it."""
    relation = call.given[rank]["out_ND"].relation
    grad = "grad on" if call.differentiable else "grad off"
    words = {
        "same tensor": "one tensor",
        "view": "views of one tensor",
        "slice": "slices of one tensor",
        "detached": "one tensor, detached",
        "expanded": "expanded from one row",
        "overlapping": "overlapping by all rows but one",
        "disjoint": "disjoint rows of one storage",
        "interleaved": "interleaved columns of one storage",
        "clone": "in memory of their own",
    }
    return f"{words.get(relation, f'overlapping in memory of {relation}')}, {grad}"


def _sum(given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return given["out_ND"], given["index_J"], given["src_JD"]


def _allowed(given: Mapping[str, Tensor]) -> Tensor:
    return scatter_add_bound(*_sum(given), unit_roundoff(given["out_ND"].dtype))


def _pairs(index_J: Tensor, tokens: int) -> Tensor:
    """Return the source rows of every token, (T, K), -1 where it has fewer than K; pair j belongs to expert j."""
    of_T = [(index_J == t).nonzero()[:, 0].tolist() for t in range(tokens)]
    K = max(map(len, of_T), default=0)
    return torch.tensor([sources + [-1] * (K - len(sources)) for sources in of_T], dtype=torch.int64).view(tokens, K)


def _gradients(call: Call, rank: int) -> dict[str, Target]:
    """Return the expected gradient of every argument that requires one, in float64, and its allowed error."""
    given = call.given[rank]
    leaves = {
        name: (value.leaf if isinstance(value, Root) else value).double().requires_grad_(name in call.differentiable)
        for name, value in {**held(given), **given}.items()
        if name in ("out_ND", "src_JD") and not isinstance(value, Laid)
    }
    out_ND = leaves.get("out_ND", held(given)["out_ND"])
    made_ND = out_ND.sqrt() if isinstance(given["out_ND"], Root) else out_ND
    y_ND = scatter_add(made_ND, given["index_J"], leaves["src_JD"])
    y_ND.backward(call.upstream[rank][""].double())
    found = {}
    for name in call.differentiable:
        expected = leaves[name].grad
        assert expected is not None, name
        u = unit_roundoff(call.upstream[rank][""].dtype)
        rounded = isinstance(given[name], Root)  # all others are rows of the upstream gradient
        found[name] = Target(expected, 4 * u * expected.abs() if rounded else torch.zeros_like(expected))
    return found
