"""The first expert of round-robin ids, if an exchange relies on it."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.workloads.round_robin import starts_elsewhere
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered


def judge_start(reading: Reading) -> None:
    """Leave out a reading whose ids the backend claims not to support.

    Raises:
        NotOffered: the backend claims that every rank's ids begin at expert 0, and these do not.
    """
    if reading.claims.round_robin == "zero" and starts_elsewhere(reading.outcome.workload):
        raise NotOffered("the backend's round robin begins at expert 0 on every rank, and its exchange relies on it")
