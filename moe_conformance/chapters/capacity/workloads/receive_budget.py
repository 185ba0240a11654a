"""The pinned workloads of receive buffers that do not overflow: loads that fill it, and loads that leave room."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, Chapter
from moe_conformance.workloads.recipes import UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.routes import dropped, idle_rank
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile


def filling(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route as many pairs to the first ep coordinate as its buffer holds if all ranks have T, others anywhere else.

    It gets floor(factor T K / ep) of a rank's pairs; over all ranks that is at most factor times its balanced load.
    """
    assert config.receive_buffer.factor is not None
    K, held = config.top_k, config.experts // layout.ep
    due = int(config.receive_buffer.factor * T * K / layout.ep + 1e-9)
    rows = []
    for t in range(T):
        here = due // T + (t < due % T)
        first = draw.choose(1, config, generator, range(held))[0, :here]
        others = draw.choose(1, config, generator, range(held, config.experts))[0, : K - here]
        rows.append(torch.cat([first, others]))
    return torch.stack(rows) if rows else torch.empty(0, K, dtype=torch.int64)


def first_alone(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route only the first token of a rank; all slots of the others are empty."""
    ids_TK = draw.choose(T, config, generator)
    ids_TK[1:] = -1
    return ids_TK


BUDGETS = (
    Recipe("budget-filled-even", filling, config={"receive_buffer.factor": 1.5}, schedule="F0 F1 B0 B1", needs_ep=True),
    # 1.15 * 100 is a little less than 115 in binary, and a budget of 114 is too small.
    Recipe("budget-of-a-fraction-even", filling, tokens=(50,), config={"receive_buffer.factor": 1.15}, needs_ep=True),
    Recipe("budget-filled-uneven", filling, tokens=UNEVEN, config={"receive_buffer.factor": 1.5}, needs_ep=True),
    Recipe(
        "budget-roomy-even", dropped, config={"receive_buffer.factor": 8.0}, schedule="F0 B0 F1 B1", memory="filled"
    ),
    # Few rows are sent: only the size of the buffer shows whether it is too small.
    Recipe("budget-spare-even", first_alone, tokens=(15,), config={"receive_buffer.factor": 1.5}, needs_ep=True),
    # A rank receives nothing in either microbatch: its buffer has the usual size, and all of it is padding.
    Recipe(
        "budget-roomy-idle-rank",
        idle_rank,
        turns=(UNEVEN,) * 2,
        config={"receive_buffer.factor": 8.0},
        schedule="F0 F1 B0 B1",
        memory="filled",
        needs_ep=True,
    ),
    # A factor multiplies the number of tokens: it is the same in both microbatches, whose tokens go to other experts.
    Recipe(
        "budget-roomy-uneven",
        dropped,
        turns=(UNEVEN,) * 2,
        config={"receive_buffer.factor": 8.0},
        schedule="F0 F1 B1 B0",
    ),
)

OWN = (
    Recipe("own-budget-filled-even", filling, config={"receive_buffer.factor": 1.5}, needs_ep=True),
    Recipe(
        "own-budget-roomy-uneven",
        dropped,
        turns=(UNEVEN,) * 2,
        config={"receive_buffer.factor": 8.0},
        schedule="F0 F1 B1 B0",
        memory="filled",
    ),
)


def budgets(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout, with the suite's experts and with the backend's."""
    for run, recipes in ((ExchangeStep(), BUDGETS), (ExpertsStep(), OWN)):
        for recipe in recipes:
            if layout.ep > 1 or not recipe.needs_ep:
                yield exchange_workload(recipe, run, variant, layout)


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return tuple(recipe.name for recipe in (*BUDGETS, *OWN))


CHAPTERS = (Chapter((ExchangeStep(), ExpertsStep()), names(), budgets, "every", (EP2, EP2_ETP2)),)
