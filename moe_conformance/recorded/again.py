"""Judges a recorded case with the checks of today, and says in what the verdicts differ from those that are stored.

Nothing runs, and no library is needed. The workload is drawn again: if it is another one today, the recorded outcome
says nothing of it, and has to be recorded anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_conformance.judging.shared.equivalence import runs
from moe_conformance.recorded import judging
from moe_conformance.recorded.files import Ran, Recorded
from moe_conformance.recorded.judging import Verdict
from moe_conformance.recorded.pools import BadRecording
from moe_conformance.recorded.workloads import fingerprint
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin


class DrawnOtherwise(BadRecording):
    """A workload, or that of a twin, is another one than when it was recorded."""


@dataclass(frozen=True)
class StoredTwins:
    """What a check calls to run twins: gives the outcomes that are stored."""

    recorded: Recorded

    @property
    def variants(self) -> Sequence[str]:
        """All variants of the backend when it was recorded."""
        return self.recorded.variants

    def __call__(self, twins: Sequence[Twin]) -> list[runs.Ran]:
        """Return the stored outcomes of twins.

        Raises:
            DrawnOtherwise: one of them is not stored, or was another one.
        """
        return [self._ran(twin) for twin in twins]

    def _ran(self, twin: Twin) -> runs.Ran:
        stored = self.recorded.twins.get(twin.how)
        if stored is None:
            raise DrawnOtherwise(f"no run {twin.how} is stored; {how_to_record(self.recorded)}")
        return runs.Ran(twin, *_outcome(self.recorded, stored, twin.workload))


def judged_again(recorded: Recorded, plan: Plan) -> dict[str, Verdict]:
    """Return the verdicts of today's checks on a recorded case, by the check's name.

    Args:
        recorded: The case.
        plan: The cases of its backend, in which it is found.

    Raises:
        DrawnOtherwise: there is no such case today, or its workload is another one.
        BadRecording: what is stored is no outcome.
    """
    case = judging.find(plan, recorded.variant, recorded.layout, recorded.workload)
    if case is None:
        raise DrawnOtherwise(f"{recorded.backend} has no case {recorded.id} today; {how_to_record(recorded)}")
    return verdicts_of(recorded, case)


def verdicts_of(recorded: Recorded, case: Case) -> dict[str, Verdict]:
    """Return the verdicts on a recorded case that was found; as `judged_again`."""
    outcome, why_not = _outcome(recorded, recorded.ran, case.workload)
    if outcome is None:
        raise BadRecording(f"{recorded.id} has no outcome: {why_not}")
    return judging.verdicts(case, outcome, StoredTwins(recorded))


def differences(recorded: Recorded, today: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield a sentence for every stored verdict that is another one today; checks that are new are not compared."""
    for check, was in recorded.verdicts.items():
        now = today.get(check)
        if now is None:
            yield f"{recorded.id}: no check {check} reads it; it was {_words(was)}"
        elif now.judged != was.judged:
            yield f"{recorded.id}: {check} is {_words(now)}; it was {_words(was)}"


def accepted(recorded: Recorded, today: Mapping[str, Verdict]) -> Recorded:
    """Return the recorded case with the verdicts of today."""
    return replace(recorded, verdicts=today)


def how_to_record(recorded: Recorded) -> str:
    """Return the command that records a case anew."""
    name, version = library_of(recorded.versions)
    checkout = " --library PATH" if "+" in version and name != "torch" else ""
    command = f"moe-conformance record --backend {recorded.backend}{checkout} --cases FILE --output DIR"
    return f"record it anew with {name} {version}, the id in FILE: `{command}`"


def library_of(versions: Mapping[str, str]) -> tuple[str, str]:
    """Return the library of a backend and its version: the first of its versions that is not torch's."""
    return next((each for each in versions.items() if each[0] != "torch"), ("torch", versions.get("torch", "")))


def _outcome(recorded: Recorded, stored: Ran, workload: Workload) -> tuple[Outcome | None, str]:
    """Return a stored outcome, or the reason why there is none, of a workload that was drawn again."""
    if fingerprint(workload) != stored.workload:
        raise DrawnOtherwise(f"{workload.name} is drawn otherwise than it was; {how_to_record(recorded)}")
    return (stored.outcome(workload), "") if stored.observed else (None, stored.why_not)


def _words(verdict: Verdict) -> str:
    words = [verdict.verdict, *filter(None, (verdict.kind, verdict.stage and f"at {verdict.stage}"))]
    counted = f"with {verdict.elements} elements and {verdict.pairs} pairs compared"
    return " ".join([*words, counted]) + (f" ({verdict.message.splitlines()[0]})" if verdict.message else "")
