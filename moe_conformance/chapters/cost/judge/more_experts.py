"""Judge of the number of collectives of a step, compared with the same step with more experts and slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import exchange_phases
from moe_conformance.judging.shared.equivalence.runs import Ran, read_twin, those_that_ran
from moe_conformance.judging.verdict import Costly, NotOffered
from moe_conformance.reference.cost import calls as cost_calls


@judge(Costly, "run")
def judge_calls_of_sizes(reading: Reading, ran: Sequence[Ran]) -> Comparisons:
    """Decide whether a step calls as many collectives on every rank as with other numbers of experts and slots.

    Point-to-point messages are not counted: one exchange has as many of them as are not empty.

    Raises:
        Costly: two numbers differ.
        NotOffered: the backend refuses the other sizes, or the ledger has no collective.
        Raised, Hung, Died: the other run did not finish.
    """
    config, calls = reading.outcome.workload.config, _numbers(reading)
    for twin_run in those_that_ran(ran):
        others = _numbers(read_twin(twin_run))
        for phase, by_rank in calls.items():
            sizes = f"with {config.experts} experts and {config.top_k} slots, {others[phase]} {twin_run.twin.how}"
            wrong = f"{phase} takes {by_rank} collectives on the ranks {sizes}; expected: as many"
            alike = cost_calls.same_calls([by_rank, others[phase]])
            yield Comparison(None, "" if alike else wrong, pairs=len(by_rank))
    if not any(sum(by_rank) for by_rank in calls.values()):
        raise NotOffered("the ledger has no collective; point-to-point messages are not counted")


def _numbers(reading: Reading) -> dict[str, list[int]]:
    """Return the number of collectives in every phase, by rank."""
    numbers: dict[str, list[int]] = defaultdict(lambda: [0] * len(reading.ranks))
    for rank in reading.ranks:
        for phase, calls in exchange_phases(rank):
            numbers[phase][rank.rank] = sum(entry.sequence is not None for entry in calls)
    return numbers
