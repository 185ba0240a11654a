"""The decorator `judge`: makes a judge of a function that yields comparisons.

The judge counts what is right, and raises if anything is wrong.

    @judge(Costly, "run")
    def judge_no_calls(reading: Reading) -> Comparisons:
        for rank in reading.ranks:
            calls = ...
            yield Comparison(rank.rank, f"rank {rank.rank} calls {len(calls)} collectives" if calls else "", pairs=1)

The judge is called as `judge_no_calls(reading, tally)`. The function may yield a `Comparison` (of what was compared,
right or wrong), a `Finding` (a fault, without a count), a `Start` and a `Note` (the beginning and end of the message).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from moe_conformance.judging.findings import Finding, fail, likeliest
from moe_conformance.judging.verdict import MOST, Deviation, Mismatch, NotOffered, Stage, Tally

Subject = TypeVar("Subject")  # what is judged: an outcome, or its reading
Given = ParamSpec("Given")


@dataclass(frozen=True)
class Comparison:
    """What was compared at one place, and what is wrong there."""

    rank: int | None  # whose result it is; None if it is of no rank, or of several
    # Nothing, a sentence, or the findings that may each explain this one fault, of which `likeliest` chooses.
    wrong: str | Finding | Sequence[Finding] = ""
    pairs: int = 0  # (token, slot) pairs or rows that were compared
    elements: int = 0  # elements that were compared
    # Of a bounded comparison, right or wrong, `Worst.counted`: the largest observed/allowed error. Else 0.
    worst: float = 0.0
    kind: str = ""  # of the finding, if `wrong` is a sentence
    deviation: Deviation | None = None  # of what a report shows by name, right or wrong

    def findings(self) -> Sequence[Finding]:
        """Return the findings that may explain what is wrong; none if all is right."""
        if isinstance(self.wrong, Finding):
            return (self.wrong,)
        if isinstance(self.wrong, str):
            return (Finding(self.kind, self.wrong, () if self.rank is None else (self.rank,)),) if self.wrong else ()
        return self.wrong


@dataclass(frozen=True)
class Start:
    """What begins the message if anything is wrong, such as the run that was compared."""

    words: str


@dataclass(frozen=True)
class Note:
    """What ends the message if anything is wrong, such as the claim under which it would be right."""

    words: str | Callable[[], str]  # a function is called only if anything is wrong

    def __str__(self) -> str:
        """Return the words."""
        return self.words if isinstance(self.words, str) else self.words()


Comparisons = Iterator[Comparison | Finding | Start | Note]


def judge(
    error: type[Mismatch], stage: Stage, **by_kind: type[Mismatch]
) -> Callable[[Callable[Concatenate[Subject, Given], Comparisons]], Callable[Concatenate[Subject, Tally, Given], None]]:
    """Return a decorator that makes a judge of a function that yields comparisons.

    The judge counts in its second argument, the tally, what is right. It raises `error` in `stage` if anything is
    wrong, with the findings of all comparisons and the ranks to blame; a function may raise other errors itself.
    `by_kind` has the errors that take the place of `error` if the first finding is of such a kind.

    `NotOffered` that it raises after a wrong comparison is ignored. If nothing can be concluded, neither from what was
    compared, it has to be raised before the first comparison. A judge that is called for its errors alone gets a tally
    by `tally.uncounted()`, or a new one if it compares nothing within bounds.
    """

    def decorate(
        compare: Callable[Concatenate[Subject, Given], Comparisons],
    ) -> Callable[Concatenate[Subject, Tally, Given], None]:
        @wraps(compare)
        def judged(subject: Subject, tally: Tally, /, *given: Given.args, **named: Given.kwargs) -> None:
            found = _count(compare(subject, *given, **named), tally)
            told = partial(_fail, error, stage, by_kind, found)
            if found.stopped is not None:  # what was found before is no less wrong
                found.stopped.rest = (*([told] if found.faults else ()), *found.stopped.rest)
                raise found.stopped
            if found.faults:
                told()

        first, *rest = inspect.signature(compare).parameters.values()
        tally = inspect.Parameter("tally", first.kind)
        judged.__signature__ = inspect.Signature([first, tally, *rest])  # type: ignore[attr-defined]
        return judged

    return decorate


@dataclass
class _Found:
    """What a judge has found: the possible findings for each fault, and what is around them in the message."""

    faults: list[Sequence[Finding]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    stopped: Mismatch | None = None  # what the function raised itself


def _fail(error: type[Mismatch], stage: Stage, by_kind: Mapping[str, type[Mismatch]], found: _Found) -> NoReturn:
    findings = likeliest(found.faults)
    start, note = "".join(each.words for each in found.starts), "".join(map(str, found.notes))
    findings = [replace(each, error=by_kind.get(each.kind, error).__name__) for each in findings]
    fail(by_kind.get(findings[0].kind, error), stage, findings, start=start, note=note)


def _count(comparisons: Comparisons, tally: Tally) -> _Found:
    """Count what is right, and return what is wrong; of a wrong comparison the tally has by how much alone."""
    found = _Found()
    try:
        for compared in comparisons:
            if isinstance(compared, Start):
                found.starts.append(compared)
            elif isinstance(compared, Note):
                found.notes.append(compared)
            elif isinstance(compared, Finding):
                found.faults.append((compared,))
            elif findings := _counted(compared, tally):
                found.faults.append(findings)
    except NotOffered:
        if not found.faults:
            raise
    except Mismatch as mismatch:
        found.stopped = mismatch
    return found


def _counted(compared: Comparison, tally: Tally) -> Sequence[Finding]:
    """Count a comparison, and return the findings that may explain what is wrong in it."""
    if compared.deviation is not None:
        tally.note(compared.deviation)
    findings = compared.findings()
    if not findings:
        tally.add(elements=compared.elements, pairs=compared.pairs, rank=compared.rank, worst=compared.worst)
        return ()
    beyond = min(compared.worst, MOST)
    tally.beyond = max(tally.beyond, beyond)
    return [replace(each, beyond=beyond) if each.beyond is None else each for each in findings]
