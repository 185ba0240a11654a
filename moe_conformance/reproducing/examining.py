"""Decide, before any check reads an outcome, whether the backend refused the case, or should have refused it."""

from __future__ import annotations

from typing import Literal

from moe_conformance.judging.findings import some
from moe_conformance.judging.verdict import FalseLimit
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.plan import Case
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.runs import ON_SESSION

_SLIPS = ("AttributeError", "NameError", "IndexError", "KeyError")  # programming errors, not refusals


def refusal_of(outcome: Outcome) -> tuple[Literal["refused", "not adapted"], str] | None:
    """Return verdict and reason if the build was refused on all ranks; None otherwise.

    If some rank went on, failed or hung, it is a failure and no refusal. A refusal by an adapter proves nothing about
    the library.
    """
    refusal = outcome.refusal
    if refusal is None or outcome.blamed or any(rank.status == "ok" for rank in outcome.ranks):
        return None
    if refusal.error_by == "library":
        return "refused", f"refused by the library: {refusal.error}"
    return "not adapted", f"not adapted: {refusal.error}"


def refusal_by_limit(case: Case, outcome: Outcome) -> tuple[Literal["refused"], str] | None:
    """Return verdict and reason if a case that was built breaks a limit and every rank raised; None within limits.

    Raises:
        FalseLimit: the case breaks a limit that is declared as refused, and some rank did not raise by itself, or
            raised an exception of a programming error.
    """
    limit = broken(case.cell.limits, case.workload, case.cell.device)
    if limit is None or case.workload.run == ON_SESSION:  # where a refusal is a result
        return None
    ranks = outcome.ranks
    if slips := [rank for rank in ranks if rank.status == "raised" and (rank.error or "").startswith(_SLIPS)]:
        declared = f'a limit on {limit.on} with proof="refused"'
        raise FalseLimit("run", f"the backend declares {declared}, and rank {slips[0].rank} raised {slips[0].error}")
    if all(rank.status == "raised" and not rank.secondary for rank in ranks):
        return "refused", f"refused by the library in {ranks[0].reached}: {ranks[0].error}"
    declared = f'the backend declares a limit on {limit.on} with proof="refused" ({limit.reason})'
    if all(rank.status == "ok" for rank in ranks):
        raise FalseLimit("run", f"{declared}, but the library raised nothing")
    others = some([f"rank {rank.rank}" for rank in ranks if rank.status != "raised" or rank.secondary])
    raise FalseLimit("run", f'{declared}, but {others} did not raise by itself; then it is proof="undefined"')
