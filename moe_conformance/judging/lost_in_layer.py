"""Tokens that a layer's router dropped wholly: what their shared experts add is left, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_conformance.judging.bounded import compare
from moe_conformance.judging.diagnosis import Finding, fail
from moe_conformance.judging.layer_expected import LayerExpected
from moe_conformance.judging.places import Place
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.verdict import Tally, WrongForm, WrongOutput
from moe_conformance.workloads.records import Workload
from reference import capacity, capacity_drops


def judge_lost_in_layer(reading: Reading, tally: Tally) -> None:
    """Decide whether y of tokens that lost all their slots is their shared part alone, within rounding.

    Counts the elements of such tokens.

    Raises:
        WrongForm: y is missing, or not (T, D).
        WrongOutput: an element lies outside its bound.
    """
    workload = reading.outcome.workload
    # Of weights that are all scaled by zero nothing is left of the routed part: this is the shared part.
    unweighted = replace(workload, config=replace(workload.config, scale=0.0))
    shared = LayerExpected.of(reading, unweighted)
    findings, compared = list[Finding](), list[tuple[int, int, float]]()
    for m, rank in shared.places:
        y_TD, (expected_TD, allowed_TD) = reading.seen(m, rank).y, shared.y((m, rank))
        if y_TD is None or y_TD.shape != expected_TD.shape:
            raise WrongForm("combine", f"y of rank {rank} in microbatch {m} is missing or not (T, D)", ranks=(rank,))
        for t in _lost(shared, workload, (m, rank)):
            worst = compare(y_TD[t], expected_TD[t], allowed_TD[t])
            if not worst.holds:
                sentence = f"rank {rank} token {t} lost all its slots, and y is not its shared part: {worst}"
                findings.append(Finding("lost", sentence, (rank,), worst.size))
            compared.append((rank, y_TD.shape[1], worst.ratio))
    if findings:
        fail(WrongOutput, "combine", findings)
    for rank, elements, ratio in compared:
        tally.add(elements=elements, rank=rank, worst=ratio)


def _lost(expected: LayerExpected, workload: Workload, place: Place) -> list[int]:
    """List the tokens of a place without any slot left, by the policy of position."""
    config, ids_TK = workload.config, expected.ids(place)
    assert config.capacity_factor is not None
    sizes = (len(ids_TK), config.top_k, config.experts)
    room = capacity.capacities(*sizes, factor=config.capacity_factor, minimum=config.min_capacity)[0]
    kept_TK = capacity_drops.keep(ids_TK, config.experts, capacity=room, policy="position")
    lost: list[int] = torch.nonzero(~kept_TK.any(1)).flatten().tolist()
    return lost
