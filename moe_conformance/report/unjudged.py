"""Counts the reasons why cases were not judged: those of backends, adapters and declared limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from moe_conformance.report.records import Record, Verdict

_NOT_JUDGED: tuple[Verdict, ...] = ("refused", "not adapted", "limit")
BY_DESIGN = "not applicable by design"  # what begins the message of a record of a limit with proof "design"
MOST_SHOWN = 2  # reasons of one verdict, unless all are requested
_WIDE = 96  # characters of a reason


def lines(records: Iterable[Record], *, whole: bool) -> Iterator[str]:
    """Yield a line for each reason, the most frequent first; reasons that differ in numbers are one.

    What is not applicable by design is among them, always whole, and no other case that is not applicable.

    Args:
        records: Of all items.
        whole: Show all reasons, not only the most frequent of each verdict.
    """
    count: dict[Verdict, Counter[str]] = {verdict: Counter() for verdict in _NOT_JUDGED}
    first: dict[str, str] = {}
    by_design: Counter[str] = Counter()
    for record in records:
        if record.verdict == "not applicable" and record.message.startswith(BY_DESIGN):
            by_design[record.message.partition("\n")[0]] += record.cases
        if record.verdict in count:
            shape = re.sub(r"\d+(\.\d+)?", "#", record.message)
            first.setdefault(shape, record.message)
            count[record.verdict][shape] += record.cases
    for message, cases in by_design.most_common():
        yield f"{cases} {message}"
    for verdict, reasons in count.items():
        shown = reasons.most_common(None if whole else MOST_SHOWN)
        for shape, cases in shown:
            yield f"{cases} {verdict}: {_short(_reason(first[shape]))}"
        if rest := reasons.total() - sum(cases for _, cases in shown):
            yield f"{rest} {verdict} for {len(reasons) - len(shown)} other reasons; --matrix all shows them"


def _reason(message: str) -> str:
    """Return a reason without the words of its verdict.

    >>> _reason("refused by the library: no capacity"), _reason("limit, unproved: it hangs"), _reason("no such layout")
    ('no capacity', 'it hangs', 'no such layout')
    """
    return re.sub(r"^(refused by the library|not adapted|limit, unproved|limit): ", "", message).partition("\n")[0]


def _short(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."
