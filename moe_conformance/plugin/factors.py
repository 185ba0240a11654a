"""Finds the size that a wrong factor equals, where several sizes have its value: runs layouts where they differ.

On four ranks ep, tp and dp may all be 2, and "every expert gradient is 2.000 x the expected value: ep or dp" does not
say which of them is wrong. What more than two names are left for has no known cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.findings import EXPECTED, OR
from moe_conformance.plugin.outcomes import Kept, Outcomes
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import too_large

MOST_RUNS = 8  # of a session; more failures have the same factor
UNKNOWN = "no cause is known"
_RUNS_OF_A_FAILURE = 2
_MOST_NAMES = 2  # of which a message says "A or B"
_EQUAL, _DECIMALS = 1e-3, 5e-4  # a message has a ratio with three decimals
_NAME = r"(?:1/)?[A-Za-z](?:[A-Za-z *]|\d(?= [a-z]))*?"
_TOLD = re.compile(rf"(?P<ratio>[\d.e+-]+) {EXPECTED}(?P<names>{_NAME}(?:{OR}{_NAME})*)(?=[;.,()]|$)")
# What a message gives as causes of one finding: `likely cause: A; or B`.
_ALSO = "; or "
_CAUSES = re.compile(r"(?<=likely cause: )(?:(?!; largest error: |; \d+ more|\. Also: ).)*")


class Factors:
    """Distinguishes sizes of one value by further runs."""

    def __init__(self, run: Run, outcomes: Outcomes) -> None:
        """Run on those ranks."""
        self._run, self._outcomes, self._runs = run, outcomes, 0

    def with_size(
        self, ended: Ending, case: Case, when: Callable[[Workload], bool] | None, judge: Callable[[Case, Kept], Ending]
    ) -> Ending:
        """Return how a check ended, with the size that its factor equals on further layouts too.

        Names that do not follow the factor to other sizes are left out, and other causes that the further run does not
        have. Of more than two names that remain none is said. Unchanged if the message has no factor with several
        names.

        Args:
            ended: How it ended.
            case: What it read.
            when: Whether the check reads a workload.
            judge: Returns how it ends on the outcome of another case.
        """
        told = _TOLD.search(ended.message)
        if told is None or OR not in told["names"]:
            return ended
        left, ratio = told["names"].split(OR), float(told["ratio"])
        message, notes, seen = ended.message, "", [case.cell.layout]
        while len(left) > 1 and len(seen) <= _RUNS_OF_A_FAILURE and self._runs < MOST_RUNS:
            other = self._case(case, left, when, seen)
            if other is None:
                break
            self._runs += 1
            seen.append(other.cell.layout)
            (outcome,) = self._outcomes.steps([other.workload])
            again = judge(other, Kept(other, outcome))
            there = ratio_of(again)
            following = [name for name in left if there and _fits(there, valued(name, other.workload, ratio))]
            if there is None or not following:
                break
            sizes = sizes_of(other.workload)
            plain = [name.removeprefix("1/") for name in left if name.removeprefix("1/") in sizes]
            where = ", ".join(f"{name} = {sizes[name]}" for name in plain)
            how = f"it is {there:.3f} x: {OR.join(following)}" if there != 1 else "it is right"
            notes += f"; on {other.cell.layout.name}, where {where}, {how}"
            left = following
            if there != 1:
                message = _CAUSES.sub(partial(_shared, again.message), message)
        return replace(ended, message=_TOLD.sub(partial(_narrowed, told["ratio"], left), message) + notes)

    def _case(
        self, case: Case, names: Sequence[str], when: Callable[[Workload], bool] | None, seen: Collection[Layout]
    ) -> Case | None:
        """Return the same workload of the variant on the unseen layout where most of the names differ in value."""
        plan = Plan(self._run.backend, self._run.options.device, "full")
        K = case.workload.config.top_k

        def different(layout: Layout) -> int:
            sizes = {**layout.sizes(), "K": K}
            return len({_product(name.removeprefix("1/"), sizes) for name in names})

        cells = [cell for cell in plan.cells if cell.variant == case.cell.variant and cell.layout not in seen]
        cells = [cell for cell in cells if not too_large(cell.layout, self._run.options.ranks)]
        for cell in sorted(cells, key=lambda cell: (-different(cell.layout), cell.layout.world)):
            if different(cell.layout) < 2:
                return None
            for found in plan.of_cell(case, cell):
                if not broken(cell.limits, found.workload, cell.device) and (when is None or when(found.workload)):
                    return found
        return None


def ratio_of(ended: Ending) -> float | None:
    """Return the factor of a message, 1 for a check that passes; None for what has no factor."""
    if ended.verdict == "pass":
        return 1.0
    told = re.search(r"(?P<ratio>[\d.e+-]+) x the expected value", ended.message)
    return float(told["ratio"]) if told else None


def sizes_of(workload: Workload) -> Mapping[str, int]:
    """Return the sizes that a wrong factor is likely to be, by name."""
    return {**workload.layout.sizes(), "K": workload.config.top_k}


def valued(name: str, workload: Workload, otherwise: float) -> float:
    """Return the factor of a name for a workload: a size, or one over it.

    Another name, such as a number of microbatches, does not change with the layout: its factor is that of before.
    """
    size = _product(name.removeprefix("1/"), sizes_of(workload))
    if size is None:
        return otherwise
    return 1 / size if name.startswith("1/") else float(size)


def _product(name: str, sizes: Mapping[str, int]) -> int | None:
    """Return the value of a size, or of a product of sizes; None for other names."""
    factors = name.split(" * ")
    return math.prod(sizes[each] for each in factors) if set(factors) <= sizes.keys() else None


def _narrowed(ratio: str, left: Sequence[str], told: re.Match[str]) -> str:
    """Return a factor with the names that are left, or with none if there are more than two."""
    names = told["names"].split(OR)
    if told["ratio"] == ratio:
        names = [name for name in names if name in left] or names
    return f"{told['ratio']} {EXPECTED}{OR.join(names) if len(names) <= _MOST_NAMES else UNKNOWN}"


def _shared(elsewhere: str, causes: re.Match[str]) -> str:
    """Return the causes that are factors, or that another message has too; all of them if there are none."""
    parts = causes[0].split(_ALSO)
    return _ALSO.join([part for part in parts if EXPECTED in part or part in elsewhere] or parts)


def _fits(ratio: float, value: float) -> bool:
    return abs(ratio - value) <= _EQUAL * value + _DECIMALS
