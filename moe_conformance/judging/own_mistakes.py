"""Mistakes to explain a wrong result by: other runs of the oracle for the backend's own experts, each said in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.judging.own_expected import OwnExpected, parameters_of, solve
from moe_conformance.judging.places import Place, shard_of
from moe_conformance.workloads.records import Batch, Workload
from reference.experts import Parameters
from reference.layer import Gradients, WeightsAt

Run = tuple[str, Gradients]  # "gate and up were swapped", and what then comes out


def other_runs(expected: OwnExpected, places: Sequence[Place]) -> Iterator[Run]:
    """Run the oracle on the tokens of some places with one mistake after the other."""
    workload, at = expected.workload, expected.weights_at
    other: WeightsAt = "output" if at == "input" else "input"
    yield f"the weights were applied at the experts' {other}", solve(workload, places, other)
    for words, parameters in _other_parameters(workload):
        yield words, solve(workload, places, at, parameters)
    for words, changed in _other_routings(workload):
        yield words, solve(changed, places, at)


def _other_parameters(workload: Workload) -> Iterator[tuple[str, Parameters]]:
    parameters, E, layout = parameters_of(workload), workload.config.experts, workload.layout
    swapped = {"gate": "up", "up": "gate", "down": "down"}
    yield "gate and up were swapped", {(swapped[name], e): value for (name, e), value in parameters.items()}
    for by in dict.fromkeys((1, E - 1, E // layout.ep)):
        if by % E:
            shifted = {(name, e): parameters[name, (e + by) % E] for name, e in parameters}
            yield f"expert e had the parameters of expert (e + {by}) modulo {E}", shifted
    for i in range(layout.etp) if layout.etp > 1 else ():
        part = {key: _only_part(key[0], value, i, layout.etp) for key, value in parameters.items()}
        yield f"only the part of etp shard {i} was in it", part


def _only_part(name: str, value: Tensor, index: int, of: int) -> Tensor:
    """Set a parameter to zero outside one etp shard's part of the hidden units F."""
    dim = 1 if name == "down" else 0
    kept = torch.zeros_like(value)
    shard_of(kept, (dim, index, of)).fill_(1)
    return value * kept


def _other_routings(workload: Workload) -> Iterator[tuple[str, Workload]]:
    K = workload.config.top_k
    yield "all weights were 1", _each(workload, lambda b: replace(b, weights_TK=torch.ones_like(b.weights_TK)))
    yield "the weights were applied twice", _each(workload, lambda b: replace(b, weights_TK=b.weights_TK**2))
    if K == 1:
        return
    for by in dict.fromkeys((1, K - 1)):
        words = f"slot k had the weight of slot (k + {by}) modulo {K}"
        yield words, _each(workload, lambda b, by=by: replace(b, weights_TK=b.weights_TK.roll(-by, 1)))  # type: ignore[misc]
    for k in range(K):
        yield f"slot {k} were empty", _each(workload, lambda b, k=k: replace(b, ids_TK=_without(b.ids_TK, k)))  # type: ignore[misc]


def _each(workload: Workload, change: Callable[[Batch], Batch]) -> Workload:
    return replace(workload, batches=tuple(tuple(map(change, ranks)) for ranks in workload.batches))


def _without(ids_TK: Tensor, slot: int) -> Tensor:
    left_TK = ids_TK.clone()
    left_TK[:, slot] = -1
    return left_TK
