"""Ways to break a simulated exchange or the outcome that it brought back, and to see what a judge says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.contract import Claims
from moe_conformance.judging.observed.run import Reading, read
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.scenarios.outcome import Handed, Microbatch, Outcome
from self_tests.judging.simulated_exchange import Change, Simulation, simulate, workload

Judge = Callable[[Reading, Tally], None]


def judged(judge: Judge, outcome: Outcome) -> Tally:
    """Return the tally of a judge that has nothing to complain of."""
    tally = Tally()
    judge(read(outcome), tally)
    return tally


def caught(judge: Judge, outcome: Outcome) -> Mismatch:
    """Return what a judge complains of."""
    with pytest.raises(Mismatch) as error:
        judge(read(outcome), Tally())
    return error.value


def broken(layout_workload: Any = None, **simulation: Any) -> Outcome:
    """Run a simulation with something broken."""
    return simulate(layout_workload or workload(), Simulation(**simulation))


def claiming(outcome: Outcome, claims: Claims) -> Outcome:
    """Let all ranks claim something."""
    return replace(outcome, ranks=tuple(replace(rank, claims=claims) for rank in outcome.ranks))


def on(rank: int, change: Callable[[Tensor], Tensor]) -> Change:
    """Change the tensor of one rank."""
    return lambda at, tensor: change(tensor) if at == rank else tensor


def exchange(a: int, b: int) -> Callable[[Tensor], Tensor]:
    """Exchange two rows."""

    def change(rows: Tensor) -> Tensor:
        order = list(range(len(rows)))
        order[a], order[b] = order[b], order[a]
        return rows[order]

    return change


def put(row: int, make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Put something made of all rows in the place of one."""

    def change(rows: Tensor) -> Tensor:
        listed = list(rows)
        listed[row] = make(rows)
        return torch.stack(listed)

    return change


def edit(outcome: Outcome, rank: int, change: Callable[[Microbatch], Microbatch], microbatch: int = 0) -> Outcome:
    """Change what one rank brought back of a microbatch."""
    seen = list(outcome.ranks[rank].microbatches)
    seen[microbatch] = change(seen[microbatch])
    ranks = list(outcome.ranks)
    ranks[rank] = replace(ranks[rank], microbatches=tuple(seen))
    return replace(outcome, ranks=tuple(ranks))


def edit_handed(outcome: Outcome, rank: int, change: Callable[[Handed], Handed], microbatch: int = 0) -> Outcome:
    """Change the first call of one rank's experts in a microbatch."""

    def changed(seen: Microbatch) -> Microbatch:
        first, *others = seen.exchange.handed
        return replace(seen, exchange=replace(seen.exchange, handed=(change(first), *others)))

    return edit(outcome, rank, changed, microbatch)


def rerouted(seen: Microbatch, **changed: Any) -> Microbatch:
    """Change what a rank's router returned."""
    return replace(seen, router=replace(seen.router, **changed))
