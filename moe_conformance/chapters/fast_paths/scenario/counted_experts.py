"""A backend's own experts for scripts that read its counters of shortcuts beside calls."""

from __future__ import annotations

from typing import Any

from moe_conformance.chapters.fast_paths.scenario.changing_experts import ChangingExperts, sorted_experts
from moe_conformance.contract import Counted, Session, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.sessions import Opened
from moe_conformance.workloads.records.workload import Workload


class CountedExperts(ChangingExperts):
    """What a script calls: forwards and changes, and the counters."""

    def __init__(self, experts: Any, session: Session, workload: Workload, rank: int) -> None:
        """Find the counters.

        Raises:
            Unsupported: there are none, or the script cannot be followed, see `ChangingExperts`.
        """
        if not hasattr(experts, "counters"):
            raise Unsupported("the experts have no counters of shortcuts")
        super().__init__(experts, session, workload, rank)

    def enable(self, on: bool) -> None:
        """Turn counters on or off."""
        self._experts.counters.enable(on)

    def reset(self) -> None:
        """Begin at 0 again."""
        self._experts.counters.reset()

    def restrict(self, ranks: tuple[int, ...]) -> bool:
        """Have other ranks count nothing; say whether the backend has a way to do so."""
        restrict = getattr(self._experts.counters, "restrict", None)
        if restrict is not None:
            restrict(ranks)
        return restrict is not None

    def counts(self) -> Counted:
        """Return what this rank has counted."""
        counted: Counted = self._experts.counters.read()
        return counted


def counted_experts(kept: Opened, workload: Workload, context: RankContext) -> CountedExperts:
    """Build the backend's own experts, whose counters are read beside calls."""
    return CountedExperts(sorted_experts(kept.session, workload), kept.session, workload, context.rank)


SCRIPT_SURFACES = {"counted_experts": counted_experts}
