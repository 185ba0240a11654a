"""Judges of router replay: recorded ids are used by their layer and microbatch, with weights of present logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

import torch
from torch import Tensor

from moe_conformance.chapters.routing.workloads.replay import CHANGES
from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.script import judge_refused, values
from moe_conformance.judging.shared.router.expected import RouterExpected
from moe_conformance.judging.shared.router.routers import require_ids
from moe_conformance.judging.verdict import AbsentGradient, Tally, WrongForm, WrongGradient, WrongSelection, WrongWeight
from moe_conformance.reference.forcing.routes import legal_ids
from moe_conformance.reference.routing import routes
from moe_conformance.reference.routing.replay import Asked, Place, record, replay, replayed_weights, routing_calls
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.training import RouterBatch
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Workload

Forward = Mapping[str, Sequence[Tensor]]


def judge_replayed_weights(outcome: Outcome, tally: Tally) -> None:
    """Decide whether replay uses the recorded ids, weights of present logits, and passes gradients to x.

    The first replay is of the recorded tokens, and must return their weights bit for bit.

    Raises:
        WrongForm: ids or weights have another shape.
        WrongSelection: ids differ from the recorded ones.
        WrongWeight, AbsentGradient, WrongGradient: weights or gradients are of other logits.
    """
    _judge_ids(outcome, tally)
    for rank in range(len(outcome.ranks)):
        recorded = values(outcome, 0, "forwards")[rank]
        for m, forward in enumerate(values(outcome, 1, "forwards")[rank]):
            for index, layer in enumerate(outcome.workload.config.replay.layers):
                was, now = (_by_expert(of_pass, index)[1] for of_pass in (recorded[m], forward))
                if not torch.equal(was, now):
                    what = f"replayed into the same tokens, the weights of {_where(rank, layer, m)}"
                    raise WrongWeight("route", f"{what} are not those of the recording, bit for bit", ranks=(rank,))
    _judge_values(outcome, tally)


def judge_places(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every layer replays in every microbatch the ids that it recorded there.

    Other passes may lie between. With recomputation gradients are judged too, which depend on the recomputed ids.

    Raises:
        WrongForm: ids of another shape, or no integers.
        WrongSelection: records or replayed ids of another layer or microbatch, or other ones.
        WrongWeight, AbsentGradient, WrongGradient: as `judge_replayed_weights`, with recomputation.
    """
    _judge_ids(outcome, tally)
    if outcome.workload.config.replay.recompute:
        _judge_values(outcome, tally)


@judge(WrongSelection, "route")
def _judge_ids(outcome: Outcome) -> Comparisons:
    layers, K = outcome.workload.config.replay.layers, outcome.workload.config.top_k
    for rank in range(len(outcome.ranks)):
        records = _records(outcome, rank)
        for number, call in enumerate(outcome.workload.calls[1:], 1):
            batches, schedule = call.given[rank]["batches"], call.given[rank]["schedule"]
            places = routing_calls(schedule, layers)
            requests = [Asked(place, _tokens(batches[place[1]]), K) for place in places]
            forwards = values(outcome, number, "forwards")[rank]
            for place, right_TK in zip(places, replay(records, requests), strict=True):
                ids_TK = _by_expert(forwards[place[1]], layers.index(place[0]))[0]
                if ids_TK.shape != right_TK.shape:
                    shapes = f"{tuple(ids_TK.shape)} instead of {tuple(right_TK.shape)}"
                    raise WrongForm("route", f"ids of {_where(rank, *place)} have the shape {shapes}", ranks=(rank,))
                if torch.equal(ids_TK, right_TK):
                    yield Comparison(rank, pairs=ids_TK.numel())
                    continue
                t = int((ids_TK != right_TK).any(1).nonzero()[0])
                others = [other for other, known_TK in records.items() if torch.equal(known_TK[: len(ids_TK)], ids_TK)]
                cause = f"; they are those of layer {others[0][0]}, microbatch {others[0][1]}" if others else ""
                words = f"token {t} was routed to {ids_TK[t].tolist()}, recorded were {right_TK[t].tolist()}"
                sentence = f"with {schedule!r}, {_where(rank, *place)} replays other ids: {words}{cause}"
                yield Comparison(rank, Finding("replayed", sentence, (rank,)))


def judge_lacking(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a replay without a record, or with a record of another T or K, is refused.

    Raises:
        Unrefused, Raised: it is accepted, or raises an internal error.
    """
    for number, change in enumerate(CHANGES, 1):
        judge_refused(outcome, number, tally, stage="route", asked=f"records of which {change}")


def _records(outcome: Outcome, rank: int) -> dict[Place, Tensor]:
    """Return the ids recorded on a rank, each row in ascending order: slot order has no meaning.

    Raises:
        WrongForm: ids are no integers.
        WrongSelection: the record differs from what the routers returned.
    """
    layers, forwards = outcome.workload.config.replay.layers, values(outcome, 0, "forwards")[rank]
    routes = [
        ((layer, m), _by_expert(forwards[m], n)[0]) for m in range(len(forwards)) for n, layer in enumerate(layers)
    ]
    right = record(routes)
    for place, ids_TK in right.items():
        require_ids(ids_TK, rank)
        if not bool(legal_ids(ids_TK, outcome.workload.config.experts).all()):
            raise WrongSelection("route", f"{_where(rank, *place)} recorded no legal selection", ranks=(rank,))
    kept = dict(zip(map(tuple, values(outcome, 0, "places")[rank]), values(outcome, 0, "ids")[rank], strict=True))
    for place in sorted({*right, *kept}):
        one, other = right.get(place), kept.get(place)
        if one is None or other is None or not torch.equal(one, other.sort(dim=1).values):
            sentence = f"the record of {_where(rank, *place)} is missing or not what its router returned"
            raise WrongSelection("route", sentence, ranks=(rank,))
    return right


def _judge_values(outcome: Outcome, tally: Tally) -> None:
    for rank in range(len(outcome.ranks)):
        for number in range(1, len(outcome.workload.calls)):
            for m, forward in enumerate(values(outcome, number, "forwards")[rank]):
                for index in range(len(outcome.workload.config.replay.layers)):
                    _judge_layer(outcome, number, rank, (m, index), forward, tally)


def _judge_layer(outcome: Outcome, number: int, rank: int, at: tuple[int, int], forward: Forward, tally: Tally) -> None:
    """Compare weights and dx of one layer in one microbatch with the oracle."""
    m, index = at
    workload, layer = outcome.workload, outcome.workload.config.replay.layers[index]
    batch: RouterBatch = workload.calls[number].given[rank]["batches"][m]
    x_TD = batch.x[index].reshape(-1, workload.config.hidden)
    ids_TK, weights_TK = _by_expert(forward, index)
    expected = _expected(workload, layer, Batch(x_TD, ids_TK, weights_TK, batch.upstream[index]))
    bias_E = workload.parameters.get(("gate_bias", layer))
    logits_TE = routes.logits(x_TD, workload.parameters["router", layer], bias_E)
    target = Target(replayed_weights(logits_TE, ids_TK, **expected.weighing), expected.weights((0, 0)).allowed)
    if weights_TK.shape != ids_TK.shape:
        raise WrongForm("route", f"weights of {_where(rank, layer, m)} do not have the shape of ids", ranks=(rank,))
    worst = compare(weights_TK, *target, tally, rank)
    if not worst.holds:
        sentence = f"the weights of {_where(rank, layer, m)} are not those of the present logits: {worst}"
        raise WrongWeight("route", sentence, ranks=(rank,))
    dx = forward["dx"][index]
    if dx is None or dx.numel() != x_TD.numel():
        raise AbsentGradient("gradient", f"dx of {_where(rank, layer, m)} is None or of another shape", ranks=(rank,))
    worst = compare(dx.reshape(x_TD.shape), *expected.dx((0, 0)), tally, rank)
    if not worst.holds:
        schedule = workload.calls[number].given[rank]["schedule"]
        sentence = f"with {schedule!r}, dx of {_where(rank, layer, m)} is wrong: {worst}"
        if workload.config.replay.recompute:
            sentence += "; likely cause: the forward that runs again in the backward replays another record"
        raise WrongGradient("gradient", sentence, ranks=(rank,))


def _expected(workload: Workload, layer: int, batch: Batch) -> RouterExpected:
    """Return the oracle's results for the tokens of one router."""
    parameters: dict[ParameterKey, Tensor] = {
        (name, None): value for (name, number), value in workload.parameters.items() if number == layer
    }
    batches = (tuple(batch for _ in range(workload.layout.world)),)  # only the first is used
    ids = {(0, rank): batch.ids_TK for rank in range(workload.layout.world)}
    return RouterExpected(changed(workload, batches=batches, parameters=parameters), ids, 1)


def _by_expert(forward: Mapping[str, Any], index: int) -> tuple[Tensor, Tensor]:
    """Return ids and weights of a layer, each row by ascending expert."""
    ids_TK, order_TK = forward["ids"][index].sort(dim=1)
    weights_TK = forward["weights"][index]
    return ids_TK, weights_TK.gather(1, order_TK) if weights_TK.shape == ids_TK.shape else weights_TK


def _tokens(batch: RouterBatch) -> int:
    return batch.x[0].shape[0] * batch.x[0].shape[1]


def _where(rank: int, layer: int, microbatch: int) -> str:
    return f"layer {layer} of rank {rank} in microbatch {microbatch}"
