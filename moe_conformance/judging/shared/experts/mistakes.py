"""Mistakes of the backend's own experts: runs of the oracle with one mistake each, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Config
from moe_conformance.judging.explain.bounded import Candidate
from moe_conformance.judging.explain.bounded_gradients import Gradients, Oracle
from moe_conformance.judging.explain.bounded_tokens import Candidates
from moe_conformance.judging.observed.scopes import LOCAL_PART, Place, is_held, shard_of
from moe_conformance.judging.shared.experts.expected import ExpertsExpected, Key, experts_of, parameters_of, solve
from moe_conformance.judging.shared.experts.function_mistakes import other_biases, other_functions
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.exchange.layer import WeightsAt
from moe_conformance.reference.experts import Expert, Parameters, swiglu_experts
from moe_conformance.workloads.records.workload import Batch, Workload

Run = tuple[str, layer.Gradients]  # such as "gate and up were swapped", and the results with that mistake


def candidates_for(expected: ExpertsExpected, name: str) -> Candidates:
    """Return the function that yields what mistakes give for "y", "dx" or "dweights"."""
    field = {"y": "y_TD", "dx": "dx_TD", "dweights": "dweights_TK"}[name]

    def candidates(places: Sequence[Place]) -> Iterator[Candidate]:
        for words, run in other_runs(expected, places):
            yield words, getattr(run, field)
        K = expected.workload.config.top_k
        for by in range(1, K) if name == "dweights" else ():
            right_TK = solve(expected.workload, places, expected.weights_at).dweights_TK
            yield f"slot k had the gradient of slot (k + {by}) modulo {K}", right_TK.roll(-by, 1)

    return candidates


def gradients_of(expected: ExpertsExpected) -> Oracle:
    """Return the `Oracle` of parameter gradients over some tokens, and with mistakes."""
    workload, at = expected.workload, expected.weights_at
    return Oracle(
        workload,
        expected.divisor,
        lambda places: cast(Gradients, solve(workload, places, at).parameters),
        lambda places: ((words, cast(Gradients, run.parameters)) for words, run in other_runs(expected, places)),
    )


def other_runs(expected: ExpertsExpected, places: Sequence[Place]) -> Iterator[Run]:
    """Yield runs of the oracle on the tokens of some places, with one mistake each."""
    workload, at, parameters = expected.workload, expected.weights_at, parameters_of(expected.workload)
    other: WeightsAt = "output" if at == "input" else "input"
    yield f"the weights were applied at the experts' {other}", solve(workload, places, other)
    for words, build in _builds(workload.config):
        yield words, solve(workload, places, at, build=build)
    yield from other_biases(expected, places)
    for words, roles in _other_roles(workload):
        played = {role: parameters[key] for role, key in roles.items()}
        result = solve(workload, places, at, played)
        yield words, replace(result, parameters={key: result.parameters[role] for role, key in roles.items()})
    yield from _other_shards(expected, places)
    for words, changed in _other_routings(workload):
        yield words, solve(changed, places, at)


def _builds(config: Config) -> Iterator[tuple[str, Callable[[Parameters], Expert]]]:
    """Yield experts with a mistake between their projections."""
    if experts_of(config) is not swiglu_experts:
        yield from other_functions(config)
        return
    for name, activation in _ACTIVATIONS.items():
        yield f"the activation of the gate was {name}", _experts(activation)
    yield from _CUT.items()


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda z: z,
    "gelu": F.gelu,
    "gelu (by tanh)": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def _experts(
    activation: Callable[[Tensor], Tensor], passed: Callable[[Tensor], Tensor] = lambda up_RF: up_RF
) -> Callable[[Parameters], Expert]:
    def build(parameters: Parameters) -> Expert:
        def expert(rows_RD: Tensor, e: int) -> Tensor:
            gate_RF, up_RF = rows_RD @ parameters["gate", e].T, passed(rows_RD @ parameters["up", e].T)
            return (activation(gate_RF) * up_RF) @ parameters["down", e].T

        return expert

    return build


# Experts with the right output and a wrong backward.
_CUT: Mapping[str, Callable[[Parameters], Expert]] = {
    "no gradient passed through the gate": _experts(lambda z: F.silu(z).detach()),
    "no gradient passed through the up projection": _experts(F.silu, torch.Tensor.detach),
    "the gradient of the activation was left out": _experts(lambda z: z + (F.silu(z) - z).detach()),
}


def _other_roles(workload: Workload) -> Iterator[tuple[str, Mapping[Key, Key]]]:
    """Yield wrong assignments of parameters to roles, in words and as {role: parameter}."""
    E, held = workload.config.experts, workload.config.experts // workload.layout.ep
    keys = parameters_of(workload).keys()
    swapped = {"gate": "up", "up": "gate", "bias_gate": "bias_up", "bias_up": "bias_gate"}
    if workload.config.activation.gated:
        yield "gate and up were swapped", {key: (swapped.get(key[0], key[0]), key[1]) for key in keys}
    for by in dict.fromkeys((1, E - 1, held)):
        if by % E:
            words = f"expert e had the parameters of expert (e + {by}) modulo {E}"
            yield words, {(name, e): (name, (e + by) % E) for name, e in keys}
    for by in dict.fromkeys((1, held - 1)):
        if by % held and held < E:
            words = f"a rank's expert n had the parameters of its expert (n + {by}) modulo {held}"
            yield words, {(name, e): (name, e - e % held + (e + by) % held) for name, e in keys}


def _other_shards(expected: ExpertsExpected, places: Sequence[Place]) -> Iterator[Run]:
    """Yield runs of the oracle in which the hidden units F are cut wrongly into etp shards."""
    workload, at, parameters = expected.workload, expected.weights_at, parameters_of(expected.workload)
    etp, width = workload.layout.etp, workload.config.ffn // workload.layout.etp
    if etp == 1:
        return
    for i in range(etp):
        part = {key: _only_part(key[0], value, i, etp) for key, value in parameters.items()}
        yield f"only the output of etp shard {i} was used", solve(workload, places, at, part)
    for by in range(1, etp):

        def shifted(values: Parameters, by: int) -> Parameters:
            return {k: v.roll(by * width, 1) if k[0] == "down" else v for k, v in values.items()}

        result = solve(workload, places, at, shifted(parameters, by))
        words = f"etp shard i of gate and up met shard (i - {by}) modulo {etp} of down"
        yield words, replace(result, parameters=shifted(result.parameters, -by))


def _only_part(name: str, value: Tensor, index: int, of: int) -> Tensor:
    """Return a parameter with zeros outside one etp shard's part of F; an output bias belongs to all of F."""
    if name == "bias":
        return value
    kept = torch.zeros_like(value)
    shard_of(kept, (1 if name == "down" else 0, index, of)).fill_(1)
    return value * kept


def _other_routings(workload: Workload) -> Iterator[tuple[str, Workload]]:
    K = workload.config.top_k
    if workload.layout.ep > 1:
        yield LOCAL_PART, _local_part(workload)
    yield "all weights were 1", _with_routing(workload, weights=torch.ones_like)
    yield "the weights were applied twice", _with_routing(workload, weights=torch.square)
    for by in dict.fromkeys((1, K - 1)):
        if by % K:
            words = f"slot k had the weight of slot (k + {by}) modulo {K}"
            yield words, _with_routing(workload, weights=partial(torch.roll, shifts=-by, dims=1))
    for k in range(K) if K > 1 else ():
        yield f"slot {k} was empty", _with_routing(workload, ids=partial(_emptied, slots=[k]))
    for k in range(K) if K > 2 else ():
        others = [slot for slot in range(K) if slot != k]
        yield f"all slots but slot {k} were empty", _with_routing(workload, ids=partial(_emptied, slots=others))


def _local_part(workload: Workload) -> Workload:
    """Return a workload in which the slots of experts on other ranks are empty."""

    def emptied(rank: int, batch: Batch) -> Batch:
        return replace(
            batch,
            ids_TK=torch.where(is_held(workload.layout, rank, batch.ids_TK, workload.config.experts), batch.ids_TK, -1),
        )

    return replace(workload, batches=tuple(tuple(map(emptied, range(len(ranks)), ranks)) for ranks in workload.batches))


def _with_routing(
    workload: Workload,
    *,
    ids: Callable[[Tensor], Tensor] = lambda ids_TK: ids_TK,
    weights: Callable[[Tensor], Tensor] = lambda weights_TK: weights_TK,
) -> Workload:
    """Return a workload in which the routing of every batch is changed by two functions."""

    def changed(batch: Batch) -> Batch:
        return replace(batch, ids_TK=ids(batch.ids_TK), weights_TK=weights(batch.weights_TK))

    return replace(workload, batches=tuple(tuple(map(changed, ranks)) for ranks in workload.batches))


def _emptied(ids_TK: Tensor, slots: Sequence[int]) -> Tensor:
    left_TK = ids_TK.clone()
    left_TK[:, slots] = -1
    return left_TK
