"""The checks of distributed_tests as they stand, by requirement.

They are loaded by name, as the plug-in does it: a planted bug must be detected by the check that judges a backend, not
by a copy.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from moe_conformance.judging.observed.run import read
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.plugin import collecting
from moe_conformance.workloads.records.runs import RunSpec
from moe_conformance.workloads.records.workload import Workload


@dataclass(frozen=True)
class Check:
    """One test function, ready to be called with its fixtures."""

    function: Callable[..., None]
    run: RunSpec
    when: Callable[[Workload], bool] | None

    def reads(self, workload: Workload) -> bool:
        """Whether it judges runs of this workload."""
        return self.run == workload.run and (self.when is None or self.when(workload))

    def needs(self) -> set[str]:
        """Names of its fixtures."""
        return set(inspect.signature(self.function).parameters)


@cache
def checks() -> dict[str, list[Check]]:
    """Return all checks by the requirement that they cite."""
    found: dict[str, list[Check]] = {}
    for path in sorted(collecting.FOLDER.glob("test_*.py")):
        for function in _functions(importlib.import_module(f"{collecting.PACKAGE}.{path.stem}")):
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "requirement":
                    for each in mark.args:
                        found.setdefault(each, []).append(Check(function, mark.kwargs["run"], mark.kwargs["when"]))
    return found


def judge(check: Check, **fixtures: Any) -> Mismatch | Tally:
    """Call a check with its fixtures, of which it makes `tally` and `reading`; return what it raised or counted."""
    tally = Tally()
    try:
        if "reading" in check.needs():
            fixtures["reading"] = read(fixtures["outcome"])
        check.function(tally=tally, **{name: fixtures[name] for name in check.needs() - {"tally"}})
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


def _functions(module: ModuleType) -> Iterator[Callable[..., None]]:
    """Yield test functions, those of classes bound."""
    for value in list(vars(module).values()):
        if inspect.isclass(value) and value.__name__.startswith("Test"):
            yield from (getattr(value(), name) for name in vars(value) if name.startswith("test_"))
        elif inspect.isfunction(value) and value.__name__.startswith("test_"):
            yield value
