"""Judge of how uneven loads become as the standard deviation of the forced bias grows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.runs import Ran, read_twin, those_that_ran
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import NotOffered, WrongCount
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.forcing.imbalance import imbalance_rises, mean_overload

_RANKS = 8  # the number of blocks of experts whose loads are compared, whatever the number of ranks


@judge(WrongCount, "route")
def judge_spread(reading: Reading, ran: Sequence[Ran]) -> Comparisons:
    """Decide whether the mean largest load of 8 ranks, over forwards, rises with each deviation and is below 8.

    `ran` are the runs with larger deviations, ascending.

    Raises:
        NotOffered: not all of these were run.
        WrongForm: the router did not return ids (T, K).
        WrongCount: the means do not rise.
    """
    if len(those_that_ran(ran)) < len(ran):
        raise NotOffered(
            "; ".join(f"{twin_run.twin.how}: {twin_run.why_not}" for twin_run in ran if twin_run.outcome is None)
        )
    experts = reading.outcome.workload.config.experts
    blocks = [range(first, first + experts // _RANKS) for first in range(0, experts, experts // _RANKS)]
    for rank in reading.ranks:
        draws = [_loads(twin_run, rank.rank) for twin_run in (reading, *map(read_twin, ran))]
        said = ", ".join(f"{mean_overload(of_run, blocks):.4g}" for of_run in draws)
        wrong = (
            f"with forced biases of deviation 0, 0.5 and 2 the largest load of {_RANKS} ranks over their mean load "
            f"is {said} on rank {rank.rank}; expected it to rise, the second time by at least half of the first, and "
            f"to stay below {_RANKS}; likely cause: the deviation does not reach the bias"
        )
        pairs = sum(int(loads_E.sum()) for of_run in draws for loads_E in of_run)
        yield Comparison(rank.rank, "" if imbalance_rises(draws, blocks) else wrong, pairs=pairs)


def _loads(reading: Reading, rank: int) -> list[Tensor]:
    """Return the loads (E,) of each forward of a rank."""
    router = expected_of(reading)
    return [loads(router.ids[place], router.workload.config.experts) for place in router.places if place[1] == rank]
