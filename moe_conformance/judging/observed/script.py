"""The results of a script's calls on every rank, and the judges of all scripts: refusals and unchanged arguments."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, some
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.verdict import ChangedInput, Mismatch, Raised, Stage, Tally, Unrefused
from moe_conformance.scenarios.outcome import Answer, Outcome
from moe_conformance.workloads.records.workload import Ref

# Errors that a program raises by mistake. An IndexError is not one: many libraries refuse an id by it.
_MISTAKES = (
    *(AttributeError, ImportError, ModuleNotFoundError, NameError),
    *(RecursionError, TypeError, UnboundLocalError, ZeroDivisionError),
)
SLIPS = frozenset(f"builtins.{error.__name__}" for error in _MISTAKES)


def answers(outcome: Outcome, call: int) -> tuple[Answer, ...]:
    """Return the result of a call on every rank; the call may have raised.

    Raises:
        Raised, Hung, Died: a rank did not finish.
    """
    require_finished(outcome)
    return tuple(rank.answers[call] for rank in sorted(outcome.ranks, key=lambda rank: rank.rank))


def values(outcome: Outcome, call: int, name: str = "") -> tuple[Any, ...]:
    """Return one field of the result of a call, by rank.

    Raises:
        Raised, Hung, Died: a rank did not finish, or its call raised.
        Mismatch: the result of a rank has no such field.
    """
    found = []
    method = outcome.workload.calls[call].method
    by_rank = answers(outcome, call)
    raised = tuple(
        Finding("", f"{method} on rank {rank} raised {answer.error_type}: {answer.error}", (rank,))
        for rank, answer in enumerate(by_rank)
        if answer.raised
    )
    if raised:
        mismatch = Raised("run", raised[0].sentence, ranks=raised[0].ranks)
        mismatch.findings = raised
        raise mismatch
    for rank, answer in enumerate(by_rank):
        if name not in answer.values:
            raise Mismatch("run", f"the result of {method} on rank {rank} has no {name or 'data'}", ranks=(rank,))
        found.append(answer.values[name])
    return tuple(found)


def judge_refused(
    outcome: Outcome, call: int, tally: Tally, *, stage: Stage, asked: str, of_a_type: bool = False
) -> tuple[str, ...]:
    """Require that a call raised a refusal on every rank, and return the error messages by rank.

    Args:
        outcome: Of a script in which the call may raise.
        call: The number of the call.
        tally: Counts a pair per rank.
        stage: The stage that a failure names.
        asked: What was wrong with the call, in words that follow "accepted".
        of_a_type: As of `judge_no_slip`.

    Raises:
        Unrefused: the call returned on some ranks.
        Raised: some raised an internal error; see `judge_no_slip`.
        Hung: some ranks raised, and others wait for them.
    """
    judge_no_slip(outcome, call, of_a_type=of_a_type)
    found = answers(outcome, call)
    answered = tuple(rank for rank, answer in enumerate(found) if not answer.raised)
    if answered:
        on = some(f"rank {rank}" for rank in answered)
        sentence = f"{outcome.workload.calls[call].method} accepted {asked} on {on}; expected: an error on every rank"
        raise Unrefused(stage, sentence, ranks=answered)
    for rank in range(len(found)):
        tally.add(pairs=1, rank=rank)
    return tuple(answer.error for answer in found)


def judge_no_slip(outcome: Outcome, call: int, *, of_a_type: bool = False) -> None:
    """Require that no rank raised an internal error in a call, such as a NameError.

    Args:
        outcome: Of a script in which the call may raise.
        call: The number of the call.
        of_a_type: Whether what was wrong with the call is a type: then a `TypeError` refuses it.

    Raises:
        Raised: a rank raised an internal error.
    """
    for rank, answer in enumerate(answers(outcome, call)):
        if answer.error_type in SLIPS and not (of_a_type and answer.error_type == "builtins.TypeError"):
            method = outcome.workload.calls[call].method
            error = f"{answer.error_type}: {answer.error}"
            sentence = f"{method} on rank {rank} raised an internal error instead of refusing the input: {error}"
            raise Raised("run", sentence, ranks=(rank,))


@judge(ChangedInput, "run")
def judge_arguments(outcome: Outcome) -> Comparisons:
    """Decide whether all arguments and upstream gradients of a script hold the bytes that were given.

    This includes the arguments of calls that raised.

    Raises:
        ChangedInput: one of them does not.
        Raised, Hung, Died: a rank did not finish.
    """
    for number, call in enumerate(outcome.workload.calls):
        for rank, answer in enumerate(answers(outcome, number)):
            for name in answer.changed:
                yield Finding(name, f"{call.method}, call {number}, changed {name} of rank {rank} in place", (rank,))
            yield Comparison(rank, pairs=_tensors(tuple(call.given[rank].values())))


def _tensors(given: Any) -> int:
    """Return the number of tensors in an argument; a `Ref` to another result counts 0."""
    if isinstance(given, Tensor):
        return 1
    if is_dataclass(given) and not isinstance(given, Ref):
        return sum(_tensors(getattr(given, field.name)) for field in fields(given))
    return sum(map(_tensors, given)) if isinstance(given, tuple) else 0
