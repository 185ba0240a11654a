"""Repeats a failed check on new ranks: if it then ends with another verdict it is unstable, which fails the run.

The repeat is for diagnosis only. It never makes a run pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_conformance.engine import NO_ANSWER, EngineError
from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plugin.outcomes import Kept, Outcomes
from moe_conformance.plugin.recording import advised, excused
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.plan import Case


class CannotRepeat(Exception):
    """The check has set no judge, so that its outcome cannot be judged again."""


def looked_again(
    run: Run,
    outcomes: Outcomes,
    item: pytest.Item,
    trial: Trial,
    ended: Ending,
    case: Case | None,
    judge: Callable[[Kept], Ending],
) -> Ending:
    """Return how a failed check ended, or that it is unstable: a repeat on new ranks had another verdict.

    A failure is not repeated if a waiver names it, a bug is planted, it does not fail the run, or it was a hang until
    the deadline.

    Args:
        run: What is judged.
        outcomes: Runs the repeat.
        item: The check's node.
        trial: Its trial.
        ended: How it ended at first.
        case: What it reads; None if it draws.
        judge: Returns how it ends on another outcome.
    """
    if ended.verdict not in ("fail", "crash", "hang") or trial.outcome is None or run.options.plant:
        return ended
    if ended.verdict == "hang" and NO_ANSWER in ended.message:
        return ended
    requirements = ended.violated or trial.requirements
    if advised(run, requirements, ended) or excused(run, item, trial, ended):
        return ended
    failed = next((mismatch.outcome for mismatch in ended.failed), None) or trial.outcome
    try:
        kept = outcomes.again(case, failed.workload)
        return ended if kept is None else compared(ended, judge(kept))
    except (CannotRepeat, EngineError):
        return ended


def drawn_again(failed: Trial, outcome: Outcome) -> Ending:
    """Return how a check that draws workloads ends on another outcome of the workload that failed.

    Raises:
        CannotRepeat: the check has set no judge.
    """
    if failed.judge is None:
        raise CannotRepeat(failed.check)
    trial = Trial(failed.requirements, failed.check, failed.cell, outcome=outcome, tally=failed.tally)
    try:
        failed.judge(outcome)
    except Mismatch as mismatch:
        mismatch.outcome = outcome
        return ending(trial, mismatch)
    except Exception as error:
        return ending(trial, error)
    return ending(trial, None)


def compared(first: Ending, second: Ending) -> Ending:
    """Return the first ending, or that it is unstable if the second has another verdict."""
    if first.verdict == second.verdict:
        return first
    message = (
        f"unstable: {first.verdict} first, {second.verdict} in a repeat on new ranks\n"
        f"first: {first.message}\nthen: {second.message or 'everything that was compared holds'}"
    )
    return replace(first, verdict="unstable", message=message)
