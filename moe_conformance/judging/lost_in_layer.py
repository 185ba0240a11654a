"""Layers whose router drops: what the kept slots of a token add is left, and its shared part, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_conformance.judging.bounded import compare
from moe_conformance.judging.diagnosis import Finding, fail
from moe_conformance.judging.layer_expected import LayerExpected
from moe_conformance.judging.places import Place
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.verdict import Tally, WrongForm, WrongOutput
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
        y_TD, (expected_TD, allowed_TD) = _output(reading, (m, rank)), shared.y((m, rank))
        for t in _kept_by(shared, (m, rank), slots=0)[0]:
            worst = compare(y_TD[t], expected_TD[t], allowed_TD[t])
            if not worst.holds:
                sentence = f"rank {rank} token {t} lost all its slots, and y is not its shared part: {worst}"
                findings.append(Finding("lost", sentence, (rank,), worst.size))
            compared.append((rank, y_TD.shape[1], worst.ratio))
    if findings:
        fail(WrongOutput, "combine", findings)
    for rank, elements, ratio in compared:
        tally.add(elements=elements, rank=rank, worst=ratio)


def judge_kept_in_layer(reading: Reading, tally: Tally) -> None:
    """Decide whether y of tokens that kept a slot is what the kept ones and the shared part add, within rounding.

    Weights are those before the drop, each by itself: softmax over all experts, and no normalisation. Counts the
    elements of such tokens.

    Raises:
        WrongForm: y is missing, or not (T, D).
        WrongOutput: an element lies outside its bound.
    """
    expected = LayerExpected.of(reading)
    config = expected.workload.config
    assert config.score == "softmax"
    assert not config.normalise
    findings = list[Finding]()
    for place in expected.places:
        (m, rank), y_TD = place, _output(reading, place)
        for slots in range(1, config.top_k + 1):
            tokens, ids_nK = _kept_by(expected, place, slots)
            if not tokens:
                continue
            target = expected.y_of(place, tokens, ids_nK)
            for t, wanted_D, allowed_D in zip(tokens, *target, strict=True):
                worst = compare(y_TD[t], wanted_D, allowed_D, tally, rank)
                if not worst.holds:
                    kept = f"kept {slots} of {config.top_k} slots"
                    sentence = f"rank {rank} token {t} of microbatch {m} {kept}, and y is not theirs: {worst}"
                    findings.append(Finding("kept", sentence, (rank,), worst.size))
    if findings:
        fail(WrongOutput, "combine", findings)


def _output(reading: Reading, place: Place) -> Tensor:
    """Return y, (T, D).

    Raises:
        WrongForm: it is missing, or has another shape.
    """
    (m, rank), y_TD = place, reading.seen(*place).y
    if y_TD is None or y_TD.shape != reading.batches[m][rank].x_TD.shape:
        raise WrongForm("combine", f"y of rank {rank} in microbatch {m} is missing or not (T, D)", ranks=(rank,))
    return y_TD


def _kept_by(expected: LayerExpected, place: Place, slots: int) -> tuple[list[int], Tensor]:
    """Return the tokens of a place that keep that many slots, by the policy of position, and whom they keep, (n, k)."""
    config, ids_TK = expected.workload.config, expected.ids(place)
    assert config.capacity_factor is not None
    sizes = (len(ids_TK), config.top_k, config.experts)
    room = capacity.capacities(*sizes, factor=config.capacity_factor, minimum=config.min_capacity)[0]
    kept_TK = capacity_drops.keep(ids_TK, config.experts, capacity=room, policy="position")
    here_T = kept_TK.sum(1) == slots
    tokens: list[int] = here_T.nonzero().flatten().tolist()
    return tokens, ids_TK[here_T][kept_TK[here_T]].reshape(len(tokens), slots)
