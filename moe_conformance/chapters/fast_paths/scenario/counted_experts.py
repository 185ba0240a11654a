"""A backend's experts for scripts that call them and read their counters of shortcuts."""

from __future__ import annotations

from typing import Any

from moe_conformance.chapters.fast_paths.scenario.changing_experts import ChangingExperts, sorted_experts
from moe_conformance.contract import Counted, Session, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.sessions import Opened
from moe_conformance.workloads.records.workload import Workload


class CountedExperts(ChangingExperts):
    """The surface of scripts that read counters: forwards, changes of parameters, and the counters."""

    def __init__(self, experts: Any, session: Session, workload: Workload, rank: int) -> None:
        """Keep the experts, and check that they have counters.

        Raises:
            Unsupported: there are none, or the script cannot be followed, see `ChangingExperts`.
        """
        if not hasattr(experts, "counters"):
            raise Unsupported("the experts have no counters of shortcuts")
        super().__init__(experts, session, workload, rank)

    def enable(self, on: bool) -> None:
        """Switch the counters on or off."""
        self._experts.counters.enable(on)

    def reset(self) -> None:
        """Set all counts to 0."""
        self._experts.counters.reset()

    def restrict(self, ranks: tuple[int, ...]) -> bool:
        """Restrict counting to some ranks; return whether the backend has a way to do so."""
        restrict = getattr(self._experts.counters, "restrict", None)
        if restrict is not None:
            restrict(ranks)
        return restrict is not None

    def counts(self) -> Counted:
        """Return the counts of this rank."""
        counted: Counted = self._experts.counters.read()
        return counted


def counted_experts(kept: Opened, workload: Workload, context: RankContext) -> CountedExperts:
    """Build the backend's experts, for a script that reads their counters."""
    return CountedExperts(sorted_experts(kept.session, workload), kept.session, workload, context.rank)


SCRIPT_SURFACES = {"counted_experts": counted_experts}
