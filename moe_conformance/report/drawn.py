"""Counts the features of the drawn batches of a run, and reports features that no batch had but could have had.

A search that never drew an idle rank has shown nothing about idle ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moe_conformance.report.records import Record

LEAST = 1  # batches of a run that must have had each feature
_SHOWN = 6


def totals(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """Return, by check, how many batches were drawn in the run and how many had each feature."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        if record.drawn:
            found.setdefault(record.check, Counter()).update(record.drawn)
    return {check: dict(counts) for check, counts in found.items()}


def problems(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for every check that passed although its batches lacked what the limits allow."""
    for check, counts in totals(records).items():
        passed = [record for record in records if record.check == check and record.verdict == "pass"]
        required = dict.fromkeys(name for record in passed for name in record.drawn)
        if missing := [name for name in required if counts[name] < LEAST]:
            yield (
                f"vacuous: of {counts['batches']} batches that {check} drew, fewer than {LEAST} had: "
                f"{', '.join(missing)}; the backend's limits allow that, so it must be drawn"
            )


def line(records: Sequence[Record]) -> str | None:
    """Return the distribution in one line, rarest features first, or None if nothing was drawn."""
    found = totals(records)
    if not found:
        return None
    batches = sum(counts["batches"] for counts in found.values())
    rarest = sorted((n, name) for counts in found.values() for name, n in counts.items() if name != "batches")
    shown = ", ".join(f"{name} {n}" for n, name in rarest[:_SHOWN])
    return f"drawn: {batches} batches; rarest of {len(rarest)} features: {shown}"
