"""Judge of experts' gradients that are sharded over replicas: complete, not repeated, and right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.finished_gradients import finals_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import shard_of
from moe_conformance.judging.shared.experts.experts import (
    expected_of,
    judge_expert_gradients,
    judge_idle_expert_gradients,
)
from moe_conformance.judging.verdict import Tally, Uncovered, WrongForm
from moe_conformance.reference.gradients.shards import Shard, copies, whole


def judge_sharded_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether the shards of finished gradients make up whole gradients, once, which are right.

    With replicas of an expert, every element of its gradient is on one rank of its pipeline stage only.

    Raises:
        NotOffered, AbsentGradient, WrongGradient: as `judge_expert_gradients`.
        Uncovered: an element is on no rank, or on more ranks than another.
        WrongForm: every replica keeps the whole gradient.
    """
    judge_expert_gradients(reading, tally)
    judge_idle_expert_gradients(reading, tally)
    expected, layout = expected_of(reading), reading.outcome.workload.layout
    findings = []
    for ranks in expected.stages:
        shards, sizes = _shards(reading, ranks)
        try:
            held = copies(shards, sizes)
            whole(shards, sizes)
        except ValueError as error:
            raise Uncovered("finish", f"of the ranks {list(ranks)}: {error}", ranks=ranks) from error
        for name, number in held.items():
            if number > 1 and number == layout.edp:
                sentence = (
                    f"the gradient of {name} is whole on each of its {number} replicas; expected: a part on each; "
                    f"likely cause: sharding={reading.outcome.workload.config.sharding!r} was requested, accepted and "
                    "ignored"
                )
                findings.append(Finding("whole", sentence, ranks))
    if findings:
        fail(WrongForm, "finish", findings)


def _shards(reading: Reading, ranks: Sequence[int]) -> tuple[list[list[Shard]], dict[str, int]]:
    """Return the shards on every rank, in the oracle's form, and the size of every parameter."""
    places, sizes = {}, {}
    for key, full in reading.outcome.workload.parameters.items():
        name = f"{key[0]} of expert {key[1]}"
        sizes[name] = full.numel()
        places[key] = name, torch.arange(full.numel()).reshape(full.shape)
    final, shards = finals_of(reading), []
    for rank in ranks:
        of_rank = []
        for key, grad in final[rank].items():
            assert grad.value is not None  # an absent one has been judged before
            name, elements = places[key]
            of_rank.append(Shard(name, shard_of(elements, grad.shard).flatten(), grad.value.flatten()))
        shards.append(of_rank)
    return shards, sizes
