"""Judge of whether a run finished: on every rank, with every microbatch."""

from __future__ import annotations

from moe_conformance.judging.observed.run import Reading, require_finished
from moe_conformance.judging.verdict import RunFailed, Tally


def judge_finished(reading: Reading, tally: Tally) -> None:
    """Decide whether every rank went through its whole schedule and returned every microbatch.

    Raises:
        RunFailed: a rank raised, hung or died, or came back without one of its microbatches.
    """
    require_finished(reading.outcome)
    due = len(reading.outcome.workload.batches)
    for rank in reading.ranks:
        if len(rank.microbatches) != due:
            sentence = f"rank {rank.rank} returned {len(rank.microbatches)} of {due} microbatches"
            raise RunFailed("run", sentence, ranks=(rank.rank,))
        tally.add(pairs=due, rank=rank.rank)
