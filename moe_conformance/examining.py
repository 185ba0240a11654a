"""What the outcome of a case decides before any check reads it: the backend refused, or should have."""

from __future__ import annotations

from typing import Literal

from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plan import Case
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.runs import ON_SESSION


def refusal_of(outcome: Outcome) -> tuple[Literal["refused", "not adapted"], str] | None:
    """Return verdict and reason if building was refused; a rank that went on, failed or hung makes it a failure.

    What an adapter refuses proves nothing about the library.
    """
    refusal = outcome.refusal
    if refusal is None or outcome.blamed or any(rank.status == "ok" for rank in outcome.ranks):
        return None
    if refusal.error_by == "library":
        return "refused", f"refused by the library: {refusal.error}"
    return "not adapted", f"not adapted: {refusal.error}"


def require_no_limit(case: Case) -> None:
    """Raise where a case that was not refused breaks a limit that is declared as refused.

    Raises:
        Mismatch: it does.
    """
    limit = broken(case.cell.limits, case.workload, case.cell.device)
    if limit is not None and case.workload.run != ON_SESSION:  # there refusals are answers
        raise Mismatch(
            "run",
            f'the backend declares a limit on {limit.on} with proof="refused" ({limit.reason}), but the library raised '
            "nothing",
        )
