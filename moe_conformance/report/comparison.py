"""Compares two runs of a backend: new failures, what passes again, what is no longer judged, errors that grew.

Within a place the cases that pass are counted, all of them and those of each dtype, K and condition of the batches: a
place of which fewer pass has regressed, even if something in it still passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe_conformance.report.records import FAILING
from moe_conformance.report.result import Report
from moe_conformance.report.standing import JUDGED, Place, Standing, in_words, standings

WORSE = "worse than"  # how the sentence on a regression begins
_SHOWN = 5  # places in that sentence
GREW = 2.0  # times the error of the old run; less is rounding in another order of products


@dataclass(frozen=True)
class Change:
    """A place whose verdict or error changed."""

    place: Place
    before: str
    after: str

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{in_words(self.place)}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Comparison:
    """The places that differ between an old run and a new one."""

    new_failures: tuple[Change, ...]
    no_longer_judged: tuple[Change, ...]
    fewer_pass: tuple[Change, ...]
    mended: tuple[Change, ...]
    newly_judged: tuple[Change, ...]
    errors_grew: tuple[Change, ...]

    @property
    def regressed(self) -> bool:
        """Whether something fails that did not fail, or is not judged that was judged, or fewer cases pass."""
        return bool(self.regressions)

    @property
    def regressions(self) -> tuple[Change, ...]:
        """All changes for the worse, but for errors that grew."""
        return (*self.new_failures, *self.no_longer_judged, *self.fewer_pass)

    def sentence(self, old: object) -> str:
        """Return a sentence with the first regressions; "" if there is none."""
        told = self.regressions
        if not told:
            return ""
        more = f"; {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        return f"{WORSE} {old} in {len(told)} places: {'; '.join(map(str, told[:_SHOWN]))}{more}"

    def lines(self) -> Iterable[str]:
        """Yield the changes as text, by kind."""
        for title, changes in vars(self).items():
            if changes:
                yield f"{title.replace('_', ' ')}: {len(changes)}"
                yield from (f"  {change}" for change in changes)
        if not any(vars(self).values()):
            yield "nothing differs"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "regressed": self.regressed}


def of_reports(old: Report, new: Report) -> Comparison:
    """Compare the reports of two runs.

    A new run that was narrowed may lack cases of its places, and of a shard whole places are in others: neither are
    regressions. With fewer ranks it lacks layouts, and another profile has other cases.
    """
    filtered, fewer_ranks = new.head["filtered"], new.head["ranks"] < old.head["ranks"]
    whole = not (filtered or new.head["shard"] or fewer_ranks)
    counts = not filtered and new.head["profile"] == old.head["profile"]
    return compare(standings(old.records), standings(new.records), whole=whole, counts=counts)


def compare(
    old: Mapping[Place, Standing], new: Mapping[Place, Standing], *, whole: bool, counts: bool = True
) -> Comparison:
    """Compare two runs.

    Args:
        old: The standing of each place in the old run.
        new: The same of the new run.
        whole: The new run had all cases of the old one, so that places it lacks are no longer judged.
        counts: It had all cases of the places that it has, so that fewer that pass are a regression.
    """
    found: dict[str, list[Change]] = {name: [] for name in Comparison.__dataclass_fields__}
    for place in sorted({*old, *new}):
        if place not in new and not whole:
            continue
        before, after = old.get(place), new.get(place)
        was = "not run" if before is None else before.verdict
        now = "not run" if after is None else after.verdict
        change = Change(place, was, now)
        if now in FAILING and was not in FAILING:
            found["new_failures"].append(change)
        elif was in JUDGED and now not in JUDGED:
            found["no_longer_judged"].append(change)
        elif now == "pass" and was in (*FAILING, "waived", "not kept"):
            found["mended"].append(change)
        elif now in JUDGED and was not in JUDGED:
            found["newly_judged"].append(change)
        elif counts and before is not None and after is not None and (fell := _fell(before, after)):
            found["fewer_pass"].append(Change(place, *fell))
        elif before is not None and after is not None and _grew(before, after):
            errors = (f"{stands.worst:.3g} of the allowed error" for stands in (before, after))
            found["errors_grew"].append(Change(place, *errors))
    return Comparison(**{name: tuple(changes) for name, changes in found.items()})


def _fell(before: Standing, after: Standing) -> tuple[str, str] | None:
    """Return how many cases passed and pass, of all and of each trait of which fewer do; None if there are as many.

    What fails now is told as a failure, and is not counted here.
    """
    fell = [("pass", before.passed, after.passed)] if after.reached < before.passed else []
    for trait, passed in before.traits.items():
        now = after.traits.get(trait, 0)
        fell += [(trait, passed, now)] if now + after.told < passed else []
    if not fell or after.verdict == "not applicable":
        return None
    return ", ".join(f"{was} {what}" for what, was, _ in fell), ", ".join(f"{now} {what}" for what, _, now in fell)


def _grew(before: Standing, after: Standing) -> bool:
    return before.verdict == after.verdict == "pass" and after.worst > max(GREW * before.worst, 0.05)
