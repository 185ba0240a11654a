"""A failure looked at a second time, on new ranks: what then ends otherwise is unstable, a failure of its own.

The repeat is for diagnosis only. It never makes a run pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plan import Case
from moe_conformance.plugin.outcomes import Kept
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import Workload

Examine = Callable[[Trial, Case, Outcome], None]


class CannotRepeat(Exception):
    """The check stands on something else than what its case brought back."""


def judge_again(
    item: pytest.Item, case: Case, kept: Kept, examine: Examine, step: Callable[[Workload], Outcome]
) -> Ending:
    """Return how the check of an item ends on another outcome of its case.

    Args:
        item: The item, its fixtures not yet torn down.
        case: What it reads.
        kept: The other outcome.
        examine: Raises what the outcome alone decides: a refusal, a limit that nothing kept.
        step: Runs a workload on the ranks that the other outcome is from.

    Raises:
        CannotRepeat: it has fixtures of its own that were never made.
    """
    first = getattr(item, "funcargs", {})
    trial = Trial((), item.name, case.cell, case.workload, outcome=kept.outcome)
    try:
        examine(trial, case, kept.outcome)
        made: dict[str, Callable[[], Any]] = {
            "case": lambda: case,
            "outcome": lambda: kept.outcome,
            "reading": lambda: kept.reading,
            "tally": lambda: trial.tally,
            "twins": lambda: replace(_of("twins", first), step=step),
        }
        given = {}
        for name in item._fixtureinfo.argnames:  # type: ignore[attr-defined]  # a function's
            given[name] = made[name]() if name in made else _of(name, first)
        item.obj(**given)  # type: ignore[attr-defined]
    except CannotRepeat:
        raise
    except (Exception, pytest.skip.Exception) as error:
        return ending(trial, error)
    return ending(trial, None)


def _of(name: str, fixtures: Mapping[str, Any]) -> Any:
    if name not in fixtures:
        raise CannotRepeat(name)
    return fixtures[name]


def drawn_again(failed: Trial, outcome: Outcome) -> Ending:
    """Return how a check that draws its workloads ends on another outcome of the one that it failed on.

    Raises:
        CannotRepeat: it did not say how it judges.
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
        f"unstable: {first.verdict} at first, and {second.verdict} when the same ran once more on new ranks\n"
        f"first: {first.message}\nthen: {second.message or 'everything that was compared holds'}"
    )
    return replace(first, verdict="unstable", message=message)
