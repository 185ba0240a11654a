"""Finds the equivalent runs that the checks of a case will request, before it runs: ranks run them without waiting.

A check requests them by its workload, not by the outcome; so it is called without an outcome, up to its request. Runs
that cannot be found this way start when they are requested.
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
    """The part of an outcome that exists before a case has run."""

    workload: Workload


@dataclass(frozen=True)
class _Reading:
    outcome: _Outcome


class _TwinsRequested(Exception):
    """Ends a check at its request for equivalent runs."""

    def __init__(self, twins: Sequence[Twin]) -> None:
        self.twins = twins


@dataclass(frozen=True)
class _TwinRequests:
    variants: Sequence[str]

    def __call__(self, twins: Sequence[Twin]) -> NoReturn:
        raise _TwinsRequested(twins)


def foreseen(run: Run, workload: Workload, checks: Iterable[CaseFunction]) -> list[Workload]:
    """Return the equivalent runs, without duplicates, that checks will request and that can follow the workload.

    They can follow it if they run on the same ranks and within the limits of their variants.
    """
    requested = {twin.how: twin for check in checks for twin in _requested_by(check, workload, run.backend.variants)}
    found: dict[str, Workload] = {}
    for twin in requested.values():
        same_ranks = twin.workload.layout.world == workload.layout.world
        new_processes = twin.fresh or twin.workload.twist.lifetime
        if same_ranks and not new_processes and limit_of_twin(run.backend, run.options.device, twin) is None:
            found[twin.workload.name] = twin.workload
    return list(found.values())


def _requested_by(check: CaseFunction, workload: Workload, variants: Sequence[str]) -> Sequence[Twin]:
    if "twins" not in check.arguments:
        return ()
    offered: dict[str, Any] = {
        "outcome": _Outcome(workload),
        "reading": _Reading(_Outcome(workload)),
        "tally": Tally(),
        "twins": _TwinRequests(variants),
    }
    try:
        check.bound()(**{name: offered[name] for name in check.arguments})
    except _TwinsRequested as request:
        return request.twins
    except Exception:  # it reads more of the outcome first; a fault of the check is raised again when it judges
        return ()
    return ()
