"""Calls the second oracle of the layer of experts as the recipe of its golden calls the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from self_tests.chapters.exchange.second import layer
from self_tests.chapters.experts.second import SwiGLU
from self_tests.goldens.second_oracles import second_oracle, with_tensors

NAMES = ("gate", "up", "down")


class Gradients(NamedTuple):
    """What the layer gives."""

    y_TD: Any
    dx_TD: Any
    dweights_TK: Any
    parameters: dict[tuple[str, int], Any]


def experts_of(parameters: Mapping[tuple[str, int], Any]) -> list[SwiGLU]:
    """The experts, in the order of their ids."""
    return [SwiGLU(*(parameters[name, e] for name in NAMES)) for e in range(len(parameters) // len(NAMES))]


def gradients(
    x_TD: Any, ids_TK: Any, weights_TK: Any, dy_TD: Any, _: Any, parameters: Any, *, weights_at: Any
) -> Gradients:
    """Output and all gradients."""
    batch, experts = [layer.Tokens(x_TD, ids_TK, weights_TK)], experts_of(parameters)
    made = layer.backward(batch, experts, weights_at, [dy_TD])
    d_parameters = {(name, e): d[NAMES.index(name)] for name in NAMES for e, d in enumerate(made.experts)}
    return Gradients(layer.forward(batch, experts, weights_at)[0], made.dx[0], made.dweights[0], d_parameters)


ORACLE = second_oracle(gradients=gradients, swiglu_experts=with_tensors(lambda parameters: parameters))
