"""Which cases there are: variants x layouts x the pinned corpus, in the order in which they run best.

Sessions of a backend are kept per layout, so the layout varies slowest; an outcome is kept for one case, so all checks
of a case come together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import cast

from moe_conformance.contract import Backend, Limit
from moe_conformance.topology import Layout
from moe_conformance.waivers import DRAWN_WITH
from moe_conformance.workloads import corpus, distribution, golden, routing, scripts, virtual
from moe_conformance.workloads.features import cell_limits, traits
from moe_conformance.workloads.records import Asynchrony, Workload

VIRTUAL = "virtual"  # the profile of hundreds of ranks that are threads of one process


@dataclass(frozen=True)
class Cell:
    """A variant of the backend on a layout, and what the backend declares of it."""

    variant: str
    layout: Layout
    limits: tuple[Limit, ...]
    device: str

    @cached_property
    def id(self) -> str:
        """For example `alltoall-ep2`."""
        return f"{self.variant}-{self.layout.name}"


@dataclass(frozen=True)
class Case:
    """One run on ranks: a workload in its cell."""

    cell: Cell
    workload: Workload

    @cached_property
    def id(self) -> str:
        """For example `alltoall-ep2-uneven`."""
        return f"{self.cell.id}-{self.workload.name}"


@dataclass(frozen=True)
class Plan:
    """All cells and cases of a backend on a device in a profile, applicable on this machine or not."""

    backend: Backend
    device: str
    profile: str
    virtual_ranks: int = virtual.WORLDS[-1]  # of the virtual profile: drawing workloads for larger worlds takes long
    asynchrony: Asynchrony = "plain"  # of all cases that do not name another

    @property
    def virtual(self) -> bool:
        """Whether ranks are virtual."""
        return self.profile == VIRTUAL

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every variant on every layout, layout by layout, but for those of which a sample will do."""
        limits = {variant: tuple(self.backend.limits(variant)) for variant in self.backend.variants}
        layouts = (*corpus.layouts(cast(corpus.Profile, self.profile)), *self._beside)
        if self.virtual:
            layouts = tuple(layout for layout in virtual.layouts() if layout.world <= self.virtual_ranks)
        return tuple(
            Cell(variant, layout, limits[variant], self.device)
            for layout in layouts
            for variant in self.backend.variants
            if self._runs(variant, layout)
        )

    @cached_property
    def _beside(self) -> Mapping[Layout, Collection[str]]:
        """Layouts of which only the named workloads run."""
        return corpus.quick_beside() if self.profile == "quick" else {}

    def _runs(self, variant: str, layout: Layout) -> bool:
        """Whether a variant is tried on a layout.

        A backend may name variants that share most of what they do with others (`Backend.sampled`). In the quick
        profile they run only where experts are spread over ranks and cut over ranks as well, each of them gets its part
        of the workloads, and Hypothesis draws none for them.
        """
        if variant in self._sampled:
            return layout.ep > 1 and layout.etp > 1
        return not self.virtual or virtual.suits(layout, variant == self.backend.variants[0])

    @cached_property
    def _sampled(self) -> tuple[str, ...]:
        return () if self.profile != "quick" else tuple(getattr(self.backend, "sampled", ()))

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every workload in every cell, in running order.

        A router does not depend on the exchange, so that it runs with the first variant only; nor on the number of
        ranks, so that it does not run on virtual ones. Variants meet the same workloads, which are drawn once.
        """
        made = []
        for layout, cells in groupby(self.cells, lambda cell: cell.layout):
            drawn = list(self._drawn(layout))
            for cell in cells:
                first = cell.variant == self.backend.variants[0]
                workloads = self._share(cell, [workload for alone, workload in drawn if first or not alone])
                made += [Case(cell, self._as_asked(workload.through(cell.variant))) for workload in workloads]
        return tuple(made)

    def _drawn(self, layout: Layout) -> Iterator[tuple[bool, Workload]]:
        """Yield the workloads of the first variant on a layout, each with whether it alone meets it."""
        variant, profile = self.backend.variants[0], cast(corpus.Profile, self.profile)
        if self.virtual:
            alone = virtual.wide(layout)
            yield from ((alone, workload) for workload in virtual.corpus(variant, layout))
            yield from ((False, workload) for workload in virtual.sparse(variant, layout))
            return
        if (names := self._beside.get(layout)) is not None:
            drawn = corpus.corpus(variant, layout, profile)
            yield from ((False, workload) for workload in drawn if workload.name in names)
            return
        yield from ((False, workload) for workload in corpus.corpus(variant, layout, profile))
        if layout.world <= corpus.USUAL_RANKS:
            yield from ((True, workload) for workload in routing.routing_corpus(variant, layout))
        for chapter, workload in scripts.scripts(variant, layout, profile):
            yield chapter.variants == "first", workload

    def _share(self, cell: Cell, workloads: list[Workload]) -> list[Workload]:
        """Return the workloads that a cell gets of those of its layout."""
        if cell.variant in self._sampled:
            alone = scripts.names(shared=False)
            share = [each for each in workloads if each.name not in alone]
            share = share[self._sampled.index(cell.variant) :: len(self._sampled)]
            workloads = share + [each for each in workloads if each.name in alone]
        if not self.virtual and cell_limits(cell.limits, cell.layout):
            # All are refused alike: the first of a kind, and of what the table of exchanges tells apart, proves it.
            workloads = list({(each.kind, traits(each)): each for each in reversed(workloads)}.values())[::-1]
        return workloads

    def _as_asked(self, workload: Workload) -> Workload:
        if self.asynchrony == "plain" or workload.asynchrony != "plain" or workload.layout.world == 1:
            return workload
        return replace(workload, asynchrony=self.asynchrony)

    def of(
        self, kind: str, when: Callable[[Workload], bool] | None, without: Collection[str] = frozenset()
    ) -> list[Case]:
        """Return the cases that a check of that kind reads, those of the cells `without` left out."""
        asked = (case for case in self._by_kind.get(kind, ()) if case.cell.id not in without)
        return [case for case in asked if when is None or when(case.workload)]

    @cached_property
    def _by_kind(self) -> Mapping[str, list[Case]]:
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.workload.kind, []).append(case)
        return found

    def drawing(self, kind: str) -> tuple[Cell, ...]:
        """Return the cells for which Hypothesis draws workloads of a kind.

        Not those of worlds larger than the usual, nor those that are refused whatever the workload, nor those that run
        a few workloads only. See `cases` for routers.
        """
        most = virtual.WORLDS[0] if self.virtual else corpus.USUAL_RANKS
        cells = tuple(
            cell
            for cell in self.cells
            if cell.layout.world <= most
            and cell.variant not in self._sampled
            and cell.layout not in self._beside
            and not cell_limits(cell.limits, cell.layout)
        )
        if kind != "route":
            return cells
        return tuple(cell for cell in cells if cell.variant == self.backend.variants[0] and not self.virtual)

    @property
    def worlds(self) -> tuple[int, ...]:
        """Worlds whose groups a backend is asked about; none is built, so that they need no such machine."""
        return {"quick": (2, 4, 8), "full": (2, 4, 8, 12, 16, 32, 64), VIRTUAL: (64,)}[self.profile]

    @cached_property
    def positions(self) -> dict[str, int]:
        """Running order by the id of a case; a cell comes after its cases."""
        order: dict[str, int] = {}
        for case in self.cases:
            order[case.id] = len(order)
        last = {case.cell.id: position for position, case in enumerate(self.cases)}
        return order | last


def workload_names() -> frozenset[str]:
    """Return the names of all workloads of all profiles, and what a waiver calls those that are not to be drawn."""
    recipes = {recipe.name for recipe in (*corpus.PROBE, *corpus.EXPERTS)} | virtual.names()
    drawn = {DRAWN_WITH + feature.name for feature in (*distribution.PROBE, *distribution.ROUTE)}
    return frozenset(recipes | {recipe.name for recipe in routing.ROUTERS} | {golden.NAME} | drawn | scripts.names())


def layout_names() -> tuple[str, ...]:
    """Return the names of all layouts of all profiles, in running order."""
    return tuple(dict.fromkeys(layout.name for layout in (*corpus.layouts("full"), *virtual.layouts())))


def too_large(layout: Layout, ranks: int) -> str | None:
    """Return why a layout is not applicable to that many ranks, or None."""
    if layout.problem:
        return layout.problem
    if layout.world > ranks:
        return f"{layout.name} is a layout of {layout.world} ranks, and --ranks is {ranks}"
    return None


def fitting(layouts: Sequence[Layout], ranks: int) -> list[Layout]:
    """Return the layouts that are applicable to that many ranks."""
    return [layout for layout in layouts if too_large(layout, ranks) is None]
