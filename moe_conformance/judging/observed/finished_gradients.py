"""The gradients that ranks hold after `finish_gradients`, by rank and by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import AbsentGradient, NotOffered, WrongGradient
from moe_conformance.reference.gradients.shards import divisor
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey, Workload


def finals_of(reading: Reading) -> list[Mapping[ParameterKey, Grad]]:
    """Return the finished gradients of every rank.

    Raises:
        NotOffered: no rank finishes gradients.
        AbsentGradient: some ranks finish gradients and others do not.
    """
    finals = [rank.grads_final for rank in reading.ranks]
    finished = [final for final in finals if final is not None]
    if not finished:
        raise NotOffered(reading.ranks[0].finish_refusal or "the backend does not implement finish_gradients")
    first = next(rank for rank, final in enumerate(finals) if final is not None)
    findings = []
    for rank in reading.ranks:
        if rank.grads_final is None:
            why = f" ({rank.finish_refusal})" if rank.finish_refusal else ""
            sentence = f"rank {rank.rank} finished no gradients{why}, while rank {first} did"
            findings.append(Finding("absent", sentence, (rank.rank,)))
    if findings:
        fail(AbsentGradient, "finish", findings)
    return finished


def require_frozen(reading: Reading, names: Collection[str]) -> bool:
    """Return whether the backend claims that the experts' weights, of these names, are frozen, and check that they are.

    Raises:
        WrongGradient: one of them has a gradient.
    """
    if reading.claims.frozen == "no":
        return False
    findings = []
    for rank in reading.ranks:
        for (name, expert), grad in (rank.grads_final or {}).items():
            if name in names and expert is not None and grad.value is not None:
                sentence = f"{name} of expert {expert} on rank {rank.rank} has a gradient; claimed: frozen = 'experts'"
                findings.append(Finding("trained", sentence, (rank.rank,)))
    if findings:
        fail(WrongGradient, "finish", findings)
    return True


def steps_of(reading: Reading) -> tuple[Reading, ...]:
    """Return a reading for every step of a run, with the parameter gradients of that step."""
    earlier = []
    for ends in zip(*(rank.earlier for rank in reading.ranks), strict=True):
        ranks = tuple(
            replace(rank, grads_local=end.local, grads_final=end.final, finish_refusal=end.refusal)
            for rank, end in zip(reading.ranks, ends, strict=True)
        )
        earlier.append(replace(reading, ranks=ranks))
    return (*earlier, reading)


def divisor_of(workload: Workload, loss_convention: str) -> int:
    """Return by what finished gradients are divided, in the convention that a session says it has."""
    convention: Literal["sum", "mean_over_dp"] = "mean_over_dp" if loss_convention == "mean_over_dp" else "sum"
    return divisor(workload.layout.dp, workload.layout.cp, convention)
