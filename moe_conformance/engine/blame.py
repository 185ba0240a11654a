"""Decides which ranks are at fault, from what is known of every rank when a job has ended.

One rank's fault causes faults on others: the peers of a rank that raised or died lose their connections, the peers of a
rank that loops or has returned wait for it, and a rank that receives less than it expects continues with uninitialised
memory. These faults are *secondary*. If no rank can be singled out, all ranks that failed are blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .faults import Fault
from .ledger.crosscheck import cross_check
from .ledger.disagreement import Disagreement
from .ledger.entry import MOST_CALLS
from .records import RankResult


@dataclass(frozen=True)
class Finding:
    """How a job ended on one rank, before ranks are blamed.

    Attributes:
        result: The rank's result, before `secondary` is set.
        waits: Whether it gave no answer and waits in a collective.
        connection_lost: Whether its exception reports a lost peer.
    """

    result: RankResult
    waits: bool = False
    connection_lost: bool = False

    @property
    def may_be_secondary(self) -> bool:
        """True where another rank's fault would explain this one's."""
        return self.waits or self.connection_lost

    @property
    def failed_itself(self) -> bool:
        """True where the rank failed and no other rank's fault is visible as the cause."""
        return self.result.status != "ok" and not self.may_be_secondary


def raised(rank: int, fault: Fault) -> Finding:
    """Returns the finding of a rank whose job ended with an exception."""
    result = RankResult(
        rank,
        "raised",
        error=fault.error,
        error_type=fault.error_type,
        error_attributes=fault.error_attributes,
        traceback=fault.traceback,
    )
    return Finding(result, connection_lost=fault.connection_lost)


def assign(findings: Sequence[Finding], disagreements: Sequence[Disagreement] = ()) -> tuple[RankResult, ...]:
    """Returns the ranks' results, with the faults that another rank caused marked as secondary.

    * If ledgers disagree, the minority of the earliest disagreement is at fault; it may have caused everything else.
    * Else a rank is at fault that raised for another reason than a lost peer, died, or hangs outside of any collective;
      ranks that wait or lost a connection are then secondary.
    * Else ranks that returned while others wait in a collective are at fault: they omitted one. (Whether the others
      called one too many cannot be distinguished here.)
    * Else all ranks that failed are at fault.

    A hazard is the fault of its rank in every case.

    Args:
        findings: One per rank, in the order of ranks.
        disagreements: Those of the ranks' ledgers, the earliest first.
    """
    ranks = _by_ledgers(findings, disagreements[0]) if disagreements else _by_status(findings)
    return tuple(map(_with_hazard, ranks))


def disagreements(findings: Sequence[Finding]) -> tuple[Disagreement, ...]:
    """Cross-checks the ledgers of all ranks; a missing call does not count where a fault explains it."""
    ledgers = {finding.result.rank: finding.result.ledger for finding in findings}
    explained = any(finding.failed_itself for finding in findings)
    cut = [f.result.rank for f in findings if f.result.status != "ok" and (explained or not f.waits)]
    full = [rank for rank, entries in ledgers.items() if len(entries) >= MOST_CALLS]
    return cross_check(ledgers, [*cut, *full])


def _by_ledgers(findings: Sequence[Finding], first: Disagreement) -> list[RankResult]:
    waiting = [finding.result.rank for finding in findings if finding.waits]
    # Half of the ranks lack a call that the other half makes: those that returned left the others waiting.
    left = [rank for rank in first.absent if findings[rank].result.status == "ok"] if waiting else []
    blamed = first.blamed if not left or set(left) >= set(first.blamed) else left
    sentence = f"{_returned_while(waiting)}: {first}" if waiting else str(first)
    return [_blame(finding.result, sentence, finding.result.rank in blamed) for finding in findings]


def _blame(result: RankResult, sentence: str, blamed: bool) -> RankResult:
    """Returns the result with `secondary` or `error` set; a rank that failed keeps its error message."""
    if result.status != "ok":
        return replace(result, secondary=not blamed)
    return replace(result, error=sentence) if blamed else result


def _by_status(findings: Sequence[Finding]) -> list[RankResult]:
    if any(finding.failed_itself for finding in findings):
        return [replace(finding.result, secondary=finding.may_be_secondary) for finding in findings]
    waiting = [finding.result.rank for finding in findings if finding.waits]
    if waiting and any(finding.result.status == "ok" for finding in findings):
        returned = _returned_while(waiting)
        return [_blame(finding.result, returned, finding.result.status == "ok") for finding in findings]
    return [finding.result for finding in findings]


def _returned_while(waiting: Sequence[int]) -> str:
    others = f"rank {waiting[0]}" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))}"
    return f"returned while {others} waited in a collective"


def _with_hazard(result: RankResult) -> RankResult:
    if not result.hazards or result.error is not None:
        return result
    more = f"; {len(result.hazards) - 1} more of the kind" if len(result.hazards) > 1 else ""
    return replace(result, error=f"{result.hazards[0]}{more}")
