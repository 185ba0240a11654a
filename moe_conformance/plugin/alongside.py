"""Running the twins of a case: those that the backend can run, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_conformance.contract import Backend
from moe_conformance.judging.equivalence.runs import Ran
from moe_conformance.plugin.trial import refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.corpus.equivalence.twins import Twin
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload


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
        a failure. One that does not finish beside something that does not finish alone, in processes that have run
        nothing before, says nothing of the two together.
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
        if twin.workload.twist.beside and not _finished(outcome) and (why := self._unfinished_alone(twin)):
            return Ran(twin, None, why)
        if twin.workload.twist.lifetime:  # what it leaves behind is no other run's
            self.renew()
        refusal = refusal_of(outcome) if twin.anew else None
        return Ran(twin, outcome) if refusal is None else Ran(twin, None, refusal[1])

    def _unfinished_alone(self, twin: Twin) -> str:
        """Say what of that which a twin takes turns with does not finish by itself; nothing if all of it does."""
        for other in twin.workload.twist.beside:
            self.renew()
            outcome = self.step(other)
            if not _finished(outcome):
                error = next((rank.error for rank in outcome.ranks if rank.status != "ok"), None)
                return f"{other.name} does not finish alone: {error}"
        return ""


def _finished(outcome: Outcome) -> bool:
    return all(rank.status == "ok" for rank in outcome.ranks)
