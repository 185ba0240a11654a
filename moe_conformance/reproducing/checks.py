"""Find a case by name, and call a check on the outcome of the case."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from moe_conformance.backends import registry
from moe_conformance.contract import Backend, Unsupported
from moe_conformance.contract.topology import named as layout_named
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.verdict import Mismatch, NotOffered, Tally
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.reproducing.examining import refusal_by_limit, refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec.checks import Check, find
from moe_conformance.spec.row import ARGUMENTS
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.workload import Asynchrony, Workload

Verdict = tuple[int, str]  # exit status and sentence
RunAll = Callable[[Sequence[Workload]], list[Outcome]]


class CannotRun(Exception):
    """The named case or check cannot run here; the message is one sentence."""


@dataclass(frozen=True)
class Named:
    """The arguments of a script: backend, requirement, check and case, by name."""

    backend: str
    requirement: str
    check: str
    variant: str
    layout: str
    workload: str
    ranks: int
    device: str
    profile: str
    asynchrony: str


@dataclass(frozen=True)
class Prepared:
    """The case and the check that a script names, found and ready to run."""

    named: Named
    backend: Backend
    case: Case
    check: Check
    tally: Tally = field(default_factory=Tally)

    def verdict(self, outcome: Outcome, run: RunAll | None) -> Verdict:
        """Call the check on an outcome and return the verdict; `run` runs equivalent workloads for the check."""
        try:
            if refusal := refusal_of(outcome) or refusal_by_limit(self.case, outcome):
                return 2, f"cannot run: {refusal[1]}"
            self.check.function(**self._arguments(outcome, run))
        except Mismatch as mismatch:
            return 1, self._fails(str(mismatch))
        except (NotOffered, CannotRun) as error:
            return 2, f"cannot run: {error}"
        except Exception:
            return 2, f"error in the suite: {traceback.format_exc()}"
        if self.tally.vacuous:
            return 1, self._fails("vacuous: the check compared nothing")
        return 0, f"{self.named.requirement} passes"

    def unfinished(self, outcome: Outcome) -> Verdict:
        """Return the verdict on an equivalent run that did not finish."""
        try:
            require_finished(outcome)
        except Mismatch as mismatch:
            return 1, self._fails(str(mismatch))
        return 2, "cannot run: an equivalent run was given up"

    def _fails(self, sentence: str) -> str:
        return f"{self.named.requirement} fails: {sentence}"

    def _arguments(self, outcome: Outcome, run: RunAll | None) -> dict[str, Any]:
        """Return the arguments that the check takes, by name."""
        offered: dict[str, Callable[[], Any]] = {
            "outcome": lambda: outcome,
            "reading": lambda: read(outcome),
            "tally": lambda: self.tally,
            "twins": lambda: Twins(self.backend, self.named.device, run or _no_run, _no_renewal),
        }
        return {name: offered[name]() for name in self.check.arguments}


def prepared(named: Named, world: int) -> Prepared:
    """Return the case and the check that a script names; nothing is started.

    Raises:
        CannotRun: there is no such backend, check or case here, or another number of processes is needed.
    """
    if (needed := layout_named(named.layout).world) != named.ranks:
        raise CannotRun(f"{named.layout} is a layout of {needed} ranks, not of {named.ranks}")
    if world != named.ranks:
        raise CannotRun(f"{named.layout} is a layout of {named.ranks} ranks, and {world} processes were launched")
    try:
        backend = registry.load(named.backend)
        backend.versions()
    except (registry.NoBackend, Unsupported) as error:
        raise CannotRun(f"backend {named.backend}: {error}") from error
    os.environ.update(getattr(backend, "environment", {}))
    try:
        check = find(named.check)
    except LookupError as error:
        raise CannotRun(str(error)) from error
    plan = Plan(backend, named.device, named.profile, asynchrony=cast(Asynchrony, named.asynchrony))
    case = plan.find(check.run, named.variant, named.layout, named.workload)
    if case is None:
        raise CannotRun(
            f"there is no case {named.variant}-{named.layout}-{named.workload} of {check.run} in this suite"
        )
    return Prepared(named, backend, case, check)


def can_call(check: str) -> bool:
    """Return whether a check of that name exists, and a script can pass all its arguments."""
    try:
        return find(check).arguments <= ARGUMENTS
    except LookupError:
        return False


def _no_run(workloads: Sequence[Workload]) -> list[Outcome]:
    raise CannotRun("the case did not finish")


def _no_renewal(world: int) -> None:
    del world
    raise CannotRun("the check compares runs in new processes; run the command of pytest that the script names")
