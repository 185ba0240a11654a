"""The pinned corpus of fixed receive budgets: batches that fit, that fit exactly, and that are one row too many.

An exchange that refuses more rows than its budget does so on all ranks, and goes on with the next microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moe_conformance.contract import Config
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus import ONE_WITHOUT, UNEVEN, Profile, Recipe, exchange_workload
from moe_conformance.workloads.records import Batch, Workload


@dataclass(frozen=True)
class Budget:
    """How to draw one workload with a budget."""

    tokens: tuple[tuple[int, ...], ...]  # of every microbatch; of rank r the entry r modulo the length
    of: int = 0  # the microbatch whose busiest rank the budget is made for
    spare: int = 0  # rows that it has more than that


OVERFLOWS: Mapping[str, Budget] = {
    "budget-exact-even": Budget(((8,),)),
    "budget-exact-uneven": Budget((UNEVEN,)),
    "budget-one-short-even": Budget(((3,), (9,), (4,)), of=1, spare=-1),
    "budget-one-short-uneven": Budget(((2, 4, 0, 3), UNEVEN, (3, 1, 4, 2)), of=1, spare=-1),
    "budget-by-turns": Budget(((24,), (2,), (6,)), of=2),
    "budget-rank-without-tokens": Budget((ONE_WITHOUT, (2, 0, 1, 3), (0, 3, 2, 1)), of=0, spare=-2),
    "budget-of-none": Budget(((0,), (3,), (0,))),
}


def overflows(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for name, asked in OVERFLOWS.items():
        schedule = " ".join(f"F{m} B{m}" for m in range(len(asked.tokens)))
        recipe = Recipe(name, turns=asked.tokens, schedule=schedule)
        workload = exchange_workload(recipe, "probe", variant, layout)
        room = busiest(workload.config, layout, workload.batches[asked.of]) + asked.spare
        yield replace(workload, kind="overflow", config=replace(workload.config, row_budget=room))


def busiest(config: Config, layout: Layout, ranks: tuple[Batch, ...]) -> int:
    """Return the most rows that any ep coordinate wants, whose experts are in equal runs."""
    held = config.experts // layout.ep
    wanted = [0]
    for group in layout.groups()["ep_etp"]:
        for first in range(0, config.experts, held):
            ids = [ranks[rank].ids_TK for rank in group]
            wanted.append(sum(int(((ids_TK >= first) & (ids_TK < first + held)).sum()) for ids_TK in ids))
    return max(wanted)
