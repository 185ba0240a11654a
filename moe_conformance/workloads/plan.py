"""Which cases there are: variants x layouts x the pinned corpus, in the order in which they run best.

Sessions of a backend are kept per layout, so the layout varies slowest; an outcome is kept for one case, so all checks
of a case come together. Workloads are drawn when a check of their run asks for them: a run of few checks starts soon.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import cast

import torch

from moe_conformance.contract import Backend, Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import recipes as corpus
from moe_conformance.workloads import routers as routing
from moe_conformance.workloads import scripts, virtual
from moe_conformance.workloads.chapter import Chapter
from moe_conformance.workloads.records.features import cell_limits, traits
from moe_conformance.workloads.records.runs import DrawnStep, ExchangeStep, ExpertsStep, RouterStep, Run, RunSpec
from moe_conformance.workloads.records.workload import Asynchrony, Workload
from moe_conformance.workloads.selection import power, profiles, stored, turns
from moe_conformance.workloads.selection.power import Place
from moe_conformance.workloads.selection.shards import Shard

VIRTUAL = "virtual"  # the profile of hundreds of ranks that are threads of one process
SMOKE = "smoke"  # the profile of the quick one's first ten seconds


@dataclass(frozen=True)
class Cell:
    """A variant of the backend on a layout, and what the backend declares of it."""

    variant: str
    layout: Layout
    limits: tuple[Limit, ...]
    device: str
    number: int  # in running order

    @cached_property
    def id(self) -> str:
        """For example `alltoall-ep2`."""
        return f"{self.variant}-{self.layout.name}"


@dataclass(frozen=True)
class Case:
    """One run on ranks: a workload in its cell."""

    cell: Cell
    workload: Workload
    place: tuple[int, int]  # among those of its cell

    @cached_property
    def id(self) -> str:
        """For example `alltoall-ep2-uneven`."""
        return f"{self.cell.id}-{self.workload.name}"


@dataclass(frozen=True)
class _Source:
    """Workloads that are drawn together, whose runs are among some."""

    runs: Collection[Run]
    draw: Callable[[Layout], Sequence[Workload]]
    alone: Callable[[Layout], bool] = lambda layout: False  # whether the first variant alone meets them


@dataclass(frozen=True)
class Plan:
    """All cells and cases of a backend on a device in a profile, applicable on this machine or not.

    The quick profile runs the cases of its pool that are stored (`workloads.selection.stored`). The full profile runs
    these and, of every variant, every workload on one layout of each number of ranks (`workloads.selection.turns`).
    The virtual profile runs all. The smoke profile runs those cases of the quick one that come first in the order of
    power (`workloads.selection.power`), and nothing beside cases.
    """

    backend: Backend
    device: str
    profile: str
    virtual_ranks: int = virtual.WORLDS[-1]  # of the virtual profile: drawing workloads for larger worlds takes long
    asynchrony: Asynchrony = "plain"  # of all cases that do not name another
    rotation: Shard | None = None  # run this part of what the profile leaves out, and nothing else
    kept: frozenset[str] = frozenset()  # ids of cases that run, stored or not

    @property
    def virtual(self) -> bool:
        """Whether ranks are virtual."""
        return self.profile == VIRTUAL

    @property
    def cases_alone(self) -> bool:
        """Whether nothing runs beside cases: Hypothesis draws, and groups are asked for, in the profile itself."""
        return self.rotation is not None or self.profile == SMOKE

    @property
    def _base(self) -> profiles.Profile:
        """The profile as which workloads are drawn on real ranks."""
        return "quick" if self.profile == SMOKE else cast(profiles.Profile, self.profile)

    @cached_property
    def power(self) -> Mapping[Place, int]:
        """Which cases come first, numbered."""
        return {} if self.virtual else power.numbers(self.backend.variants)

    @cached_property
    def _smoke(self) -> Mapping[str, Collection[str]]:
        """Names of the workloads of the smoke profile, by layout."""
        found: dict[str, set[str]] = {}
        for _, layout, name in self._first:
            found.setdefault(layout, set()).add(name)
        return found

    @cached_property
    def _first(self) -> Collection[Place]:
        return power.smoke(self.backend.variants)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every variant on every layout, layout by layout, but for those that few layouts will do for."""
        limits = {variant: tuple(self.backend.limits(variant)) for variant in self.backend.variants}
        layouts = (*profiles.layouts(self._base), *self._beside)
        if self.virtual:
            layouts = tuple(layout for layout in virtual.layouts() if layout.world <= self.virtual_ranks)
        tried = [(v, layout) for layout in layouts for v in self.backend.variants if self._runs(v, layout)]
        return tuple(Cell(v, layout, limits[v], self.device, number) for number, (v, layout) in enumerate(tried))

    @cached_property
    def _beside(self) -> Mapping[Layout, Collection[str]]:
        """Layouts of which only the named workloads run."""
        return {} if self.virtual else scripts.beside(self._base)

    def _runs(self, variant: str, layout: Layout) -> bool:
        """Whether a variant is tried on a layout.

        A backend may name variants that share most of what they do with others (`Backend.sampled`). In the quick
        profile they are tried on one rank, on two, and where experts are spread over ranks and cut over ranks as well;
        in the full one they take turns with each other. Hypothesis draws no workloads for them.
        """
        if self.profile == SMOKE and layout.name not in self._smoke:
            return False
        if variant in self._sampled and self._base == "quick":
            return layout in profiles.sampled_layouts()
        return not self.virtual or virtual.suits(layout, variant == self.backend.variants[0])

    @cached_property
    def _sampled(self) -> tuple[str, ...]:
        return () if self.virtual else tuple(getattr(self.backend, "sampled", ()))

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every case that runs, in running order."""
        places = product(self.cells, range(len(self._sources)))
        return tuple(case for cell, number in places for case in self._cases(number, cell))

    @cached_property
    def pool(self) -> tuple[Case, ...]:
        """Every workload in every cell, in running order: what a profile selects from."""
        places = product(self.cells, range(len(self._sources)))
        return tuple(case for cell, number in places for case in self._pool_of(number, cell))

    @cached_property
    def _selection(self) -> stored.Selection:
        return stored.of(self.backend.name, self.backend.variants)

    def selected(self, case: Case) -> bool:
        """Whether the profile runs a case of the pool.

        Of a cell that is refused the pool has what proves it, and all of that runs. With native's selection all that is
        in bfloat16 runs on the layouts of quick. What rotates runs where the backend's own file has it.
        """
        cell, name = case.cell, case.workload.name
        if self.profile == SMOKE and (cell.variant, cell.layout.name, name) not in self._first:
            return False
        if self.virtual or case.id in self.kept or cell_limits(cell.limits, cell.layout):
            return True
        if case.workload.rotates and self.profile != "full":
            return name in self._selection.own and self._selection.holds(cell.variant, cell.layout.name, name)
        bfloat16 = case.workload.config.dtype == torch.bfloat16 and cell.layout in profiles.quick_layouts()
        borrowed = bfloat16 and name in self._selection.borrowed
        chosen = borrowed or self._selection.holds(cell.variant, cell.layout.name, name)
        if self.profile == "full":
            return chosen or name in self._in_turn(case.place[0], cell)
        return chosen or name not in self._selection.known

    def _in_turn(self, number: int, cell: Cell) -> frozenset[str]:
        """Return the names of the workloads of a source whose turn it is in a cell.

        Cells of one variant and equally many ranks take turns; so do those of all variants that are sampled.
        """
        if (number, cell.number) not in self._turns:
            variants = self._sampled if cell.variant in self._sampled else (cell.variant,)
            alike = [each for each in self.cells if each.variant in variants and each.layout.world == cell.layout.world]
            alike = [each for each in alike if not cell_limits(each.limits, each.layout)]
            shown = [
                {case.workload.name: frozenset(_told_apart(case.workload)) for case in self._pool_of(number, each)}
                for each in alike
            ]
            found = turns.taken(shown, self.backend.variants.index(variants[0]))
            self._turns.update({(number, each.number): some for each, some in zip(alike, found, strict=True)})
        return self._turns[number, cell.number]

    def _runs_now(self, case: Case) -> bool:
        """Whether a case of the pool is run."""
        if self.rotation is None:
            return self.selected(case)
        return turns.lot(case.id, self.rotation.count) == self.rotation.index and not self.selected(case)

    @cached_property
    def _sources(self) -> tuple[_Source, ...]:
        """All that is drawn, in running order.

        A router does not depend on the exchange, so that it runs with the first variant only; nor on the number of
        ranks, so that it does not run on virtual ones.
        """
        variant, profile = self.backend.variants[0], self._base

        def usual(layout: Layout) -> Sequence[Workload]:
            return list(corpus.corpus(variant, layout, profile, partial(self._wanted, layout)))

        def routes(layout: Layout) -> Sequence[Workload]:
            asked = layout.world <= profiles.USUAL_RANKS
            return self._named(layout, routing.routing_corpus(variant, layout, profile)) if asked else []

        def of(chapter: Chapter) -> _Source:
            def draw(layout: Layout) -> Sequence[Workload]:
                if not any(self._wanted(layout, name) for name in chapter.names):
                    return []
                drawn = chapter.draw if layout in self._beside else chapter.drawn
                return self._named(layout, drawn(variant, layout, profile))

            first = chapter.variants == "first"
            return _Source(chapter.runs, draw, lambda layout: first)

        exchanged = (ExchangeStep(), ExpertsStep())
        if self.virtual:
            wide = _Source(exchanged, lambda layout: list(virtual.corpus(variant, layout)), virtual.wide)
            return wide, _Source(exchanged, lambda layout: list(virtual.sparse(variant, layout)))
        routers = _Source((RouterStep(),), routes, lambda layout: True)
        return _Source(exchanged, usual), routers, *map(of, scripts.chapters())

    def _named(self, layout: Layout, drawn: Iterable[Workload]) -> list[Workload]:
        """Leave out what does not run on a layout of which only some workloads do."""
        return [each for each in drawn if self._wanted(layout, each.name)]

    def _wanted(self, layout: Layout, name: str) -> bool:
        """Whether a workload runs on a layout in some cell."""
        names = self._beside.get(layout, (name,))
        return name in names and (self.profile != SMOKE or name in self._smoke.get(layout.name, ()))

    @cached_property
    def _turns(self) -> dict[tuple[int, int], frozenset[str]]:
        return {}

    @cached_property
    def _drawn(self) -> dict[tuple[int, Layout], Sequence[Workload]]:
        return {}

    @cached_property
    def _pools(self) -> dict[tuple[int, int], tuple[Case, ...]]:
        return {}

    @cached_property
    def _each(self) -> dict[tuple[int, int, int], Case]:
        return {}

    @cached_property
    def _made(self) -> dict[tuple[int, int], tuple[Case, ...]]:
        return {}

    @cached_property
    def _by_run(self) -> dict[RunSpec, tuple[Case, ...]]:
        return {}

    def _cases(self, number: int, cell: Cell) -> tuple[Case, ...]:
        """Return the cases of a source in a cell that run, the same ones each time."""
        if (number, cell.number) not in self._made:
            drawn = enumerate(self._share(number, cell))
            asked = [(index, each) for index, each in drawn if self._runs_now(Case(cell, each, (number, index)))]
            self._made[number, cell.number] = tuple(self._case(number, cell, index, each) for index, each in asked)
        return self._made[number, cell.number]

    def _pool_of(self, number: int, cell: Cell) -> tuple[Case, ...]:
        """Return the cases of a source in a cell, those that do not run as well."""
        if (number, cell.number) not in self._pools:
            drawn = enumerate(self._share(number, cell))
            self._pools[number, cell.number] = tuple(self._case(number, cell, index, each) for index, each in drawn)
        return self._pools[number, cell.number]

    def _case(self, number: int, cell: Cell, index: int, workload: Workload) -> Case:
        """Return a case of the pool, the same one each time. Most are never asked for: only the others are made."""
        place = (number, cell.number, index)
        if place not in self._each:
            made = self._as_asked(workload.through(cell.variant))
            self._each[place] = Case(cell, made, (number, index))
        return self._each[place]

    def _share(self, number: int, cell: Cell) -> Sequence[Workload]:
        """Return the workloads that a cell gets of those of a source."""
        source = self._sources[number]
        if source.alone(cell.layout) and cell.variant != self.backend.variants[0]:
            return []
        workloads = self._workloads(number, cell.layout)
        if not self.virtual and cell_limits(cell.limits, cell.layout):
            # All are refused alike: the first of a run, and of what the table of exchanges tells apart, proves it.
            others = [other for other in range(number) if {*self._sources[other].runs} & {*source.runs}]
            told = {_told_apart(case.workload) for other in others for case in self._pool_of(other, cell)}
            first = {_told_apart(each): each for each in reversed(workloads)}
            workloads = [each for each in reversed(first.values()) if _told_apart(each) not in told]
        return workloads

    def _workloads(self, number: int, layout: Layout) -> Sequence[Workload]:
        """Return the workloads of a source on a layout, drawn once: variants meet the same ones."""
        if (number, layout) not in self._drawn:
            self._drawn[number, layout] = self._sources[number].draw(layout)
        return self._drawn[number, layout]

    def forget(self) -> None:
        """Let go of all cases: those that nobody else holds are drawn again when they are asked for."""
        for held in (self._drawn, self._each, self._pools, self._made, self._by_run):
            held.clear()

    def _as_asked(self, workload: Workload) -> Workload:
        if self.asynchrony == "plain" or workload.asynchrony != "plain" or workload.layout.world == 1:
            return workload
        return replace(workload, asynchrony=self.asynchrony)

    def of(
        self, run: RunSpec, when: Callable[[Workload], bool] | None, without: Collection[str] = frozenset()
    ) -> list[Case]:
        """Return the cases that a check of a run reads, those of the cells `without` left out."""
        asked = (case for case in self._of_run(run) if case.cell.id not in without)
        return [case for case in asked if when is None or when(case.workload)]

    def _of_run(self, run: RunSpec) -> Iterator[Case]:
        if run not in self._by_run:
            self._by_run[run] = tuple(case for cell in self.cells for case in self.in_cell(run, cell))
        yield from self._by_run[run]

    def in_cell(self, run: RunSpec, cell: Cell) -> Iterator[Case]:
        """Yield the cases that do this run in a cell, of those that the profile has."""
        for number, source in enumerate(self._sources):
            if run in source.runs:
                yield from (case for case in self._cases(number, cell) if case.workload.run == run)

    def of_cell(self, case: Case, cell: Cell) -> list[Case]:
        """Return what has the name and the run of a case in another cell of this plan, selected or not."""
        return self._of_name(case.workload.run, case.workload.name, cell)

    def find(self, run: RunSpec, variant: str, layout: str, name: str) -> Case | None:
        """Return the case of a workload by names, selected or not; None if there is none."""
        cells = (cell for cell in self.cells if (cell.variant, cell.layout.name) == (variant, layout))
        return next((case for cell in cells for case in self._of_name(run, name, cell)), None)

    def _of_name(self, run: RunSpec, name: str, cell: Cell) -> list[Case]:
        pools = [self._pool_of(number, cell) for number, source in enumerate(self._sources) if run in source.runs]
        return [case for pool in pools for case in pool if (case.workload.run, case.workload.name) == (run, name)]

    def drawing(self, run: DrawnStep) -> tuple[Cell, ...]:
        """Return the cells for which Hypothesis draws workloads of a run.

        Not those of worlds larger than the usual, nor those that are refused whatever the workload, nor those that run
        a few workloads only. See `cases` for routers.
        """
        if self.cases_alone:
            return ()
        most = virtual.WORLDS[0] if self.virtual else profiles.USUAL_RANKS
        cells = tuple(
            cell
            for cell in self.cells
            if cell.layout.world <= most
            and cell.variant not in self._sampled
            and cell.layout not in self._beside
            and not cell_limits(cell.limits, cell.layout)
        )
        if not isinstance(run, RouterStep):
            return cells
        return tuple(cell for cell in cells if cell.variant == self.backend.variants[0] and not self.virtual)

    @property
    def worlds(self) -> tuple[int, ...]:
        """Worlds whose groups a backend is asked about; none is built."""
        return () if self.cases_alone else _WORLDS[self.profile]


def _told_apart(workload: Workload) -> tuple[object, ...]:
    return workload.run, *traits(workload)


# Of those up to 64: one rank, odd numbers, powers of two, and numbers with other divisors.
_WORLDS = {
    "quick": (1, 2, 3, 4, 6, 8),
    "full": (*range(1, 10), 12, 15, 16, 24, 27, 32, 36, 48, 64),
    VIRTUAL: (24, 64),
}
