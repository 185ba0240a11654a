"""Running twins beside a case: those that the backend can run, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_conformance.contract import Backend
from moe_conformance.judging.twins import Ran
from moe_conformance.plugin.trial import refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.features import broken
from moe_conformance.workloads.records import Workload
from moe_conformance.workloads.twins import Twin


@dataclass(frozen=True)
class Twins:
    """What a check asks to run twins of its case."""

    backend: Backend
    device: str
    step: Callable[[Workload], Outcome]
    renew: Callable[[], None]  # ends all ranks: the next step has new ones

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants of the backend."""
        return self.backend.variants

    def __call__(self, twins: Sequence[Twin]) -> list[Ran]:
        """Run them one after the other; one outside the limits of its variant is not.

        One for which something else is built than for the case may be refused. To be refused what was built before is
        a failure.
        """
        return [self._run(twin) for twin in twins]

    def _run(self, twin: Twin) -> Ran:
        limits = self.backend.limits(twin.workload.config.variant)
        for workload in (twin.workload, *twin.workload.twist.beside):
            if limit := broken(limits, workload, self.device):
                return Ran(twin, None, limit.reason)
        if twin.fresh:
            self.renew()
        outcome = self.step(twin.workload)
        if twin.workload.twist.lifetime:  # what it leaves behind is no other run's
            self.renew()
        refusal = refusal_of(outcome) if twin.anew else None
        return Ran(twin, outcome) if refusal is None else Ran(twin, None, refusal[1])
