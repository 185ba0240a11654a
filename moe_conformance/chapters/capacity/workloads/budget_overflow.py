"""The pinned workloads of receive buffers that overflow: batches that fit, fit exactly, or have one row too many.

An exchange that refuses to overflow does so on all ranks, and runs the next microbatch. One that drops rows reports
this on the ranks where there was no room, and delivers the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, Chapter
from moe_conformance.workloads.recipes import ONE_WITHOUT, UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records.routes import one_rank
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch, Workload
from moe_conformance.workloads.selection.profiles import Profile


@dataclass(frozen=True)
class Budget:
    """The receive buffer and tokens of one workload."""

    tokens: tuple[tuple[int, ...], ...]  # by microbatch; rank r has the entry r modulo the length
    of: int = 0  # the microbatch whose busiest rank the buffer fits
    spare: int = 0  # further rows of the buffer
    over: Literal["refuse", "drop"] = "refuse"
    schedule: str = ""  # "": one microbatch after the other
    memory: Literal["plain", "filled"] = "plain"
    factor: float | None = None  # multiple of the balanced load, in place of rows; all tokens go to one ep coordinate
    rows: int | None = None  # the rows of the buffer, in place of those of a microbatch


OVERFLOWS: Mapping[str, Budget] = {
    "budget-exact-even": Budget(((8,),)),
    "budget-exact-uneven": Budget((UNEVEN,)),
    "budget-one-short-even": Budget(((3,), (9,), (4,)), of=1, spare=-1),
    "budget-one-short-uneven": Budget(((2, 4, 0, 3), UNEVEN, (3, 1, 4, 2)), of=1, spare=-1),
    "budget-by-turns": Budget(((24,), (2,), (6,)), of=2),
    "budget-rank-without-tokens": Budget((ONE_WITHOUT, (2, 0, 1, 3), (0, 3, 2, 1)), of=0, spare=-2),
    "budget-in-flight-even": Budget(((3,), (9,), (4,)), of=0, spare=1, schedule="F0 F1 B0 F2 B2"),
    "factor-exceeded-even": Budget(((8,),), factor=1.0),
    "budget-of-none": Budget(((0,), (3,), (0,))),
    # The first fills the buffer of the busiest rank, the second overflows most buffers, the third leaves room.
    "overfull-by-turns-even": Budget(((8,), (16,), (3,)), over="drop"),
    # Other microbatches are dispatched before the backward of one with dropped rows.
    "overfull-one-row-uneven": Budget(
        ((2, 4, 0, 3), UNEVEN, (3, 1, 4, 2)), of=1, spare=-1, over="drop", schedule="F0 F1 F2 B1 B0 B2"
    ),
    "overfull-filled-uneven": Budget((ONE_WITHOUT, (2, 0, 1, 0)), spare=-4, over="drop", memory="filled"),
    "overfull-of-none-even": Budget(((0,), (3,), (0,)), over="drop"),
    "factor-overfull-even": Budget(((8,),), factor=1.0, over="drop"),
    # For libraries whose buffers are blocks of 256 rows: the first overflows it, the second leaves room.
    "overfull-one-block-even": Budget(((130,), (3,)), over="drop", rows=256),
}

# For the same libraries: the first two overflow it, the third leaves room.
BLOCKS: Mapping[str, Budget] = {
    "overfull-block-even": Budget(((130,), (200,), (3,)), over="drop", rows=256),
    "overfull-block-in-flight-even": Budget(((200,), (3,)), over="drop", rows=256, schedule="F0 F1 B0 B1"),
}


def overflows(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for name, budget in {**OVERFLOWS, **(BLOCKS if profile == "full" else {})}.items():
        schedule = budget.schedule or " ".join(f"F{m} B{m}" for m in range(len(budget.tokens)))
        recipe = Recipe(name, turns=budget.tokens, schedule=schedule, memory=budget.memory)
        if budget.factor is not None:
            recipe = replace(recipe, route=one_rank, needs_ep=True, config={"receive_buffer.factor": budget.factor})
        if recipe.needs_ep and layout.ep == 1:
            continue
        workload = exchange_workload(recipe, ExchangeStep(option="receive budget"), variant, layout)
        workload = replace(workload, config=workload.config.changed({"receive_buffer.overflow": budget.over}))
        if budget.factor is not None:
            yield workload
            continue
        room = budget.rows
        if room is None:
            room = max(0, busiest(workload.config, layout, workload.batches[budget.of]) + budget.spare)
        yield replace(workload, config=workload.config.changed({"receive_buffer.rows": room}))


def by_factor(workload: Workload) -> bool:
    """Return whether the buffer size is a multiple of the balanced load; a backend may make it larger than that."""
    return workload.config.receive_buffer.factor is not None


def refuses(workload: Workload) -> bool:
    """Return whether rows beyond a buffer of a given number of rows must be refused."""
    return workload.config.receive_buffer.overflow == "refuse" and not by_factor(workload)


def refuses_some(workload: Workload) -> bool:
    """Return whether rows beyond the buffer must be refused, and the buffer holds any rows."""
    return refuses(workload) and bool(workload.config.receive_buffer.rows)


def drops(workload: Workload) -> bool:
    """Return whether rows beyond a buffer of a given number of rows must be dropped."""
    return workload.config.receive_buffer.overflow == "drop" and not by_factor(workload)


def busiest(config: Config, layout: Layout, ranks: tuple[Batch, ...]) -> int:
    """Return the largest number of rows for any ep coordinate, whose experts are in equal contiguous ranges."""
    held = config.experts // layout.ep
    wanted = [0]
    for group in layout.groups()["ep_etp"]:
        for first in range(0, config.experts, held):
            ids = [ranks[rank].ids_TK for rank in group]
            wanted.append(sum(int(((ids_TK >= first) & (ids_TK < first + held)).sum()) for ids_TK in ids))
    return max(wanted)


CHAPTERS = (
    Chapter((ExchangeStep(option="receive budget"),), (*OVERFLOWS, *BLOCKS), overflows, "every", (EP2, EP2_ETP2)),
)
