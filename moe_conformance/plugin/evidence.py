"""What helps to find the cause of a failed run: tracebacks, printed output, and the ledgers of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from moe_conformance.engine.ledger.table import table
from moe_conformance.judging.verdict import Mismatch, RunFailed
from moe_conformance.scenarios.outcome import Outcome, RankOutcome

_TRACEBACK_LINES = 10
_PRINTED_LINES = 5


def evidence(mismatch: Mismatch, outcome: Outcome | None) -> Iterator[str]:
    """Yield lines; a mismatch of values has none unless the ledgers of its ranks disagree."""
    if outcome is None:
        return
    if isinstance(mismatch, RunFailed):
        rank = next((rank for rank in outcome.blamed if rank.traceback), None)
        if rank is not None:
            yield from _end_of(rank.traceback or "", f"on rank {rank.rank}:", _TRACEBACK_LINES)
        for rank in outcome.blamed:
            yield from _printed(rank)
    if outcome.disagreements:
        yield "the collectives of the ranks, from the first call that differs:"
        ledgers = {rank.rank: rank.ledger for rank in outcome.ranks}
        yield from (f"  {line}" for line in table(ledgers, outcome.disagreements[0]).splitlines())


def _printed(rank: RankOutcome) -> Iterator[str]:
    if rank.output and rank.output.strip():
        yield from _end_of(rank.output, f"rank {rank.rank} printed:", _PRINTED_LINES)


def _end_of(text: str, title: str, most: int) -> Iterator[str]:
    lines = text.rstrip().splitlines()
    yield title
    if len(lines) > most:
        yield "  ..."
    yield from (f"  {line}" for line in lines[-most:])
