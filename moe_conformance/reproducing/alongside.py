"""Run the twins of a case that the backend can run, and give the reason for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe_conformance.contract import Backend
from moe_conformance.judging.shared.equivalence.runs import Ran
from moe_conformance.reproducing.examining import refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin


@dataclass(frozen=True)
class Twins:
    """The object that a check calls to run twins of its case."""

    backend: Backend
    device: str
    run: Callable[[Sequence[Workload]], Sequence[Outcome]]  # workloads of one world, in order, on the same ranks
    renew: Callable[[int], None]  # ends all ranks of a world of that size; the next run starts new ones
    taken: dict[str, Ran] = field(default_factory=dict)  # results of this case by `Twin.how`, which checks share
    imported: set[str] = field(default_factory=set)  # backends whose import has been judged

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants of the backend."""
        return self.backend.variants

    def __call__(self, twins: Sequence[Twin]) -> list[Ran]:
        """Run the twins in order, except those outside the limits of their variant, and return all results.

        A twin for which other surfaces are built than for the case may be refused; a refusal of the same surfaces is a
        failure. A twin that does not finish together with a workload that does not finish alone on new ranks either
        gives no result, only a reason.
        """
        if len({twin.how for twin in twins}) != len(twins):
            raise ValueError(f"equivalent runs of one name: {sorted(twin.how for twin in twins)}")
        for together in _together([twin for twin in twins if twin.how not in self.taken]):
            self.taken.update((ran.twin.how, ran) for ran in self._run_together(together))
        return [replace(self.taken[twin.how], twin=twin) for twin in twins]

    def _run_together(self, twins: Sequence[Twin]) -> list[Ran]:
        limits = {id(twin): limit_of_twin(self.backend, self.device, twin) for twin in twins}
        within = [twin for twin in twins if limits[id(twin)] is None]
        if within and within[0].fresh:
            self.renew(within[0].workload.layout.world)
        outcomes = dict(zip(map(id, within), self.run([self._once(twin.workload) for twin in within]), strict=True))
        return [
            Ran(twin, None, reason) if (reason := limits[id(twin)]) is not None else self._ran(twin, outcomes[id(twin)])
            for twin in twins
        ]

    def _once(self, workload: Workload) -> Workload:
        """Return the workload without an import of the backend that has already been judged: it takes seconds."""
        if workload.twist.lifetime != "process" or self.backend.name not in self.imported:
            self.imported.update({self.backend.name} if workload.twist.lifetime else ())
            return workload
        return replace(workload, twist=replace(workload.twist, lifetime="session"))

    def _ran(self, twin: Twin, outcome: Outcome) -> Ran:
        if twin.workload.twist.beside and not _finished(outcome) and (why := self._unfinished_alone(twin)):
            return Ran(twin, None, why)
        if twin.workload.twist.lifetime:  # its state must not reach other runs
            self.renew(twin.workload.layout.world)
        refusal = refusal_of(outcome) if twin.anew else None
        return Ran(twin, outcome) if refusal is None else Ran(twin, None, refusal[1])

    def _unfinished_alone(self, twin: Twin) -> str:
        """Return which of the workloads beside a twin does not finish alone, and why; "" if all finish."""
        for other in twin.workload.twist.beside:
            self.renew(other.layout.world)
            (outcome,) = self.run([other])
            if not _finished(outcome):
                error = next((rank.error for rank in outcome.ranks if rank.status != "ok"), None)
                return f"{other.name} does not finish alone: {error}"
        return ""


def limit_of_twin(backend: Backend, device: str, twin: Twin) -> str | None:
    """Return the reason of the first limit that a twin, or a workload beside it, breaks; None if there is none."""
    limits = backend.limits(twin.workload.config.variant)
    workloads = (twin.workload, *twin.workload.twist.beside)
    return next((limit.reason for candidate in workloads if (limit := broken(limits, candidate, device))), None)


def _alone(twin: Twin) -> bool:
    """Return whether a twin must not share its processes with other twins."""
    return bool(twin.fresh or twin.workload.twist.lifetime or twin.workload.twist.beside)


def _together(twins: Sequence[Twin]) -> Iterator[list[Twin]]:
    """Yield consecutive twins that can run on the same ranks; one that must not share its processes is alone."""
    together: list[Twin] = []
    for twin in twins:
        if together and (_alone(twin) or twin.workload.layout.world != together[0].workload.layout.world):
            yield together
            together = []
        together.append(twin)
        if _alone(twin):
            yield together
            together = []
    if together:
        yield together


def _finished(outcome: Outcome) -> bool:
    return all(rank.status == "ok" for rank in outcome.ranks)
