"""Calls the second oracle of adding rows as the recipe of its golden calls the first."""

from __future__ import annotations

from typing import Any

from self_tests.chapters.exchange.second.layer import Tokens
from self_tests.chapters.experts import golden as experts
from self_tests.chapters.scatter import second
from self_tests.goldens.second_oracles import differentiable, second_oracle, with_tensors

UNANSWERED = ("views/out/slices",)  # views of real tensors, told by hand in test_second_oracles.py


def add_routed_backward(g_TD: Any, base_TD: Any, x_TD: Any, ids_TK: Any, weights_TK: Any, parameters: Any) -> list[Any]:
    """Gradients of base, tokens and weights, then of the parameters in their order."""
    tokens = Tokens(x_TD, ids_TK, weights_TK)
    dbase_TD, made = second.add_routed_backward(tokens, experts.experts_of(parameters), g_TD)
    by_expert = [made.experts[e][experts.NAMES.index(name)] for name, e in parameters]
    return [dbase_TD, made.dx[0], made.dweights[0], *by_expert]


ORACLE = second_oracle(
    second,
    scatter_add=differentiable(
        second.scatter_add, lambda g_ND, out_ND, index_J, src_JD: [*second.scatter_add_backward(index_J, g_ND)]
    ),
    add_routed=differentiable(
        lambda base_TD, x_TD, ids_TK, weights_TK, parameters: second.add_routed(
            base_TD, Tokens(x_TD, ids_TK, weights_TK), experts.experts_of(parameters)
        ),
        add_routed_backward,
    ),
    swiglu_experts=experts.ORACLE.swiglu_experts,
    addresses=second.paint,
    view_of=with_tensors(lambda tensor: second.View(tensor.data_ptr(), tensor.shape, tensor.stride(), 8)),
)
