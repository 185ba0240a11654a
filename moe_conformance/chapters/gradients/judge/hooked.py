"""Judge of gradients passed to hooks of parameters, compared with those in `grad` after the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import by_phase
from moe_conformance.judging.verdict import NotOffered, WrongGradient
from moe_conformance.scenarios.outcome import RankOutcome
from moe_conformance.workloads.records.workload import ParameterKey


@judge(WrongGradient, "gradient")
def judge_hooked(reading: Reading) -> Comparisons:
    """Decide whether the gradients that autograd passed to a parameter's hooks add up to `grad`, bit for bit.

    Compared on every rank before gradients are finished. Implementations that shard or reduce gradients in the backward
    depend on hooks.

    Raises:
        NotOffered: the session has gradients in other places than `grad`; autograd calls no hook of its parameters, as
            with shards of FSDP; or replicas reduce gradients in the backward, as DDP does, so that `grad` is the sum
            over them.
        WrongGradient: the hook of a parameter that has a gradient was passed none, or another one.
    """
    if any(_reduces_in_backward(reading, rank) for rank in reading.ranks):
        raise NotOffered("gradients are reduced over replicas in backwards, and hooks see them before that")
    passed = [rank.grads_hooked or {} for rank in reading.ranks]
    if not any(grad.value is not None for of_rank in passed for grad in of_rank.values()):
        raise NotOffered("autograd passes gradients to no hook of any parameter: something else puts them into grad")
    for rank, seen in zip(reading.ranks, passed, strict=True):
        for key, grad in rank.grads_local.items():
            if grad.value is None:
                continue
            wrong = _wrong(key, grad.value, seen[key].value if key in seen else None)
            finding = Finding("hook", f"rank {rank.rank}: {wrong}", (rank.rank,))
            yield Comparison(rank.rank, finding if wrong else "", elements=grad.value.numel())


def _reduces_in_backward(reading: Reading, rank: RankOutcome) -> bool:
    """Return whether a backward of a rank reduces anything with ranks of other exchange groups."""
    groups = reading.outcome.workload.layout.groups()
    near = [set(group) for name in ("ep_etp", "tp") for group in groups[name] if rank.rank in group]
    backwards = [calls for phase, calls in by_phase(rank).items() if phase.startswith("backward:")]
    reductions = [entry for calls in backwards for entry in calls if entry.reduce is not None]
    return any(not any(set(entry.ranks) <= group for group in near) for entry in reductions)


def _wrong(key: ParameterKey, expected: Tensor, seen: Tensor | None) -> str:
    """Return what is wrong with the gradient that a hook received, "" if nothing is."""
    whose = key[0] if key[1] is None else f"{key[0]} of expert {key[1]}"
    if seen is None:
        cause = "likely cause: the backward writes to grad itself"
        return f"the hook of {whose} was passed no gradient; expected its own in every backward; {cause}"
    if torch.equal(seen, expected):
        return ""
    at = int((seen.double() - expected.double()).abs().argmax())
    values = f"{float(seen.flatten()[at]):.6g}; expected {float(expected.flatten()[at]):.6g}"
    return f"the hook of {whose} was passed {values}, as it lies in grad after the backwards"
