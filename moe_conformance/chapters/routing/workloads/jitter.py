"""Routers and a layer with jitter, in training and evaluation mode, and random routes with recomputation.

Every row of the router's weight has one nonzero element, so that logits show the factors: the first rows read one
column each, the others read some of these columns again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.layers import JITTERED, JITTERED_TOO, layer_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import LayerStep, RouterStep, Script
from moe_conformance.workloads.records.workload import Batch, Call, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

_D, _E, _K, _T = 16, 24, 4, 40
TRAINING, EVALUATION = (1, 2, 7), (4, 5)  # numbers of calls; the first two of training have the same tokens


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the script of a router with jitter: training, evaluation, and training again."""
    if layout.world > USUAL_RANKS:
        return
    config = Config(variant, _E, _K, _D, jitter=0.25)
    identity_DD = torch.eye(_D)
    router_ED = torch.cat([identity_DD, -identity_DD[: _E - _D]])
    drawn = [_given(rank, layout) for rank in range(layout.world)]
    tokens, others, upstream = ([of_rank[i] for of_rank in drawn] for i in range(3))
    calls = (
        _switch(True, layout),
        *[_call(tokens, upstream)] * 2,
        _switch(False, layout),
        *[_call(tokens)] * 2,
        _switch(True, layout),
        _call(others, upstream),
    )
    parameters: dict[ParameterKey, torch.Tensor] = {("router", None): router_ED}
    yield Workload("jitter", Script("router"), config, layout, (), parameters=parameters, calls=calls)


def _given(rank: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two batches of tokens of a rank, with no value near 0, and an upstream gradient (T, K)."""
    g = draw.generator("jitter", layout.name, rank)
    drawn_2TD = torch.randn(2, _T + 2 * rank, _D, generator=g)
    x_2TD = drawn_2TD + drawn_2TD.sign() / 2
    return x_2TD[0], x_2TD[1], torch.randn(_T + 2 * rank, _K, generator=g)


def _switch(mode: bool, layout: Layout) -> Call:
    return Call("train", ({"mode": mode},) * layout.world)


def _call(x: list[torch.Tensor], upstream: list[torch.Tensor] | None = None) -> Call:
    given = tuple({"x": x_TD} for x_TD in x)
    if upstream is None:
        return Call("__call__", given)
    return Call("__call__", given, ("x",), tuple({"routing.weights_TK": upstream_TK} for upstream_TK in upstream))


def layers(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layer with jitter, whose router is zero."""
    if layout.world <= USUAL_RANKS:
        workload = layer_workload(JITTERED, variant, layout)
        zero_ED = torch.zeros_like(workload.parameters["router", None])
        parameters = {**workload.parameters, ("router", None): zero_ED}
        yield replace(workload, run=LayerStep(noise=True), parameters=parameters)


_ALTERNATING = "recomputed-forced-alternating"  # of two microbatches it would be back where it began
_NOISY: dict[str, dict[str, Any]] = {
    "recomputed-jitter": {"jitter": 0.5},
    "recomputed-forced-random": {"routing.forced": (("random", None),)},
    _ALTERNATING: {"routing.forced": (("alternating", None),)},
}


def recomputed(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield routers with random or alternating routes, by jitter or forcing, with microbatches in flight."""
    if layout.world > USUAL_RANKS:
        return
    for name, options in _NOISY.items():
        config = Config(variant).changed(options)

        def batch(m: int, rank: int, name: str = name, config: Config = config) -> Batch:
            return draw.route_batch(12 + 2 * rank, config, draw.generator(name, layout.name, m, rank), 1.0)

        microbatches, schedule = (3, "F0 F1 F2 B0 B1 B2") if name == _ALTERNATING else (2, "F0 F1 B0 B1")
        batches = tuple(tuple(batch(m, rank) for rank in range(layout.world)) for m in range(microbatches))
        parameters = draw.router_parameters(config, draw.generator(name, "router"), bias=0.0, twins=False)
        yield Workload(name, RouterStep(noise=True), config, layout, batches, schedule, parameters)


def recomputed_layers(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layer whose routes are random, by jitter."""
    if layout.world <= USUAL_RANKS:
        yield replace(layer_workload(JITTERED_TOO, variant, layout), run=LayerStep(noise=True))


CHAPTERS = (
    Chapter((Script("router"),), ("jitter",), scripts, quick=(SINGLE, EP2)),
    Chapter((LayerStep(noise=True),), (JITTERED.name,), layers, quick=(EP2,)),
    Chapter((RouterStep(noise=True),), tuple(_NOISY), recomputed, quick=(SINGLE, EP2)),
    Chapter((LayerStep(noise=True),), (JITTERED_TOO.name,), recomputed_layers, quick=(EP2,)),
)
