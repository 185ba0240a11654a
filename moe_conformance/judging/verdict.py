"""What a judgement ends in: a tally of what was compared, or a mismatch with a sentence.

Every kind of fault has its own exception type; `kinds` makes them finer still where Hypothesis has to tell two faults
of one kind apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from moe_conformance.scenarios.outcome import Outcome

Stage = Literal["route", "dispatch", "experts", "combine", "gradient", "finish", "groups", "run", "loss"]


@dataclass
class Tally:
    """What a check has compared so far. Nothing compared is a failure (vacuous), not a pass."""

    elements: int = 0
    pairs: int = 0  # (token, slot) pairs or rows
    ranks: set[int] = field(default_factory=set)
    worst: float = 0.0  # largest observed/allowed error of a bounded comparison; exact comparisons leave it at 0
    # The same of those that did not hold: how large a bounded failure is, at most 1e300, which stands for NaN too.
    beyond: float = 0.0
    # Elements of two runs that were compared within rounding, and those of them that have other bits.
    of_two_runs: int = 0
    other_bits: int = 0
    decided: set[str] = field(default_factory=set)  # by a check of several requirements: those that it compared for
    # Sent by all ranks in forwards: "rows" and "bytes", and the smallest possible "least_rows" and "least_bytes"; and
    # the most "calls" that a rank made in one forward.
    travelled: dict[str, float] = field(default_factory=dict)

    @property
    def vacuous(self) -> bool:
        """Whether nothing at all was compared."""
        return self.elements == 0 and self.pairs == 0

    def add(self, *, elements: int = 0, pairs: int = 0, rank: int | None = None, worst: float = 0.0) -> None:
        """Count one comparison that held."""
        self.elements += elements
        self.pairs += pairs
        self.worst = max(self.worst, worst)
        if rank is not None and (elements or pairs):
            self.ranks.add(rank)

    @contextmanager
    def uncounted(self) -> Iterator[Tally]:
        """Give a tally to judges whose comparisons are not counted: of these only how far off they are is kept."""
        own = Tally()
        try:
            yield own
        finally:
            self.beyond = max(self.beyond, own.beyond)

    def include(self, other: Tally) -> None:
        """Count what another tally has counted."""
        self.elements += other.elements
        self.pairs += other.pairs
        self.worst = max(self.worst, other.worst)
        self.beyond = max(self.beyond, other.beyond)
        self.of_two_runs += other.of_two_runs
        self.other_bits += other.other_bits
        self.ranks |= other.ranks
        self.decided |= other.decided


class NotOffered(Exception):
    """The backend does not offer what is to be judged; the message says why. Neither a pass nor a failure."""


class Mismatch(AssertionError):
    """The backend did something else than the requirement says. The message is the diagnosis."""

    def __init__(
        self,
        stage: Stage,
        sentence: str,
        *,
        ranks: tuple[int, ...] = (),
        ratio: float | None = None,
    ) -> None:
        """Keep the stage, the ranks to blame, and the one factor by which all elements differ."""
        super().__init__(f"{stage}: {sentence}")
        self.stage: Stage = stage
        self.sentence = sentence
        self.ranks = ranks
        self.ratio = ratio
        self.size: float | None = None  # set by who gives the judge its tally: `Tally.beyond`, None if it was exact
        self.requirement: str | None = None  # set by a check of several requirements: the one that is violated
        self.place = ""  # where in a rank's program, if a rank failed: tells two crashes apart
        self.outcome: Outcome | None = None  # set by a check that draws its own workloads: of the one that failed


class WrongDelivery(Mismatch):
    """A routed pair was not delivered, delivered twice, or delivered to another expert or rank."""


class CorruptRow(Mismatch):
    """A delivered row is a row of no token."""


class WrongWeight(Mismatch):
    """A routing weight was delivered with another pair, or with another value."""


class WrongCount(Mismatch):
    """Reported counts or splits differ from the delivered rows."""


class WrongSelection(Mismatch):
    """A router selected experts that no legal reading of the scores selects."""


class WrongOutput(Mismatch):
    """An output element has another value."""


class WrongGradient(Mismatch):
    """A gradient element has another value."""


class WrongLoss(Mismatch):
    """A loss has another value than the one that is reported or returned."""


class WrongBias(Mismatch):
    """A balance bias has another value than its loads make of it, or another one than elsewhere."""


class WrongParameter(Mismatch):
    """A parameter of a new model is not finite, or has another value than on another rank."""


class AbsentGradient(Mismatch):
    """A gradient that must exist is None."""


class WrongForm(Mismatch):
    """Shape, dtype or layout of a result differs from what is required."""


class ChangedInput(Mismatch):
    """The backend changed one of its inputs."""


class ChangedState(Mismatch):
    """The backend changed global state of its process."""


class WrongGroups(Mismatch):
    """The backend would build other groups of ranks."""


class WrongCollectives(Mismatch):
    """The ranks of a group call other collectives, or expect other sizes than are sent."""


class Hazardous(Mismatch):
    """Data of an asynchronous collective was read or written before `wait()`."""


class AbandonedCollective(Mismatch):
    """An asynchronous collective was never waited for."""


class Costly(Mismatch):
    """A step calls more collectives, or moves more, than it has to."""


class Uncovered(Mismatch):
    """The windows of `named` are copies, overlap, or leave parameters out."""


class Unrefused(Mismatch):
    """A call that every rank must refuse was accepted by some."""


class MalformedClaim(WrongCount):
    """What a rank reports about its delivered rows contradicts itself."""


class Refused(Mismatch):
    """What must be built was refused, or on some ranks only."""


class RunFailed(Mismatch):
    """The run did not finish on all ranks, or a rank returned without a part of the required results."""


class Raised(RunFailed):
    """A rank raised an exception."""


class Hung(RunFailed):
    """A rank did not finish before its deadline."""


class Died(RunFailed):
    """The process of a rank ended."""
