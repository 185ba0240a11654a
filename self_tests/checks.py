"""Calls checks as the plug-in does it: a planted bug must be detected by the check that judges a backend."""

from __future__ import annotations

import re
from typing import Any

from moe_conformance.judging.observed.run import read
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.spec.checks import Check


def judge(check: Check, **fixtures: Any) -> Mismatch | Tally:
    """Call a check with its fixtures, of which it makes `tally` and `reading`; return what it raised or counted."""
    tally = Tally()
    try:
        if "reading" in check.arguments:
            fixtures["reading"] = read(fixtures["outcome"])
        check.function(tally=tally, **{name: fixtures[name] for name in check.arguments - {"tally"}})
    except Mismatch as mismatch:
        mismatch.size = tally.beyond or None  # as the plug-in has it
        return mismatch
    return tally


def unsized(mismatch: Mismatch) -> list[float]:
    """Return the errors that a sentence states, in allowed errors, and that are larger than the size of the failure.

    >>> mismatch = Mismatch("combine", "y is 2 instead of 1 at [0] (40 x the allowed error 0.1)")
    >>> unsized(mismatch)
    [40.0]
    """
    stated = map(float, re.findall(r"\(([\d.e+]+) x the allowed error", mismatch.sentence))
    return [each for each in stated if each > 1.01 * (mismatch.size or 0.0)]
