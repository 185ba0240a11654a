"""The type of the entries of `CHAPTERS`, a tuple with which a file of workloads registers its scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.runs import Run
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile, quick_layouts


@dataclass(frozen=True)
class Chapter:
    """A group of scripts of a chapter, their runs, and the function that draws them.

    Scripts of a surface that does not depend on the exchange run with the backend's first variant only. `quick` has the
    layouts of the quick profile, which may be few where the folding of ranks changes little.
    """

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    draw: Callable[[str, Layout, Profile], Iterator[Workload]]
    variants: Literal["first", "every"] = "first"
    quick: tuple[Layout, ...] = quick_layouts()

    def drawn(self, variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
        """Yield the workloads of this chapter that a profile has on a layout."""
        if profile == "full" or layout in self.quick:
            yield from self.draw(variant, layout, profile)


SINGLE, EP2, EP2_EDP2 = Layout(1), Layout(2, ep=2), Layout(4, ep=2)
EP2_ETP2, TP2_EP2 = Layout(4, ep=2, etp=2), Layout(4, tp=2, ep=2)
SMALL = (SINGLE, EP2, EP2_ETP2)
