"""Who is at fault, from what is known of every rank at the end of a job.

A fault spreads: the peers of a rank that raised or died lose their connections, the peers of a rank that
loops or has returned wait for it. These are *secondary*. Where no rank stands out, all that failed are
blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .records import RankResult


@dataclass(frozen=True)
class Finding:
    """One rank at the end of a job, before anyone is blamed.

    Attributes:
        result: What the rank answered, or did not.
        waits: Gave no answer and stands in a collective.
        connection_lost: Its exception says that a peer has gone away.
    """

    result: RankResult
    waits: bool = False
    connection_lost: bool = False

    @property
    def suffers(self) -> bool:
        """True where another rank's fault would explain this one's."""
        return self.waits or self.connection_lost


def assign(findings: Sequence[Finding]) -> tuple[RankResult, ...]:
    """Marks the secondary faults.

    * A rank that raised for a reason of its own, died, or hangs outside of any collective is at fault; then
      all who wait or lost a connection are secondary.
    * Failing that, ranks that returned while others wait in a collective are at fault: they left one out.
      (That the others entered one too many cannot be told apart here.)
    * Failing that, all who failed are at fault.
    """
    culprits = [f for f in findings if f.result.status != "ok" and not f.suffers]
    if culprits:
        return tuple(replace(f.result, secondary=f.suffers) for f in findings)
    waiting = [f.result.rank for f in findings if f.waits]
    returned = [f.result.rank for f in findings if f.result.status == "ok"]
    if waiting and returned:
        return tuple(_blame_returned(f, waiting) for f in findings)
    return tuple(f.result for f in findings)


def _blame_returned(finding: Finding, waiting: list[int]) -> RankResult:
    if finding.result.status != "ok":
        return replace(finding.result, secondary=True)
    others = f"rank {waiting[0]}" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))}"
    return replace(finding.result, error=f"returned while {others} waited in a collective")
