"""The judge of optional dependencies that a backend reports; and what leaves out round robins that it does not make."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.workloads.round_robin import starts_elsewhere
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered, WrongForm


@judge(WrongForm, "experts")
def judge_optional_named(reading: Reading) -> Comparisons:
    """Decide whether every rank names the optional dependencies that it uses, and no hidden one.

    Raises:
        NotOffered: none was hidden, and none that can be hidden is named.
        WrongForm: a hidden one is named as in use; or one was hidden, and none is named at all.
    """
    if not any(rank.hidden or rank.optional for rank in reading.ranks):
        raise NotOffered("nothing is named in resolved['optional']")
    for rank in reading.ranks:
        used = {name.strip() for names in rank.optional for name in names.split(",")} - {"none"}
        for name in sorted(used & {*rank.hidden}):
            wrong = f"rank {rank.rank} was built without {name}, and names it in resolved['optional']"
            yield Comparison(rank.rank, wrong, kind="hidden")
        if rank.hidden and not rank.optional:
            wrong = (
                f"rank {rank.rank} was built without {', '.join(rank.hidden)}, and names nothing in "
                "resolved['optional']; expected: what took their place, or 'none'"
            )
            yield Comparison(rank.rank, wrong, kind="unnamed")
        yield Comparison(rank.rank, pairs=len(rank.optional))


def require_round_robin_offered(reading: Reading) -> None:
    """Leave out a reading whose ids the backend claims not to support.

    Raises:
        NotOffered: the backend claims that every rank's ids begin at expert 0, and these do not.
    """
    if reading.claims.round_robin == "zero" and starts_elsewhere(reading.outcome.workload):
        raise NotOffered("the backend's round robin begins at expert 0 on every rank, and its exchange relies on it")
