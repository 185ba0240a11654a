"""Whether all ranks finished a run, and where one that did not failed."""

from __future__ import annotations

import re

from moe_conformance.judging.findings import some
from moe_conformance.judging.verdict import Died, Finding, Hung, MalformedClaim, Mismatch, Raised, RunFailed, Stage
from moe_conformance.scenarios.outcome import Outcome, RankOutcome


def require_finished(outcome: Outcome) -> None:
    """Raise unless every rank finished the run; ranks that only waited for a failed one are not blamed.

    Raises:
        Raised, Hung, Died: a rank did not finish.
        MalformedClaim: a rank reports counts or shapes that contradict each other.
    """
    unfinished = [rank for rank in outcome.ranks if rank.status != "ok"]
    if not unfinished:
        return
    failed = outcome.blamed or tuple(unfinished)
    first, others = failed[0], failed[1:]
    also = f"; {some(map(_ending, others))}" if others else ""
    kind, stage = _KINDS.get(first.status, (RunFailed, "run"))
    mismatch = kind(stage, f"{_how(first)}{also}", ranks=tuple(rank.rank for rank in failed))
    mismatch.place = place_of(first)
    mismatch.findings = tuple(
        Finding("", _how(rank), (rank.rank,), error=_KINDS.get(rank.status, (RunFailed, stage))[0].__name__)
        for rank in failed
    )
    raise mismatch


_KINDS: dict[str, tuple[type[Mismatch], Stage]] = {
    "malformed": (MalformedClaim, "dispatch"),
    "raised": (Raised, "run"),
    "hung": (Hung, "run"),
    "died": (Died, "run"),
}


def place_of(rank: RankOutcome) -> str:
    """Return where a rank failed: the exception and the line that raised it, else the phase.

    Used to distinguish faults. For a hang the position within the phase is left out, as it varies from run to run.
    """
    if rank.status not in ("raised", "malformed"):
        return rank.reached.partition(":")[0]
    error, lines = (rank.error or "").partition(":")[0], _LINE.findall(rank.traceback or "")
    return ":".join([error, *lines[-1]]) if lines else error


_LINE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def _how(rank: RankOutcome) -> str:
    """Return how a rank ended, with its error if it has one."""
    return f"{_ending(rank)}: {rank.error}" if rank.error else _ending(rank)


def _ending(rank: RankOutcome) -> str:
    """Return how a rank ended and in which phase, as messages write it."""
    verb = "reported inconsistent counts, shapes or claims" if rank.status == "malformed" else rank.status
    return f"rank {rank.rank} {verb}" + (f" in {rank.reached}" if rank.reached else "")
