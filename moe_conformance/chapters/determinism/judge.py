"""Judge of the process settings that a backend leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.shared.equivalence.runs import Ran, read_twin, those_that_ran
from moe_conformance.judging.verdict import ChangedState


@judge(ChangedState, "run")
def judge_settings(ran: Sequence[Ran]) -> Comparisons:
    """Decide whether the settings of every rank's process are equal before a backend's import and after its end.

    Raises:
        ChangedState: a setting differs.
        Raised, Hung, Died, RunFailed: the run did not finish.
    """
    for run in map(read_twin, those_that_ran(ran)):
        for rank in run.ranks:
            for name, (before, after) in rank.settings_changed.items():
                yield Comparison(rank.rank, f"{name}, on rank {rank.rank} {_difference(before, after)}", kind=name)
            yield Comparison(rank.rank, elements=rank.settings_seen - len(rank.settings_changed))


def _difference(before: str, after: str) -> str:
    """Return what differs between two values; of several lines, the added and the removed ones."""
    if "\n" not in before + after:
        return f"is {after!r} instead of {before!r}"
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    added, gone = list((new - old).elements()), list((old - new).elements())
    if not added and not gone:
        return "has its lines in another order"
    return f"has {added} more and {gone} less"
