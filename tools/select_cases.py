"""Choose the cases of the quick profile and store them.

    python -m tools.select_cases BACKEND [--report DIR]... [--anew]

What a selection must hold is a set of demands (`demands`), and the choice is greedy: the case that meets most demands
for its cost comes first, until all are met; then what the others have made needless goes. What is stored already stays,
if it still exists, unless the choice is made anew. So a new workload, check or planted bug takes seconds and no run.

A report tells which verdicts there are to keep. Those of everything come from two runs:

    moe-conformance run --backend native --report .report/selected
    moe-conformance run --backend native --rotation 1/1 --report .report/rest
    python -m tools.select_cases native --anew --report .report/selected --report .report/rest
    python -m tools.second_cases
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from moe_conformance.backends import registry
from moe_conformance.report import result
from moe_conformance.spec.checks import Check, checks
from moe_conformance.workloads.plan import Case, Cell, Plan
from moe_conformance.workloads.records.features import broken, cell_limits, traits
from moe_conformance.workloads.selection.stored import FOLDER, GENERAL, read
from self_tests.workloads.second_cases import declared, second

Place = tuple[str, str, str]  # variant, layout, workload
Demand = tuple[object, ...]

_PLAINEST = "even"
_PLAINEST_LAYERS = ("layer-even", "layer-normalised-even")  # all that a library's own gate may allow of a layer


@dataclass(frozen=True)
class Ran:
    """What a report tells of a check on a case."""

    place: Place
    check: str
    verdict: str
    runs: int  # on ranks, those of twins included


def place_of(case: Case) -> Place:
    """Return where a case is."""
    return case.cell.variant, case.cell.layout.name, case.workload.name


def reported(folder: Path) -> Iterator[Ran]:
    """Yield what the report in a folder tells of cases that were run."""
    for record in result.read(folder).records:
        if record.variant and record.layout and record.workload and record.verdict != "not run":
            yield Ran((record.variant, record.layout, record.workload), record.check, record.verdict, record.runs)


@cache
def every_check() -> tuple[Check, ...]:
    """Return each check once."""
    return tuple({check.function.__qualname__: check for check in checks()}.values())


@cache
def readers() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the checks that read a workload on a layout, given the names of both; they ask for nothing of the variant.

    Native has all workloads that there are on all quick layouts.
    """
    workloads = {place_of(case)[1:]: case.workload for case in Plan(registry.load(GENERAL), "cpu", "quick").pool}
    return {
        place: tuple(check.function.__qualname__ for check in every_check() if check.reads(workload))
        for place, workload in workloads.items()
    }


@cache
def chapters() -> dict[str, str]:
    """Return the module of every check."""
    return {check.function.__qualname__: check.function.__module__ for check in every_check()}


@cache
def repeating() -> frozenset[str]:
    """Return the checks that run equivalent runs of what they read."""
    return frozenset(check.function.__name__ for check in every_check() if "twins" in check.arguments)


def open_cases(plan: Plan) -> tuple[Case, ...]:
    """Return the cases among which there is a choice: of a cell that is refused whatever is asked, all run."""
    return tuple(case for case in plan.pool if not cell_limits(case.cell.limits, case.cell.layout))


def scopes(plan: Plan, check: str, cell: Cell) -> tuple[tuple[str, object], ...]:
    """Return what a check has to be met in of that which a cell is: its variant, and its layout.

    Variants that are sampled count as one on one layout. For a check that runs equivalent runs the layouts of one
    number of ranks are one.
    """
    if cell.variant in getattr(plan.backend, "sampled", ()):
        return (("sampled", ""),)
    layout = cell.layout.world if check.rpartition(".")[2] in repeating() else cell.layout.name
    return (cell.variant, ""), ("", layout)


def _layout(plan: Plan, cell: Cell) -> str:
    return "" if cell.variant in getattr(plan.backend, "sampled", ()) else cell.layout.name


def demands(plan: Plan) -> dict[Place, set[Demand]]:
    """Return what each case would meet of what a selection has to hold, whatever the verdicts.

    Every workload once. With native's first variant every check that could read a case reads one on one rank, since
    that is what backends without a selection run there. Every check that could read a case reads one with every
    variant and one on every layout, within the declared limits and beyond them; of variants that are sampled, with
    one of them on one layout; a check that runs equivalent runs, each as dear as a case, on one layout of each number
    of ranks. Of every chapter, which is the module of a check, some check reads a case with every variant on every
    layout. Every check meets every trait that it could meet; so does every variant on every layout, with every run.
    The plainest workload runs everywhere, where variants are sampled on one layout: what is seen there is the easiest
    to understand. The plainest layers run on every layout with native's first variant, and so do those of backends
    without a selection: their reductions of gradients are seen then on each layout that they take.
    Workloads of pairs of options meet nothing: the rotation has them, unless a planted bug names one.
    """
    found: dict[Place, set[Demand]] = {}
    for case in open_cases(plan):
        variant, layout, name = place = place_of(case)
        if case.workload.rotates:  # it runs in the rotation, or is required
            found[place] = set()
            continue
        within = broken(case.cell.limits, case.workload, case.cell.device) is None
        found[place] = {("workload", name)}
        for check in readers()[layout, name]:
            found[place].update(("check", check, *each, within) for each in scopes(plan, check, case.cell))
            found[place].add(("chapter", chapters()[check], variant, _layout(plan, case.cell), within))
            found[place].update(("trait", check, trait, within) for trait in traits(case.workload))
            if plan.backend.name == GENERAL and case.cell.layout.world == 1 and variant == plan.backend.variants[0]:
                found[place].add(("one rank", check, within))
        if name == _PLAINEST:
            found[place].add(("plainest", variant, _layout(plan, case.cell)))
        if name in _PLAINEST_LAYERS and plan.backend.name == GENERAL and variant == plan.backend.variants[0]:
            found[place].add(("plainest layer", name, case.cell.layout.name))
        for trait in traits(case.workload):
            found[place].add(("trait", case.workload.run, variant, _layout(plan, case.cell), trait, within))
    return found


def required(backend: str) -> set[Place]:
    """Return the cases that are selected whatever else: of every planted bug the one it names, and a second one."""
    return {*declared().values(), *second().values()} if backend == GENERAL else set()


def costs(plan: Plan, ran: Sequence[Ran]) -> dict[Place, float]:
    """Return about how many seconds each case takes."""
    items, runs = Counter(each.place for each in ran), Counter[Place]()
    for each in ran:
        runs[each.place] += each.runs
    alike: dict[str, int] = {}  # of a case that no report knows: as many as other variants and layouts took at most
    for (_, _, workload), count in runs.items():
        alike[workload] = max(count, alike.get(workload, 1))
    found = {}
    for case in open_cases(plan):
        place, config = place_of(case), case.workload.config
        rows = sum(sum(tokens) for tokens in case.workload.tokens) * config.top_k
        size = 1 + rows * config.hidden / 2e4 + config.experts / 100
        found[place] = (
            max(1, runs[place] or alike.get(place[2], 1)) * (0.01 + 0.012 * case.cell.layout.world) * size
            + 0.002 * items[place]
        )
    return found


def choose(
    meets: Mapping[Place, Iterable[Demand]], cost: Mapping[Place, float], given: Iterable[Place], kept: Iterable[Place]
) -> set[Place]:
    """Return places that meet all demands: all that are given, what helps of those to be kept, and the cheapest others.

    >>> meets = {("v", "a", "x"): {1, 2}, ("v", "a", "y"): {2, 3}, ("v", "a", "z"): {1}}
    >>> sorted(choose(meets, dict.fromkeys(meets, 1.0), [], []))
    [('v', 'a', 'x'), ('v', 'a', 'y')]
    >>> sorted(choose(meets, dict.fromkeys(meets, 1.0), [("v", "a", "z")], []))
    [('v', 'a', 'y'), ('v', 'a', 'z')]
    """
    chosen = {place for place in (*given, *kept) if place in meets}
    met = Counter(demand for place in chosen for demand in meets[place])
    heap = [(-len(set(meets[place])) / cost[place], place) for place in meets if place not in chosen]
    heapq.heapify(heap)
    while heap:
        _, place = heapq.heappop(heap)
        gain = sum(not met[demand] for demand in meets[place])
        if not gain:
            continue
        worth = -gain / cost[place]
        if heap and worth > heap[0][0]:
            heapq.heappush(heap, (worth, place))
            continue
        chosen.add(place)
        met.update(meets[place])
    for place in sorted(chosen - {*given} - {*kept}, key=lambda place: (-cost[place], place)):
        if all(met[demand] > 1 for demand in meets[place]):
            chosen.remove(place)
            met.subtract(meets[place])
    return chosen


def store(backend: str, variants: Sequence[str], chosen: Iterable[Place], order: Sequence[str]) -> None:
    """Write the file of a backend: variants and layouts in running order, workloads by name."""
    by_variant: dict[str, dict[str, list[str]]] = {variant: defaultdict(list) for variant in variants}
    for variant, layout, workload in sorted(chosen, key=lambda place: order.index(place[1])):
        by_variant[variant][workload].append(layout)
    lines = ["# The cases of the quick profile. Written by tools/select_cases.py; see docs/decisions/0009."]
    for variant, workloads in by_variant.items():
        lines += ["", f'["{variant}"]']
        lines += [f'{workload} = "{" ".join(layouts)}"' for workload, layouts in sorted(workloads.items())]
    (FOLDER / f"{backend}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Choose for one backend, store it, and tell how much it is."""
    torch.set_num_threads(1)  # drawing asks small oracles, which take longer on several
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", help="a registered name")
    parser.add_argument("--report", action="append", default=[], type=Path, help="folder of a report of the backend")
    parser.add_argument("--anew", action="store_true", help="forget what is stored")
    given = parser.parse_args()
    plan = Plan(registry.load(given.backend), "cpu", "quick")
    meets = demands(plan)
    cells = {(cell.variant, cell.layout.name): cell for cell in plan.cells}
    ran = [each for folder in given.report for each in reported(folder) if each.place in meets]
    for each in ran:
        cell = cells[each.place[:2]]
        meets[each.place].update(("verdict", each.check, *of, each.verdict) for of in scopes(plan, each.check, cell))
    stored = {} if given.anew else read(given.backend)
    kept = [(v, layout, name) for v, names in stored.items() for name, layouts in names.items() for layout in layouts]
    chosen = choose(meets, costs(plan, ran), required(given.backend), kept)
    order = list(dict.fromkeys(cell.layout.name for cell in plan.cells))
    store(given.backend, plan.backend.variants, chosen, order)
    always = len(plan.pool) - len(meets)
    met = sum(each.place in chosen for each in ran)
    print(f"{given.backend}: {len(chosen)} of {len(meets)} cases are selected, and {always} that are refused all run")
    print(f"of {len(ran)} items in the reports {met} are selected; kept {len(kept)}, gone {len({*kept} - chosen)}")


if __name__ == "__main__":
    main()
