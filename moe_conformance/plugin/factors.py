"""Finds the size that a wrong factor equals, where several sizes have its value: runs a layout where they differ.

On four ranks ep, tp and dp may all be 2, and "every expert gradient is 2.000 x the expected value: ep or dp" does not
say which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moe_conformance.contract.topology import Layout
from moe_conformance.plugin.outcomes import Kept, Outcomes
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import too_large

MOST_RUNS = 8  # of a session; more failures have the same factor
_EQUAL = 1e-6


class Factors:
    """Distinguishes sizes of one value by further runs."""

    def __init__(self, run: Run, outcomes: Outcomes) -> None:
        """Run on those ranks."""
        self._run, self._outcomes, self._runs = run, outcomes, 0

    def with_size(
        self, ended: Ending, case: Case, when: Callable[[Workload], bool] | None, judge: Callable[[Case, Kept], Ending]
    ) -> Ending:
        """Return how a check ended, with the size that its factor equals on a further layout too.

        Unchanged if the error is no factor, if only one size has its value, if no layout with as few ranks
        distinguishes the sizes, or if the further run has no factor.

        Args:
            ended: How it ended.
            case: What it read.
            when: Whether the check reads a workload.
            judge: Returns how it ends on the outcome of another case.
        """
        if not ended.ratio or self._runs == MOST_RUNS:
            return ended
        names = fitting(ended.ratio, sizes_of(case.workload))
        other = self._case(case, names, when) if len(names) > 1 else None
        if other is None:
            return ended
        self._runs += 1
        (outcome,) = self._outcomes.steps([other.workload])
        again = judge(other, Kept(other, outcome))
        sizes = sizes_of(other.workload)
        left = [name for name in fitting(again.ratio, sizes) if name in names] if again.ratio else []
        if not left:
            return ended
        where = ", ".join(f"{name.removeprefix('1/')} = {sizes[name.removeprefix('1/')]}" for name in names)
        note = f"; on {other.cell.layout.name}, where {where}, it is {again.ratio:.3f} x: {' or '.join(left)}"
        return replace(ended, message=ended.message + note)

    def _case(self, case: Case, names: Sequence[str], when: Callable[[Workload], bool] | None) -> Case | None:
        """Return the same workload of the variant on the layout where most of the named sizes differ."""
        plan = Plan(self._run.backend, self._run.options.device, "full")

        def different(layout: Layout) -> int:
            sizes = layout.sizes() | {"K": case.workload.config.top_k}
            return len({sizes[name.removeprefix("1/")] for name in names})

        cells = [cell for cell in plan.cells if cell.variant == case.cell.variant and cell.layout != case.cell.layout]
        cells = [cell for cell in cells if not too_large(cell.layout, self._run.options.ranks)]
        for cell in sorted(cells, key=lambda cell: (-different(cell.layout), cell.layout.world)):
            if different(cell.layout) < 2:
                return None
            for found in plan.of_cell(case, cell):
                if not broken(cell.limits, found.workload, cell.device) and (when is None or when(found.workload)):
                    return found
        return None


def sizes_of(workload: Workload) -> Mapping[str, int]:
    """Return the sizes that a wrong factor is likely to be, by name."""
    return {**workload.layout.sizes(), "K": workload.config.top_k}


def fitting(ratio: float, sizes: Mapping[str, int]) -> list[str]:
    """Return the sizes that have the value of a factor, or one over it.

    >>> fitting(2.0, {"ep": 2, "tp": 1, "dp": 4, "K": 2}), fitting(0.25, {"ep": 2, "dp": 4})
    (['ep', 'K'], ['1/dp'])
    """
    found = [name for name, size in sizes.items() if size != 1 and abs(ratio - size) <= _EQUAL * size]
    return found + [f"1/{name}" for name, size in sizes.items() if size > 1 and abs(ratio * size - 1) <= _EQUAL]
