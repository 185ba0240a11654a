"""Mistakes in activations and biases of experts: runs of the oracle with one mistake each, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.experts.expected import (
    ExpertsExpected,
    Key,
    batch_of,
    function_of,
    parameters_of,
    solve,
)
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import Expert, Function, Parameters, activated, hidden

Build = Callable[[Parameters], Expert]
Run = tuple[str, layer.Gradients]
_Hide = Callable[[Tensor | None, Tensor], Tensor]

_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu (by tanh)",
    "relu": "relu",
    "squared_relu": "the square of relu",
}


def other_functions(config: Config) -> Iterator[tuple[str, Build]]:
    """Yield experts with a mistake in the activation, each in words."""
    function = function_of(config)
    if function.limit is not None:
        yield from _other_limits(function, function.limit)
    if function.slope != 1.0:
        yield f"the slope was 1, not {function.slope}", _built(partial(hidden, function._replace(slope=1.0)))
    if function.offset:
        yield f"the offset {function.offset:g} was left out", _built(partial(hidden, function._replace(offset=0.0)))
        yield "the offset was added to the gate", _built(_offset_of_gate(function))
    for name, words in _NAMES.items():
        if name != function.activation:
            other = function._replace(activation=name, slope=1.0)
            yield f"the activation was {words}", _built(partial(hidden, other))
    yield "there was no activation", _built(_without_activation(function))
    yield "the gradient of the activation was left out", _built(_straight_through(function))


def _other_limits(function: Function, limit: float) -> Iterator[tuple[str, Build]]:
    unlimited = function._replace(limit=None)

    def cut(of_gate: Callable[[Tensor], Tensor], of_up: Callable[[Tensor], Tensor]) -> Build:
        def hide(gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
            assert gate_RF is not None
            return hidden(unlimited, of_gate(gate_RF), of_up(up_RF))

        return _built(hide)

    def as_it_is(z: Tensor) -> Tensor:
        return z

    def above(z: Tensor) -> Tensor:
        return z.clamp(max=limit)

    def both(z: Tensor) -> Tensor:
        return z.clamp(-limit, limit)

    def passing(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda z: z + (of(z) - z).detach()

    yield "nothing was cut to the limit", cut(as_it_is, as_it_is)
    yield "the gate was not cut to the limit", cut(as_it_is, both)
    yield "up was not cut to the limit", cut(above, as_it_is)
    yield "the gate was cut to the negative limit too", cut(both, both)
    yield "up was cut above only", cut(above, above)
    yield "gradients passed where the limit cuts", cut(passing(above), passing(both))
    yield "the gradient of the gate passed where the limit cuts", cut(passing(above), both)
    yield "the gradient of up passed where the limit cuts", cut(above, passing(both))


def _offset_of_gate(function: Function) -> _Hide:
    def hide(gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        without = function._replace(offset=0.0)
        return hidden(without, None if gate_RF is None else gate_RF + function.offset, up_RF)

    return hide


def _without_activation(function: Function) -> _Hide:
    def hide(gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        return up_RF if gate_RF is None else gate_RF * (up_RF + function.offset)

    return hide


def _straight_through(function: Function) -> _Hide:
    """Return a function with the value of the activation and the derivative 1."""

    def passed(z: Tensor) -> Tensor:
        return z + (activated(z, function.activation, function.slope) - z).detach()

    def hide(gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        if gate_RF is None:
            return passed(up_RF)
        if function.limit is not None:
            gate_RF, up_RF = gate_RF.clamp(max=function.limit), up_RF.clamp(-function.limit, function.limit)
        return passed(gate_RF) * (up_RF + function.offset)

    return hide


def _built(hide: _Hide) -> Build:
    """Return experts with another function between their projections."""

    def build(parameters: Parameters) -> Expert:
        def projected(rows: Tensor, e: int, name: str, bias: str) -> Tensor:
            out = rows @ parameters[name, e].T
            return out + parameters[bias, e] if (bias, e) in parameters else out

        def expert(rows_RD: Tensor, e: int) -> Tensor:
            gate_RF = projected(rows_RD, e, "gate", "bias_gate") if ("gate", e) in parameters else None
            return projected(hide(gate_RF, projected(rows_RD, e, "up", "bias_up")), e, "down", "bias")

        return expert

    return build


# ---- biases ------------------------------------------------------------------------------------------------------


def other_biases(expected: ExpertsExpected, places: Sequence[Place]) -> Iterator[Run]:
    """Yield runs of the oracle with biases that are left out, weighted wrongly or added too often."""
    workload, at, parameters = expected.workload, expected.weights_at, parameters_of(expected.workload)
    names = {name for name, _ in parameters}
    if "bias" not in names:
        return
    whole = solve(workload, places, at)

    def without(*left_out: str) -> layer.Gradients:
        """Return the gradients of a run in which some biases are left out and have no gradient."""
        kept = {key: torch.zeros_like(value) if key[0] in left_out else value for key, value in parameters.items()}
        run = solve(workload, places, at, kept)
        none = {key: torch.zeros_like(value) for key, value in run.parameters.items() if key[0] in left_out}
        return replace(run, parameters={**run.parameters, **none})

    bare = without("bias")
    yield "the output bias was left out", bare
    if "bias_up" in names:
        yield "the inner biases were left out", without("bias_gate", "bias_up")
    other = _weighed_otherwise(expected, places)
    how = "was multiplied" if at == "input" else "was not multiplied"
    yield f"the output bias {how} by the routing weight", _sum(bare, other, 1)
    for times in dict.fromkeys((workload.layout.etp, workload.layout.tp)):
        if times > 1:
            yield f"the output bias was added {times} times", _times(bare, whole, times)
    for by in (1, workload.config.experts - 1):
        moved: dict[Key, Tensor] = {
            (name, e): parameters[name, (e + by) % workload.config.experts] if name == "bias" else value
            for (name, e), value in parameters.items()
        }
        words = f"expert e had the output bias of expert (e + {by}) modulo {workload.config.experts}"
        yield words, solve(workload, places, at, moved)


def _weighed_otherwise(expected: ExpertsExpected, places: Sequence[Place]) -> layer.Gradients:
    """Return the results of the biases alone, with weights where none belong, and without where they belong."""
    workload, batch = expected.workload, batch_of(expected.workload, places)
    right = parameters_of(workload)

    def build(parameters: Parameters) -> Expert:
        return lambda rows_RD, e: parameters["bias", e] + 0 * rows_RD

    weights_TK = batch.weights_TK if expected.weights_at == "input" else torch.ones_like(batch.weights_TK)
    run = layer.gradients(*batch._replace(weights_TK=weights_TK), build, right)
    return run if expected.weights_at == "input" else replace(run, dweights_TK=torch.zeros_like(run.dweights_TK))


def _sum(a: layer.Gradients, b: layer.Gradients, times: int) -> layer.Gradients:
    """Return `a` plus `times` times `b`, output by output."""
    return layer.Gradients(
        a.y_TD + times * b.y_TD,
        a.dx_TD + times * b.dx_TD,
        a.dweights_TK + times * b.dweights_TK,
        {key: value + times * b.parameters[key] for key, value in a.parameters.items()},
    )


def _times(bare: layer.Gradients, whole: layer.Gradients, times: int) -> layer.Gradients:
    """Return the results with the part of the biases, `whole` minus `bare`, added `times` times."""
    return _sum(bare, _sum(whole, bare, -1), times)
