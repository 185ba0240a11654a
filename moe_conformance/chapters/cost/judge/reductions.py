"""Over which ranks gradients of experts are reduced, in backwards or while they are finished, by the ledgers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.findings import some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import by_phase
from moe_conformance.judging.verdict import Costly, NotOffered, Tally
from moe_conformance.reference.cost import calls as cost_calls
from moe_conformance.workloads.records.workload import Workload


def judge_reductions(reading: Reading, tally: Tally) -> None:
    """Decide whether gradients of experts are reduced between replicas only, in backwards and while they are finished.

    While they are finished a rank may send less than the smallest part of a parameter elsewhere, all calls together:
    norms and flags. In a backward the same holds of what it reduces with ranks of other exchanges. With those of its
    own exchange, or of its tensor group, it reduces gradients of tokens and weights as well: `_most_of_tokens`.

    Raises:
        Costly: they are sent to other ranks.
        NotOffered: the backend finishes no gradients, or the ledger has no collective of replicas.
    """
    workload, found, unseen = reading.outcome.workload, [], []
    if any(rank.grads_final is None for rank in reading.ranks):
        raise NotOffered(reading.ranks[0].finish_refusal or "the backend finishes no gradients")
    for group in workload.layout.groups()["edp"]:
        for rank in group:
            phases = {name: calls for name, calls in by_phase(reading.ranks[rank]).items() if _reduces(name)}
            for phase, calls in phases.items():
                if astray := _astray(workload, rank, group, phase, calls):
                    sent = f"{_elements(astray)} elements by {_words(astray)} in {phase}"
                    found.append(f"rank {rank} reduces {sent}; the replicas of its experts are {group_words(group)}")
            together = [entry for calls in phases.values() for entry in calls if set(_among(entry, rank)) <= set(group)]
            if len(group) > 1 and not any("float" in entry.dtype and len(entry.ranks) > 1 for entry in together):
                unseen.append(f"rank {rank} with {group_words(group)}")
            tally.add(pairs=1, rank=rank)
    if found:
        raise Costly("finish", some(found))
    if unseen:
        raise NotOffered(f"the ledger has no reduction of gradients over replicas: {some(unseen)}")


def _reduces(phase: str) -> bool:
    return phase == "finish" or phase.startswith("backward:")


def _astray(workload: Workload, rank: int, replicas: Sequence[int], phase: str, calls: Sequence[Entry]) -> list[Entry]:
    """Return the calls of a phase beyond the replicas that send gradients of experts."""
    least = min(value.numel() for value in workload.parameters.values()) // workload.layout.etp
    beyond = [entry for entry in calls if not cost_calls.legal_reduction(_among(entry, rank), replicas)]
    if phase == "finish":
        return beyond if _elements(beyond) >= least else []
    groups = workload.layout.groups()
    near = [set(group) for name in ("ep_etp", "tp") for group in groups[name] if rank in group]
    reduced = [entry for entry in beyond if entry.reduce is not None and "float" in entry.dtype]  # the rest are rows
    of_tokens = [entry for entry in reduced if any(set(entry.ranks) <= group for group in near)]
    others = [entry for entry in reduced if entry not in of_tokens]
    astray = others if _elements(others) >= least else []
    most = _most_of_tokens(workload, m=int(phase.partition(":")[2]), W=math.prod(map(len, near)))
    return astray + (of_tokens if _elements(of_tokens) >= max(least, most + 1) else [])


def _most_of_tokens(workload: Workload, m: int, W: int) -> int:
    """Count the numbers that a rank may give to be reduced in a backward for an exchange of the tokens of W ranks.

    A row for every pair and a map of weights for every token, as if all had as many tokens as the most, after padding;
    once for dispatch and for combine, and once more where the forward is computed anew. Where there are few tokens,
    that is less than the parameters of an expert.
    """
    config = workload.config
    most = max(len(batch.x_TD) for batch in workload.batches[m])
    T = max(-(-most // config.padding.alignment) * config.padding.alignment, config.padding.bound or 0)
    return 4 * W * T * (config.top_k * config.hidden + config.experts)


def _among(entry: Entry, rank: int) -> tuple[int, ...]:
    """Return the ranks of a call: of a message its two, whatever the group."""
    return entry.ranks if entry.peer is None else (rank, entry.peer)


def _elements(calls: Sequence[Entry]) -> int:
    return sum(math.prod(shape) for entry in calls for shape in entry.shapes_in)


def _words(calls: Sequence[Entry]) -> str:
    return some([f"{entry.op} on {group_words(entry.ranks)}" for entry in calls])
