"""Which equivalent runs the checks of a case will ask for, told before it runs, so that ranks need not wait for it.

A check asks for them by what its workload is, not by what a run of it returned; so it is called without an outcome, up
to where it asks. What cannot be told this way runs when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from moe_conformance.judging.verdict import Tally
from moe_conformance.plugin.case_items import CaseFunction
from moe_conformance.plugin.run import Run
from moe_conformance.reproducing.alongside import limit_of_twin
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin


@dataclass(frozen=True)
class _Outcome:
    """What there is of an outcome before a case has run."""

    workload: Workload


@dataclass(frozen=True)
class _Reading:
    outcome: _Outcome


class _Asked(Exception):
    """Ends a check where it asks for its equivalent runs."""

    def __init__(self, twins: Sequence[Twin]) -> None:
        self.twins = twins


@dataclass(frozen=True)
class _Ask:
    variants: Sequence[str]

    def __call__(self, twins: Sequence[Twin]) -> NoReturn:
        raise _Asked(twins)


def foreseen(run: Run, workload: Workload, checks: Iterable[CaseFunction]) -> list[Workload]:
    """Return the equivalent runs, each once, that checks will ask for and that can run behind the workload.

    On the same ranks, that is, and within the limits of their variants.
    """
    asked = [twin for check in checks for twin in _asked_by(check, workload, run.backend.variants)]
    found = {
        twin.workload.name: twin.workload
        for twin in {twin.how: twin for twin in asked}.values()
        if twin.workload.layout.world == workload.layout.world
        and not (twin.fresh or twin.workload.twist.lifetime)  # they need or leave other processes
        and limit_of_twin(run.backend, run.options.device, twin) is None
    }
    return list(found.values())


def _asked_by(asked: CaseFunction, workload: Workload, variants: Sequence[str]) -> Sequence[Twin]:
    if "twins" not in asked.arguments:
        return ()
    offered: dict[str, Any] = {
        "outcome": _Outcome(workload),
        "reading": _Reading(_Outcome(workload)),
        "tally": Tally(),
        "twins": _Ask(variants),
    }
    try:
        asked.bound()(**{name: offered[name] for name in asked.arguments})
    except _Asked as told:
        return told.twins
    except Exception:  # it reads more of the outcome first; a fault of its own is met again when it judges
        return ()
    return ()
