"""Outcomes of configurations: refused, honoured or changed openly, and which of them is allowed.

What the table of `config_rules.py` says about one configuration that breaks one rule or several.

Source: arithmetic on the table: a refusal always helps; what was built must be allowed by every rule.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from moe_conformance.reference.config_rules.rules import RULES, Settings, broken

Outcome = Literal["built", "refused", "honoured", "changed"]
FACTS = frozenset({"kernel_present", "kernel_frees_input", "versions"})


def lawful_build(asked: Settings, ran: Settings) -> bool:
    """Return whether `ran` may be what was built where `asked` was asked for; warnings are judged elsewhere.

    Rule: what runs must be allowed by every rule that it breaks, that is, honoured; and every option that has
    another value than asked must have it from an open change of a rule that `asked` breaks, made as a whole.

    Degenerate: a configuration that breaks nothing is built as asked, or wrongly. Facts (kernels present,
    versions) may differ: with overlap off, its limit is active no longer.

    >>> asked = Settings(overlap=True, ep=1, dtype="float32")
    >>> lawful_build(asked, asked), lawful_build(asked, replace(asked, overlap=False))
    (False, True)
    >>> asked = Settings(overlap=True, dtype="float32")
    >>> lawful_build(asked, asked), lawful_build(asked, replace(asked, overlap=False))
    (True, False)
    """
    warranted: set[str] = set()
    for rule in RULES:
        for change in rule.changes if rule.breaks(asked) else ():
            if all(getattr(ran, option) == value for option, value in change.items()):
                warranted.update(change)
    differ = {field.name for field in fields(asked) if getattr(asked, field.name) != getattr(ran, field.name)}
    return differ - FACTS <= warranted and all(rule.honoured for rule in RULES if rule.breaks(ran))


def outcomes(settings: Settings) -> frozenset[Outcome]:
    """List what may lawfully come of a configuration (RULE-06 to RULE-27).

    Rule: "built" if it breaks nothing; else "refused", "honoured" if it may be built as it is, and "changed"
    if an open change of every broken rule that knows one makes it allowed.

    Decides: RULE-06, RULE-07, RULE-08, RULE-09, RULE-10, RULE-11, RULE-12, RULE-13, RULE-14,
    RULE-15, RULE-16, RULE-17, RULE-18, RULE-19, RULE-20, RULE-21, RULE-22, RULE-23, RULE-24, RULE-25,
    RULE-27. Source: arithmetic on the table.

    >>> sorted(outcomes(Settings(overlap=True, overlap_shared=True, shared_experts=1)))
    ['changed', 'honoured', 'refused']
    >>> sorted(outcomes(Settings(overlap=True, ep=1, top_k=9)))
    ['refused']
    """
    if not broken(settings):
        return frozenset({"built"})
    lawful: set[Outcome] = {"refused"}
    if lawful_build(settings, settings):
        lawful.add("honoured")
    changed = settings
    for rule in RULES:
        if rule.breaks(settings) and rule.changes:
            changed = replace(changed, **rule.changes[0])
    if changed != settings and lawful_build(settings, changed):
        lawful.add("changed")
    return frozenset(lawful)
