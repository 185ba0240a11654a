"""Judge of process groups that are left behind: an exchange that is built again needs no further ones."""

from __future__ import annotations

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.script import answers
from moe_conformance.judging.verdict import NotOffered, WrongCount
from moe_conformance.scenarios.outcome import Outcome


@judge(WrongCount, "run")
def judge_built_again(outcome: Outcome) -> Comparisons:
    """Decide whether the third exchange of one configuration leaves the process groups as the second did.

    What a library makes once, when it is first needed, is there after the first. Each group holds a communicator, with
    memory and threads, until the process ends.

    Raises:
        WrongCount: there are more groups.
        NotOffered: the exchange was not built.
    """
    calls = range(len(outcome.workload.calls))
    built = [answers(outcome, call) for call in calls]
    refused = next((answer for of_call in built for answer in of_call if answer.raised), None)
    if refused is not None:
        raise NotOffered(refused.error)
    for rank in range(outcome.workload.layout.world):
        counts = [of_call[rank].groups for of_call in built]
        more = counts[-1] - counts[-2]
        told = f"rank {rank} has {counts[-1]} process groups after the exchange was built {len(counts)} times, and "
        told += (
            f"{counts[-2]} after {len(counts) - 1}; expected as many; likely cause: a group is made for each exchange"
        )
        yield Comparison(rank, Finding("groups", told, (rank,)) if more > 0 else "", pairs=1)
