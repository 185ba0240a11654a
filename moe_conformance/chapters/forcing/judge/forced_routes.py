"""Judge of exchanges of the ids that a router reports, with forcing set on the router, the exchange, or both."""

from __future__ import annotations

from dataclasses import replace

from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import Tally


def judge_reported_routes(reading: Reading, tally: Tally) -> None:
    """Decide whether deliveries, outputs and gradients of the exchange are those of the reported ids.

    Raises:
        WrongForm, WrongSelection: the router reports no ids, or not K different experts for a token.
        WrongDelivery, WrongOutput, WrongGradient: as of any exchange of these ids.
    """
    reported = _with_reported_ids(reading)
    judge_deliveries(reported, tally)
    judge_outputs(reported, tally)
    judge_dx(reported, tally)
    judge_dweights(reported, tally)


def _with_reported_ids(reading: Reading) -> Reading:
    """Return the reading of a workload in which tokens have the ids that the router selected."""
    ids = expected_of(reading).ids
    batches = tuple(
        tuple(replace(batch, ids_TK=ids[m, rank].long()) for rank, batch in enumerate(of_ranks))
        for m, of_ranks in enumerate(reading.batches)
    )
    outcome = replace(reading.outcome, workload=replace(reading.outcome.workload, batches=batches))
    return Reading(outcome, reading.ranks)
