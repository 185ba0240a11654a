"""Judge of the ranks over which experts' gradients are reduced, in backward or finishing, from the ledgers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_conformance.contract.topology import Layout
from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import by_phase
from moe_conformance.judging.verdict import Costly, NotOffered
from moe_conformance.reference.cost import calls as cost_calls
from moe_conformance.workloads.records.workload import Workload


@judge(Costly, "finish")
def judge_reductions(reading: Reading) -> Comparisons:
    """Decide whether experts' gradients are reduced between replicas only, in backward and in finishing.

    In finishing, all calls together may send other ranks less than the smallest part of a parameter: norms and flags.
    In a backward this also holds for reductions with ranks of other exchange groups. With ranks of its own exchange
    group, or of its tensor group, a rank also reduces gradients of tokens and weights: see `_most_of_tokens`.

    A backend that claims placement = "replicas" has replicas of an expert on other ep ranks as well.

    Raises:
        Costly: they are reduced with other ranks.
        NotOffered: the backend finishes no gradients, or the ledger has no collective of replicas.
    """
    workload, unseen = reading.outcome.workload, []
    redundant = reading.claims.placement == "replicas"
    if any(rank.grads_final is None for rank in reading.ranks):
        raise NotOffered(reading.ranks[0].finish_refusal or "the backend finishes no gradients")
    for group in _replicas(workload.layout, redundant=redundant):
        for rank in group:
            phases = {name: calls for name, calls in by_phase(reading.ranks[rank]).items() if _reduces(name)}
            for phase, calls in phases.items():
                if astray := _astray(workload, rank, group, phase, calls):
                    sent = f"{_elements(astray)} elements by {_words(astray)} in {phase}"
                    of = f"the replicas of its experts are {group_words(group)}"
                    yield Comparison(rank, f"rank {rank} reduces {sent}; {of}")
            together = [entry for calls in phases.values() for entry in calls if set(_among(entry, rank)) <= set(group)]
            if len(group) > 1 and not any("float" in entry.dtype and len(entry.ranks) > 1 for entry in together):
                unseen.append(f"rank {rank} with {group_words(group)}")
            yield Comparison(rank, pairs=1)
    if unseen:
        raise NotOffered(f"the ledger has no reduction of gradients over replicas: {some(unseen)}")


def _replicas(layout: Layout, *, redundant: bool) -> Sequence[tuple[int, ...]]:
    """Return the groups of ranks that may hold the same experts: those of edp, with redundant experts all of ep too."""
    if not redundant:
        return layout.groups()["edp"]
    near = {rank: group for group in layout.groups()["ep"] for rank in group}
    joined = [sorted({other for rank in group for other in near[rank]}) for group in layout.groups()["edp"]]
    return list(dict.fromkeys(tuple(group) for group in joined))


def _reduces(phase: str) -> bool:
    return phase == "finish" or phase.startswith("backward:")


def _astray(workload: Workload, rank: int, replicas: Sequence[int], phase: str, calls: Sequence[Entry]) -> list[Entry]:
    """Return the calls of a phase that reduce experts' gradients beyond the replicas."""
    least = min(value.numel() for value in workload.parameters.values()) // workload.layout.etp
    beyond = [entry for entry in calls if not cost_calls.legal_reduction(_among(entry, rank), replicas)]
    if phase == "finish":
        return beyond if _elements(beyond) >= least else []
    groups = workload.layout.groups()
    near = [set(group) for name in ("ep_etp", "tp") for group in groups[name] if rank in group]
    # other calls carry rows
    reduced = [entry for entry in beyond if entry.reduce is not None and "float" in entry.dtype]
    of_tokens = [entry for entry in reduced if any(set(entry.ranks) <= group for group in near)]
    others = [entry for entry in reduced if entry not in of_tokens]
    astray = others if _elements(others) >= least else []
    most = _most_of_tokens(workload, m=int(phase.partition(":")[2]), W=math.prod(map(len, near)))
    return astray + (of_tokens if _elements(of_tokens) >= max(least, most + 1) else [])


def _most_of_tokens(workload: Workload, m: int, W: int) -> int:
    """Return the most numbers of tokens and weights that a rank may reduce in a backward, with W ranks' tokens.

    That is a row for every pair and a map of weights for every token, as if all ranks had the most tokens of any, after
    padding; once for dispatch and for combine, and once more where the forward is recomputed. With few tokens this is
    less than the parameters of an expert.
    """
    config = workload.config
    most = max(len(batch.x_TD) for batch in workload.batches[m])
    T = max(-(-most // config.padding.alignment) * config.padding.alignment, config.padding.bound or 0)
    return 4 * W * T * (config.top_k * config.hidden + config.experts)


def _among(entry: Entry, rank: int) -> tuple[int, ...]:
    """Return the ranks of a call; of a point-to-point message only its two ranks."""
    return entry.ranks if entry.peer is None else (rank, entry.peer)


def _elements(calls: Sequence[Entry]) -> int:
    return sum(math.prod(shape) for entry in calls for shape in entry.shapes_in)


def _words(calls: Sequence[Entry]) -> str:
    return some([f"{entry.op} on {group_words(entry.ranks)}" for entry in calls])
