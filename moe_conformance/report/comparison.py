"""Compares two runs of a backend: new failures, what passes again, what is no longer judged, errors that grew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe_conformance.report.records import FAILING
from moe_conformance.report.standing import JUDGED, Place, Standing, in_words

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
    mended: tuple[Change, ...]
    newly_judged: tuple[Change, ...]
    errors_grew: tuple[Change, ...]

    @property
    def regressed(self) -> bool:
        """Whether something fails that did not fail, or is not judged that was judged."""
        return bool(self.new_failures or self.no_longer_judged)

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


def compare(old: Mapping[Place, Standing], new: Mapping[Place, Standing], *, whole: bool) -> Comparison:
    """Compare two runs.

    Args:
        old: The standing of each place in the old run.
        new: The same of the new run.
        whole: The new run had all cases of the old one, so that places it lacks are no longer judged.
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
        elif before is not None and after is not None and _grew(before, after):
            errors = (f"{stands.worst:.3g} of the allowed error" for stands in (before, after))
            found["errors_grew"].append(Change(place, *errors))
    return Comparison(**{name: tuple(changes) for name, changes in found.items()})


def _grew(before: Standing, after: Standing) -> bool:
    return before.verdict == after.verdict == "pass" and after.worst > max(GREW * before.worst, 0.05)
