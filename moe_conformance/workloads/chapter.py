"""Scripts that belong together: how a file of workloads offers them, in a tuple `CHAPTERS`."""

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
    """The scripts of one chapter, and which runs they are.

    A surface that has nothing to do with the exchange is asked once, with the backend's first variant. `quick` has the
    layouts on which the quick profile asks for what the way in which ranks are folded changes little.
    """

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    draw: Callable[[str, Layout, Profile], Iterator[Workload]]
    variants: Literal["first", "every"] = "first"
    quick: tuple[Layout, ...] = quick_layouts()

    def drawn(self, variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
        """Yield what a profile has of it on a layout."""
        if profile == "full" or layout in self.quick:
            yield from self.draw(variant, layout, profile)


SINGLE, EP2, EP2_EDP2 = Layout(1), Layout(2, ep=2), Layout(4, ep=2)
EP2_ETP2, TP2_EP2 = Layout(4, ep=2, etp=2), Layout(4, tp=2, ep=2)
SMALL = (SINGLE, EP2, EP2_ETP2)
