"""What the ranks answered to a script, read for the judges, and the judgement that all of them refused a call."""

from __future__ import annotations

from typing import Any

from moe_conformance.judging.diagnosis import some
from moe_conformance.judging.reading import require_finished
from moe_conformance.judging.verdict import Mismatch, Raised, Stage, Tally, Unrefused
from moe_conformance.scenarios.outcome import Answer, Outcome


def answers(outcome: Outcome, call: int) -> tuple[Answer, ...]:
    """Return what every rank answered to a call that may have raised, by rank.

    Raises:
        Raised, Hung, Died: a rank did not finish.
    """
    require_finished(outcome)
    return tuple(rank.answers[call] for rank in sorted(outcome.ranks, key=lambda rank: rank.rank))


def values(outcome: Outcome, call: int, name: str = "") -> tuple[Any, ...]:
    """Return one field of what every rank answered to a call, by rank.

    Raises:
        Raised, Hung, Died: a rank did not finish, or its call raised.
        Mismatch: the answer of a rank has no such data.
    """
    found = []
    for rank, answer in enumerate(answers(outcome, call)):
        method = outcome.workload.calls[call].method
        if answer.raised:
            raise Raised("run", f"{method} raised on rank {rank}: {answer.error_type}: {answer.error}", ranks=(rank,))
        if name not in answer.values:
            raise Mismatch("run", f"the answer of {method} on rank {rank} has no {name or 'data'}", ranks=(rank,))
        found.append(answer.values[name])
    return tuple(found)


def judge_refused(outcome: Outcome, call: int, tally: Tally, *, stage: Stage, asked: str) -> tuple[str, ...]:
    """Require that every rank ended a call with an exception, and return its messages by rank.

    Args:
        outcome: Of a script in which the call may raise.
        call: Its number.
        tally: Counts a pair per rank.
        stage: Where to blame.
        asked: What was wrong with the call, in words that follow "answered".

    Raises:
        Unrefused: some ranks answered.
        Hung: some ranks raised, and others wait for them.
    """
    found = answers(outcome, call)
    answered = [f"rank {rank}" for rank, answer in enumerate(found) if not answer.raised]
    if answered:
        method = outcome.workload.calls[call].method
        raise Unrefused(
            stage,
            f"{method} answered {asked} on {some(answered)}, where every rank should refuse it",
            ranks=tuple(rank for rank, answer in enumerate(found) if not answer.raised),
        )
    for rank in range(len(found)):
        tally.add(pairs=1, rank=rank)
    return tuple(answer.error for answer in found)
