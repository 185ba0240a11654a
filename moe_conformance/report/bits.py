"""Whether two runs that must agree within rounding have the same bits: a fact that a report states, and no verdict."""

from __future__ import annotations

from collections.abc import Iterable

from moe_conformance.report.records import Record


def fact(records: Iterable[Record]) -> dict[str, int] | None:
    """Return how many elements of two runs were compared within rounding, and how many have other bits.

    None where no two runs were compared so.
    """
    counted = [record.bits for record in records if record.bits[0]]
    if not counted:
        return None
    return {"elements": sum(of for of, _ in counted), "other": sum(other for _, other in counted)}


def line(records: Iterable[Record]) -> str:
    """Return one sentence for all requirements that compare two runs within rounding; "" if none was judged so."""
    by_requirement: dict[str, list[Record]] = {}
    for record in records:
        for each in record.requirements if record.bits[0] else ():
            by_requirement.setdefault(each, []).append(record)
    if not by_requirement:
        return ""
    facts = {each: fact(own) or {} for each, own in sorted(by_requirement.items())}
    other = [f"{each} {own['other']} of {own['elements']}" for each, own in facts.items() if own["other"]]
    same = [each for each, own in facts.items() if not own["other"]]
    said = [f"other bits, within rounding: {', '.join(other)} elements"] if other else []
    return "two runs compared: " + "; ".join(said + ([f"equal bits: {', '.join(same)}"] if same else []))
