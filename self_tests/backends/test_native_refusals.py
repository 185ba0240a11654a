"""Native refuses what it cannot build and nothing else: a library that refuses everything would fail nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_conformance.backends.native import Native
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import RankOutcome
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.features import traits
from moe_conformance.workloads.records.runs import ON_SESSION, ExchangeStep, ExpertsStep, RouterStep
from moe_conformance.workloads.records.workload import Workload

WHOLE = (Layout(1), Layout(2, ep=2))  # the layouts on which every case is run; on the others one of every cell


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


def cases() -> list[Case]:
    """The cases to run of the quick corpus: routers on one rank alone, where they are as everywhere.

    Of variants that share most of what they do with others, one of every cell.
    """
    chosen, seen = [], set()
    for case in Plan(Native(), "cpu", "quick").pool:
        layout = case.cell.layout
        router, sampled = case.workload.run == RouterStep(), case.cell.variant in Native.sampled
        if (
            (layout == Layout(1) and not sampled)
            or (layout in WHOLE and not (router or sampled))
            or case.cell not in seen
        ):
            chosen.append(case)
        seen.add(case.cell)
    return chosen


def test_native_refuses_what_an_exchange_cannot_do_and_nothing_else(engine: Engine) -> None:
    """All ranks refuse together: the local exchange between ranks, and what only one exchange can do, of the others."""
    expected = {case.id: _status(case) for case in cases()}
    actual = {case.id: _statuses(engine, case) for case in cases()}
    assert expected == actual


@pytest.mark.parametrize("variant", [variant for variant in Native.variants if variant != "local"])
def test_experts_that_do_not_divide_are_refused_in_a_sentence(engine: Engine, variant: str) -> None:
    """No rank builds an exchange, or experts, of 7 experts on 2 ranks of ep; each names both numbers."""
    for run in (ExchangeStep(), ExpertsStep()):
        drawn = exchange_workload(Recipe("odd", experts_per_ep=4), run, variant, Layout(2, ep=2))
        ranks = moe_step(engine, "native", replace(drawn, config=replace(drawn.config, experts=7))).ranks
        assert ["refused"] * 2 == [rank.status for rank in ranks]
        assert {"library"} == {rank.error_by for rank in ranks}
        assert {"7 experts do not divide over ep = 2 ranks"} == {rank.error for rank in ranks}


def test_a_cell_that_is_refused_whatever_is_asked_is_tried_once_for_each_run() -> None:
    """One refusal of a run, and of what the table of exchanges tells apart, proves the limit."""
    plan = Plan(Native(), "cpu", "quick")
    tried = [(case.workload.run, traits(case.workload)) for case in plan.cases if case.cell.id == "local-ep2"]
    assert len(set(tried)) == len(tried)
    assert {ExchangeStep(), ExpertsStep()} <= {run for run, _ in tried}
    assert "local-ep2" not in {cell.id for cell in plan.drawing(ExchangeStep())}


def _status(case: Case) -> set[str]:
    layout, config = case.cell.layout, case.workload.config
    refusals = (
        config.variant == "local" and layout.ep * layout.etp > 1 and case.workload.run != ON_SESSION,
        config.variant == "deepep" and config.weights_applied == "input",
        config.variant != "hybridep" and (config.receive_buffer.factor or config.receive_buffer.rows) is not None,
        config.variant != "alltoall" and (config.shared.overlap or config.padding.splits == "equal"),
        config.variant in ("deepep", "hybridep", "ncclep") and config.capacity.padded,
        config.variant != "alltoall" and config.overlap.chunks > 1,
        bool(config.extra),  # a knob of some other library
    )
    return {"refused" if any(refusals) else "ok"}


def _statuses(engine: Engine, case: Case) -> set[str]:
    """How the ranks ended; what a rank leaves unsaid counts too, as the checks of it would be left out quietly."""
    ranks = moe_step(engine, "native", case.workload).ranks
    statuses = {rank.status for rank in ranks}
    if case.workload.calls:
        return statuses  # type: ignore[return-value]
    return statuses | {words for rank in ranks for words in _unsaid(case.workload, rank)}


def _unsaid(workload: Workload, rank: RankOutcome) -> Iterator[str]:
    if rank.status != "ok":
        return
    went_back = any(workload.goes_backward(m) for m in range(len(workload.batches)))
    if went_back and rank.grads_local and rank.grads_final is None:
        yield f"refused to finish gradients: {rank.finish_refusal}"
    for microbatch in rank.microbatches:
        if workload.run == RouterStep() and microbatch.router.counts_E is None:
            yield "reported no load"
        if any(handed.counts_N is None for handed in microbatch.exchange.handed):
            yield "claimed no counts"
