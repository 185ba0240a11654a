"""Judge of the router parameters of a new model: finite, different for each expert, and equal on all ranks."""

from __future__ import annotations

import torch

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.scopes import stages
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import Tally, Uncovered, WrongParameter
from moe_conformance.reference.routing.initial import differing, usable
from moe_conformance.scenarios.outcome import Outcome


def judge_initial(outcome: Outcome, tally: Tally) -> None:
    """Decide whether the parameters of a new router are usable, and equal on all ranks of a pipeline stage.

    Shards are compared with their replicas.

    Raises:
        Uncovered: a rank names no router.
        WrongParameter: a parameter is not finite, the weight is the same for all experts, or ranks differ.
    """
    found = values(outcome, 0, "parameters")
    findings = []
    for rank, parameters in enumerate(found):
        if not any(parameter["name"] == "router" for parameter in parameters):
            raise Uncovered(
                "route", f"the weight of the router is not yielded by 'named' on rank {rank}", ranks=(rank,)
            )
        for parameter in parameters:
            if problem := usable(parameter["value"], by_expert=parameter["name"] == "router"):
                findings.append(Finding(problem, f"{parameter['name']} of rank {rank} {problem}", (rank,)))
            tally.add(elements=parameter["value"].numel(), rank=rank)
    if findings:
        fail(WrongParameter, "run", findings, start="in a new model, ")
    for ranks in stages(outcome.workload.layout):
        for name, shard in {(parameter["name"], parameter["shard"]) for rank in ranks for parameter in found[rank]}:
            held = {rank: _of(found[rank], name, shard) for rank in ranks}
            present = {rank: value for rank, value in held.items() if value is not None}
            for rank in differing(present):
                first = min(present)
                value, other = present[rank], present[first]
                sentence = f"{name} of rank {rank} differs from that of rank {first}"
                if value.shape == other.shape:
                    at = tuple((value != other).nonzero()[0].tolist())
                    sentence += f": {float(value[at]):.6g} and {float(other[at]):.6g} at {list(at)}"
                findings.append(Finding("differs", f"{sentence}, and both start from there", (rank,)))
    if findings:
        fail(WrongParameter, "run", findings, start="in a new model, ")


def _of(parameters: list[dict[str, object]], name: str, shard: object) -> torch.Tensor | None:
    for parameter in parameters:
        if (parameter["name"], parameter["shard"]) == (name, shard):
            assert isinstance(parameter["value"], torch.Tensor)
            return parameter["value"]
    return None
