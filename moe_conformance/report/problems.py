"""What fails a run in addition to its items: nothing passed, no rows moved, features never drawn, a wrong waiver.

With --strict also what the adapter excludes by its own word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moe_conformance.report import drawn
from moe_conformance.report.own_word import own_word
from moe_conformance.report.records import FAILING, Record
from moe_conformance.report.standing import JUDGED
from moe_conformance.waiving import Item, Waivers
from moe_conformance.workloads.records.told import MOVES

_DID_NOT_RUN = ("not applicable", "not run")


def of_whole(
    records: Sequence[Record], waivers: Waivers, *, filtered: bool, full: bool, strict: bool, spread: bool = False
) -> Iterator[str]:
    """Yield the problems of a run that ended.

    Args:
        records: Of all its items.
        waivers: Of the backend.
        filtered: Only a part was requested, so that a waiver may have had no item.
        full: It was the full profile, so that a waiver without any item is unused.
        strict: A SHOULD that is not kept fails, so that a waiver of it can be used; so does what is excluded.
        spread: The run had several ranks, and no floor defines what must pass on them.
    """
    if not filtered:
        ran = [item_of(record) for record in records if record.verdict not in _DID_NOT_RUN]
        used = [record.waiver for record in records if record.verdict in ("waived", "unexpected pass")]
        yield from waivers.misnamed(record.item for record in records)
        yield from waivers.in_use(strict).unused(ran, used, full)
    yield from drawn.problems(records)
    if not any(record.verdict == "pass" for record in records):
        if not any(record.verdict in FAILING for record in records):
            yield "no check passed"
    elif spread and not filtered and not any(_moved_rows(record) for record in records):
        others = sum(record.verdict in JUDGED and _spread(record) for record in records)
        of_others = f"; {others} checks of routers, losses or rules on such layouts move no rows" if others else ""
        yield (
            "no exchange and no layer was judged on a layout with ep > 1, though there were several ranks: such a run "
            "says nothing of expert parallelism; an adapter that has none says so with `single_rank = True`" + of_others
        )
    if strict and (excluded := own_word(records).sentence):
        yield f"--strict allows no exclusion that nothing proves; {excluded}"


def _moved_rows(record: Record) -> bool:
    """Whether an exchange or a layer was judged where experts are spread over ranks."""
    return record.verdict in JUDGED and MOVES in record.traits and _spread(record)


def _spread(record: Record) -> bool:
    """Whether it is of a layout where experts are spread over ranks."""
    return re.search(r"(^|-)ep\d", record.layout or "") is not None


def item_of(record: Record) -> Item:
    """Return the item with which waivers are compared."""
    if record.variant is None or record.layout is None:
        return Item.of_groups(record.item, record.requirements)
    return Item(record.item, record.requirements, record.variant, record.layout, record.workload)
