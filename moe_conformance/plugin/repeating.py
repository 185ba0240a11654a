"""A failure looked at a second time, on new ranks: what then ends otherwise is unstable, a failure of its own.

The repeat is for diagnosis only. It never makes a run pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moe_conformance.plan import Case
from moe_conformance.plugin.outcomes import Kept
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import Workload

Examine = Callable[[Trial, Case, Outcome], None]


class CannotRepeat(Exception):
    """The check stands on something else than what its case brought back."""


def judge_again(item: pytest.Item, case: Case, kept: Kept, examine: Examine) -> Ending:
    """Return how the check of an item ends on another outcome of its case.

    Args:
        item: The item, its fixtures not yet torn down.
        case: What it reads.
        kept: The other outcome.
        examine: Raises what the outcome alone decides: a refusal, a limit that nothing kept.

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
        }
        given = {}
        for name in item._fixtureinfo.argnames:  # type: ignore[attr-defined]  # a function's
            if name not in made and name not in first:
                raise CannotRepeat(name)
            given[name] = made[name]() if name in made else first[name]
        item.obj(**given)  # type: ignore[attr-defined]
    except CannotRepeat:
        raise
    except (Exception, pytest.skip.Exception) as error:
        return ending(trial, error)
    return ending(trial, None)


def drawn_again(item: pytest.Item, failed: Trial, kept: Kept) -> Ending:
    """Return how a check that draws its workload ends on another outcome of the one that it failed on.

    Raises:
        CannotRepeat: it has fixtures that nobody can give it here.
    """
    again = Trial(failed.requirements, failed.check, failed.cell, outcome=kept.outcome)
    made: dict[str, Any] = {
        "cell": failed.cell,
        "drive": lambda workload: kept.outcome,
        "tally": again.tally,
        "data": _Drawn(kept.outcome.workload),
        "self": getattr(item, "instance", None),
    }
    check = getattr(item.obj, "hypothesis").inner_test  # type: ignore[attr-defined]  # noqa: B009  # not in its types
    names = inspect.signature(check).parameters
    if not made.keys() >= names.keys():
        raise CannotRepeat(", ".join(names.keys() - made.keys()))
    try:
        check(**{name: made[name] for name in names})
    except (Exception, pytest.skip.Exception) as error:
        return ending(again, error)
    return ending(again, None)


def compared(first: Ending, second: Ending) -> Ending:
    """Return the first ending, or that it is unstable if the second has another verdict."""
    if first.verdict == second.verdict:
        return first
    message = (
        f"unstable: {first.verdict} at first, and {second.verdict} when the same ran once more on new ranks\n"
        f"first: {first.message}\nthen: {second.message or 'everything that was compared holds'}"
    )
    return replace(first, verdict="unstable", message=message)


class _Drawn:
    """Stands for Hypothesis's data where there is nothing left to draw."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def draw(self, strategy: object, label: object = None) -> Workload:
        """Return the one workload."""
        return self._workload
