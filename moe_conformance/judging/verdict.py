"""The result of a judge: a tally of what was compared, or a mismatch with a message.

Every kind of fault has its own exception type. `mismatch_types` makes subclasses where Hypothesis has to distinguish
two faults of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from moe_conformance.scenarios.outcome import Outcome

Stage = Literal["route", "dispatch", "experts", "combine", "gradient", "finish", "groups", "run", "loss"]


MOST = 1e300  # the largest size of a finding, and of `Tally.beyond`


@dataclass(frozen=True)
class Deviation:
    """How far one quantity of a run is off, such as its loss, where that is most."""

    quantity: str
    ratio: float  # observed/allowed error, at most `MOST`
    at: str = ""  # where that is, such as a parameter
    factor: str = ""  # by which all elements differ, in words; "" if there is none, and if nothing is wrong

    def plain(self) -> dict[str, float | str]:
        """Return the fields beside the quantity as plain data."""
        return {"ratio": self.ratio, "at": self.at, "factor": self.factor}


@dataclass
class Tally:
    """The numbers of compared elements and pairs so far. A check that compared nothing fails (vacuous)."""

    elements: int = 0
    pairs: int = 0  # (token, slot) pairs or rows
    ranks: set[int] = field(default_factory=set)
    worst: float = 0.0  # largest observed/allowed error of a bounded comparison; exact comparisons leave it at 0
    # The same ratio of elements that are out of bounds: the size of a bounded failure, at most 1e300, also for NaN.
    beyond: float = 0.0
    # Elements of two runs that were compared within rounding, and how many of them differ in a bit.
    of_two_runs: int = 0
    other_bits: int = 0
    decided: set[str] = field(default_factory=set)  # the requirements that a check of several compared for
    # Sent by all ranks in forwards: "rows" and "bytes", the smallest possible "least_rows" and "least_bytes", and
    # the most "calls" that a rank made in one forward.
    travelled: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, Deviation] = field(default_factory=dict)  # by quantity, right or wrong: the largest of each

    @property
    def vacuous(self) -> bool:
        """Whether nothing at all was compared."""
        return self.elements == 0 and self.pairs == 0

    def add(self, *, elements: int = 0, pairs: int = 0, rank: int | None = None, worst: float = 0.0) -> None:
        """Count one comparison that passed."""
        self.elements += elements
        self.pairs += pairs
        self.worst = max(self.worst, worst)
        if rank is not None and (elements or pairs):
            self.ranks.add(rank)

    def note(self, deviation: Deviation) -> None:
        """Keep a deviation if it is the largest of its quantity so far."""
        before = self.deviations.get(deviation.quantity)
        if before is None or deviation.ratio > before.ratio:
            self.deviations[deviation.quantity] = deviation

    @contextmanager
    def uncounted(self) -> Iterator[Tally]:
        """Return a context with a tally that counts nothing here, except how far wrong elements are off."""
        apart = Tally()
        try:
            yield apart
        finally:
            self.beyond = max(self.beyond, apart.beyond)

    def include(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.elements += other.elements
        self.pairs += other.pairs
        self.worst = max(self.worst, other.worst)
        self.beyond = max(self.beyond, other.beyond)
        self.of_two_runs += other.of_two_runs
        self.other_bits += other.other_bits
        self.ranks |= other.ranks
        self.decided |= other.decided
        for deviation in other.deviations.values():
            self.note(deviation)


@dataclass(frozen=True)
class Finding:
    """One fault, in words. A message has the first and the worst finding of each kind, and counts the others."""

    kind: str  # a message sums findings of one kind up; of the kind "" it lists the first three
    sentence: str
    ranks: tuple[int, ...]  # at which the fault is
    size: float = 0.0  # the size of the error in any unit, only used to choose the worst of a kind
    # The largest observed/allowed error of what it tells, 0 if exact; None: no larger than that of the whole check.
    beyond: float | None = None
    error: str = ""  # the type of mismatch that it is by itself, if not that of the mismatch that has it


class NotOffered(Exception):
    """The backend does not offer what is to be judged; the message has the reason. Neither a pass nor a failure."""


class Indecisive(NotOffered):
    """By the oracle no value of the batch depends on what the check is about; the message says on what.

    Not applicable to a batch that is drawn for a pair of options, which other checks judge. Any other workload that a
    check reads has to show it: there the check is vacuous, and fails.
    """


class Mismatch(AssertionError):
    """The backend violates a requirement. The message is the diagnosis."""

    def __init__(
        self,
        stage: Stage,
        sentence: str,
        *,
        ranks: tuple[int, ...] = (),
        ratio: float | None = None,
    ) -> None:
        """Store the stage, the ranks to blame, and the factor by which all elements differ, if there is one."""
        super().__init__(f"{stage}: {sentence}")
        self.stage: Stage = stage
        self.sentence = sentence
        self.ranks = ranks
        self.ratio = ratio
        self.size: float | None = None  # set by the judge's caller: `Tally.beyond`, None if exact
        self.requirement: str | None = None  # set by a check of several requirements: the one that is violated
        self.place = ""  # the line at which a rank failed, to distinguish two crashes
        self.outcome: Outcome | None = None  # set by a check that draws its own workloads: the workload that failed
        self.findings: tuple[Finding, ...] = ()  # all of them, also those that the sentence only counts
        self.start, self.note = "", ""  # before and behind the findings in the sentence
        self.rest: tuple[Callable[[], object], ...] = ()  # judges of the check that were not called, see `in_turn`

    def every_finding(self) -> Iterator[tuple[str, Finding]]:
        """Yield each finding with the message that it would have alone; one of the whole sentence if there is none."""
        for finding in self.findings or (Finding("", self.sentence, self.ranks),):
            around = (self.start, self.note) if self.findings else ("", "")
            yield f"{self.stage}: {around[0]}{finding.sentence}{around[1]}", finding

    def further(self) -> Iterator[Mismatch]:
        """Yield what the judges find that were not called since this one ended the check.

        One that cannot judge, by whatever exception, finds nothing: what it reads may be what is wrong.
        """
        for judge in self.rest:
            try:
                judge()
            except Mismatch as mismatch:
                yield mismatch
                yield from mismatch.further()
            except Exception:
                continue

    def retold(
        self, kind: type[Mismatch] | None = None, *, start: str = "", note: str = "", ranks: tuple[int, ...] = ()
    ) -> Mismatch:
        """Return it in another type, with words before and behind its sentence, or of other ranks."""
        told = (kind or type(self))(
            self.stage, f"{start}{self.sentence}{note}", ranks=ranks or self.ranks, ratio=self.ratio
        )
        told.size, told.requirement, told.place, told.outcome = self.size, self.requirement, self.place, self.outcome
        told.findings, told.rest = self.findings, self.rest
        told.start, told.note = start + self.start, self.note + note
        return told


class WrongDelivery(Mismatch):
    """A routed pair was not delivered, delivered twice, or delivered to another expert or rank."""


class CorruptRow(Mismatch):
    """A delivered row is a row of no token."""


class WrongWeight(Mismatch):
    """A routing weight was delivered with another pair, or has a wrong value."""


class WrongCount(Mismatch):
    """Reported counts or splits differ from the delivered rows."""


class WrongSelection(Mismatch):
    """A router selected experts that are not the best by any legal rounding of the scores."""


class WrongOutput(Mismatch):
    """An output element has a wrong value."""


class WrongGradient(Mismatch):
    """A gradient element has a wrong value."""


class WrongLoss(Mismatch):
    """A reported or returned loss has a wrong value."""


class WrongBias(Mismatch):
    """A balance bias is not the one that follows from its loads, or differs between ranks or copies."""


class WrongParameter(Mismatch):
    """A parameter of a new model is not finite or differs between ranks, or one is wrong after a training step."""


class AbsentGradient(Mismatch):
    """A gradient that must exist is None."""


class WrongForm(Mismatch):
    """The shape, dtype or layout of a result is wrong."""


class ChangedInput(Mismatch):
    """The backend changed one of its inputs."""


class ChangedState(Mismatch):
    """The backend changed global state of the process."""


class WrongGroups(Mismatch):
    """The backend would build wrong groups of ranks."""


class WrongCollectives(Mismatch):
    """The ranks of a group call different collectives, or expect other sizes than are sent."""


class Hazardous(Mismatch):
    """A buffer of an asynchronous collective was read or written before `wait()`."""


class AbandonedCollective(Mismatch):
    """An asynchronous collective was never waited for."""


class Costly(Mismatch):
    """A step calls more collectives, or sends more data, than necessary."""


class Uncovered(Mismatch):
    """The windows of `named` are copies, overlap, or do not cover the parameters."""


class Unrefused(Mismatch):
    """A call that every rank must refuse was accepted on some ranks."""


class MalformedClaim(WrongCount):
    """The report of a rank about its delivered rows contradicts itself."""


class Refused(Mismatch):
    """A configuration that must be built was refused, on all or on some ranks."""


class FalseLimit(Mismatch):
    """A limit that the backend declares as refused by its library is not; nothing else of the case is judged."""


class RunFailed(Mismatch):
    """The run did not finish on all ranks, or a rank returned without some required result."""


class Raised(RunFailed):
    """A rank raised an exception."""


class Hung(RunFailed):
    """A rank did not finish before its deadline."""


class Died(RunFailed):
    """The process of a rank ended."""


def in_turn(judges: Iterable[Callable[[], object]]) -> None:
    """Call judges in turn. The first that raises ends the check; its mismatch has the others as `rest`.

    They are called where a waiver excuses that mismatch, so that it hides nothing that they would find.
    """
    calls = iter(judges)
    for call in calls:
        try:
            call()
        except Mismatch as mismatch:
            mismatch.rest = (*mismatch.rest, *calls)
            raise
