"""Routing: published gates worked out on paper, the ends of each rule, and what cannot be routed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_conformance.reference.routing import routes as first
from self_tests.chapters.routing.second import routes as second
from self_tests.chapters.routing.second.routes import Gate, Limit
from self_tests.chapters.routing.test_pair import KINDS, first_margins, first_route, first_weights
from self_tests.oracles.agreement import floats
from self_tests.oracles.by_hand import by_hand, rows

INF, NAN = math.inf, math.nan


def first_token(logits: list[float], gate: Gate) -> tuple[Tensor, Tensor]:
    """Ids and weights of one token."""
    routed = first_route(np.array([logits]), gate)
    return routed.ids_TK[0], routed.weights_TK[0]


def second_token(logits: list[float], gate: Gate) -> tuple[Any, Any]:
    """The longhand's."""
    ids_TK, weights_TK = second.route(np.array([logits]), gate)
    return ids_TK[0], weights_TK[0]


def first_slope(logits: list[float], gate: Gate, ids: list[int], upstream: list[float]) -> Tensor:
    """The gradient of one token's logits, for these experts."""
    leaf = floats(np.array([logits]), leaf=True)
    weights_TK = first_weights(leaf, np.array([ids]), gate)
    return torch.autograd.grad(weights_TK, leaf, floats(np.array([upstream])))[0][0]


def second_slope(logits: list[float], gate: Gate, ids: list[int], upstream: list[float]) -> Any:
    """The longhand's."""
    return second.gradient(np.array([logits]), np.array([ids]), gate, np.array([upstream]))[0]


def first_margin(logits: list[float], ids: list[int], gate: Gate) -> list[float]:
    """The margin of one token's choice."""
    return first_margins(np.array([logits]), torch.tensor([ids]), gate)


def second_margin(logits: list[float], ids: list[int], gate: Gate) -> list[float]:
    """The longhand's."""
    return [second.margin_of_token(logits, ids, gate.limit)]


def weighs(*powers: float) -> list[float]:
    """Logits whose exponentials are these."""
    return [math.log(power) for power in powers]


def deepseek(rule: second.GroupRule | None, *, slots: int = 3, biased: bool = True) -> Gate:
    """Eight experts in four groups of two, of which two are open; sigmoid scores.

    score          .9   .1 |  .6  .5  |  .2  .7  |  .4  .3        logit = log(s / (1 - s))
    bias         -.15    0 |   0  .15 |   0  -.2 |  .3   0
    choice value  .75   .1 |  .6  .65 |  .2  .5  |  .7  .3
    top2_sum        .85    |   1.25   |    .7    |   1.0          groups 1 and 3
    max             .75    |    .65   |    .5    |    .7          groups 0 and 3
    """
    bias = (-0.15, 0.0, 0.0, 0.15, 0.0, -0.2, 0.3, 0.0) if biased else None
    return Gate(slots, "sigmoid", bias, None if rule is None else Limit(4, 2, rule), normalise=True, scale=2.5)


TABLE = [math.log(s / (1 - s)) for s in (0.9, 0.1, 0.6, 0.5, 0.2, 0.7, 0.4, 0.3)]
MIXTRAL, GROUPS = weighs(1, 2, 0.5, 6, 0.5), [0.9, 0.5, 0.7, 0.6, 0.1, 0.0]  # of groups, sums 1.4, 1.3 and .1


def among(slots: int, chosen: int, rule: second.GroupRule) -> Gate:
    """A gate over logits as they are, in three groups."""
    return Gate(slots, "softmax_topk", limit=Limit(3, chosen, rule))


test_by_hand = by_hand(
    *rows(first_token, second_token,
        ("Switch takes the softmax of the best", (weighs(1, 2, 5), Gate(1, "softmax")), ([2], [5 / 8])),
        ("Mixtral takes the softmax of the best two", (MIXTRAL, Gate(2, "softmax_topk")), ([3, 1], [6 / 8, 2 / 8])),
        ("OLMoE keeps the softmax over all", (MIXTRAL, Gate(2, "softmax")), ([3, 1], [0.6, 0.2])),
        ("Qwen3 divides by its sum", (MIXTRAL, Gate(2, "softmax", normalise=True)), ([3, 1], [0.75, 0.25])),
        ("GPT-OSS takes the softmax of the best four", (weighs(1, 5, 2, 4, 0.5, 3), Gate(4, "softmax_topk")),
         ([1, 3, 5, 2], [5 / 14, 4 / 14, 3 / 14, 2 / 14])),
        ("DeepSeek-V4 takes the root of the softplus",
         ([math.log(math.expm1(s * s)) for s in (0.5, 2.0, 1.0)], Gate(2, "sqrtsoftplus", normalise=True, scale=1.5)),
         ([1, 2], [1.0, 0.5])),
        ("DeepSeek-V3: groups by the sum of their best two", (TABLE, deepseek("top2_sum")),
         ([6, 3, 2], [1 / 1.5, 1.25 / 1.5, 1.0])),
        ("groups by their best", (TABLE, deepseek("max")), ([0, 6, 7], [2.25 / 1.6, 1.0 / 1.6, 0.75 / 1.6])),
        ("K = 3 of two groups adds up floor(3/2) = 1 score", (TABLE, deepseek("topk_sum")),
         ([0, 6, 7], [2.25 / 1.6, 1.0 / 1.6, 0.75 / 1.6])),
        ("K = 4 of two groups adds up 2", (TABLE, deepseek("topk_sum", slots=4)),
         ([6, 3, 2, 7], [1.0 / 1.8, 1.25 / 1.8, 1.5 / 1.8, 0.75 / 1.8])),
        ("without bias sums 1.0, 1.1, .9, .7 open groups 1 and 0", (TABLE, deepseek("top2_sum", biased=False)),
         ([0, 2, 3], [1.125, 0.75, 0.625])),
        ("without groups", (TABLE, deepseek(None)), ([0, 6, 3], [1.25, 1.0 / 1.8, 1.25 / 1.8])),
        # Group 0 = [-1, -9], best -1; group 1 = [-2, -3], best -2. Exclusion is -inf and not 0.
        ("an excluded expert never wins below zero",
         ([math.log(0.75), math.log(0.25), -9.0, -10.0], Gate(2, "softmax_topk", limit=Limit(2, 1, "max"))),
         ([0, 1], [0.75, 0.25])),
        *(
            (f"ties go to the lowest id, {kind}", ([0.0] * 5, Gate(4, kind, normalise=True)),
             ([0, 1, 2, 3], [0.25] * 4))
            for kind in KINDS
        ),
        *(
            (f"a masked expert weighs 0, {kind}", ([-INF, 0.7, -INF, 0.7], Gate(3, kind, normalise=True)),
             ([1, 3, 0], [0.5, 0.5, 0.0]))
            for kind in KINDS
        ),
        *(
            (f"a sum of zero gives weights of zero, {kind}", ([-INF] * 3, Gate(2, kind, normalise=True)),
             ([0, 1], [0.0, 0.0]))
            for kind in ("sigmoid", "sqrtsoftplus")
        ),
    ),
    *rows(first_slope, second_slope,
        # dw/dl_e = p_2 ([e = 2] - p_e) = 5/8 (-1/8, -2/8, 3/8)
        ("the gradient of Switch", (weighs(1, 2, 5), Gate(1, "softmax"), [2], [1.0]), [-5 / 64, -10 / 64, 15 / 64]),
        *(
            (f"Mixtral and Qwen3 derive alike, {kind}", (MIXTRAL, Gate(2, kind, normalise=True), [3, 1], [1.0, 0.0]),
             [0.0, -3 / 16, 0.0, 3 / 16, 0.0])
            for kind in ("softmax_topk", "softmax")
        ),
        # dw/ds_6 = 2.5 (1.5 - .4) / 2.25; dw/ds_3 = dw/ds_2 = -2.5 * .4 / 2.25; ds/dl = s (1 - s). No bias in it.
        ("DeepSeek-V3: through the quotient and the sigmoid", (TABLE, deepseek("top2_sum"), [6, 3, 2], [1.0, 0.0, 0.0]),
         [0.0, 0.0, -1.0 / 2.25 * 0.24, -1.0 / 2.25 * 0.25, 0.0, 0.0, 2.75 / 2.25 * 0.24, 0.0]),
        *(
            (f"a sum of zero has no gradient, {kind}", ([-INF] * 3, Gate(2, kind, normalise=True), [0, 1], [1.3, -0.4]),
             [0.0] * 3)
            for kind in ("sigmoid", "sqrtsoftplus")
        ),
    ),
    # The smaller lead decides: of the worst chosen expert, or of its group, shared by the scores it sums.
    *rows(first_margin, second_margin,
        (".9 before group 1's .7", (GROUPS, [0], among(1, 1, "max")), [0.2]),
        ("group 0's 1.4 before 1.3: .1 for two scores", (GROUPS, [0], among(1, 1, "top2_sum")), [0.05]),
        ("the better group lost by as much", (GROUPS, [2], among(1, 1, "top2_sum")), [-0.05]),
        ("and in its own group .6 lost against .7", (GROUPS, [3], among(1, 1, "top2_sum")), [-0.1]),
        ("whichever the second group was, at worst group 1", (GROUPS, [0], among(1, 2, "top2_sum")), [0.2]),
        ("two groups where one is open", (GROUPS, [0, 2], among(2, 1, "max")), [-INF]),
        ("all groups open: .5 lost against .9", (GROUPS, [1, 2], among(2, 3, "max")), [-0.4]),
        ("with K = E no other choice exists", ([2.0, 2.0, 1.0], [0, 1, 2], Gate(3, "softmax_topk")), [INF]),
        ("an exact tie has margin 0", ([2.0, 2.0, 1.0], [1], Gate(1, "softmax_topk")), [0.0]),
    ),
)  # fmt: skip

ROW, ONE_OF = np.zeros((1, 3)), np.array([[1]])
NOT_ROUTED: list[tuple[str, str, Callable[[], Any]]] = [
    *(
        (
            f"logit {bad}, {kind}",
            "logit",
            lambda bad=bad, kind=kind: first_route(np.array([[0.0, bad, 1.0]]), Gate(1, kind)),
        )
        for bad in (NAN, INF)
        for kind in KINDS
    ),
    *(
        (
            f"no expert left, {kind}",
            "-inf",
            lambda kind=kind: first.scores(torch.tensor([[0.0, 1.0], [-INF, -INF]]), kind),
        )
        for kind in ("softmax", "softmax_topk")
    ),
    (
        "no chosen expert left",
        "-inf",
        lambda: first_weights(floats(np.array([[0.0, -INF]])), ONE_OF, Gate(1, "softmax_topk")),
    ),
    ("an empty slot", "-1", lambda: first_weights(floats(ROW), np.array([[0, -1]]), Gate(2))),
    ("an unknown score", "sotfmax", lambda: first.scores(torch.zeros(1, 2), "sotfmax")),  # type: ignore[arg-type]
    *(
        (name, r"groups|top_k", lambda experts=experts, gate=gate: first_route(np.zeros((1, experts)), gate))
        for name, experts, gate in [
            ("K > E", 3, Gate(4)),
            ("K = 0", 3, Gate(0)),
            ("uneven groups", 5, Gate(1, limit=Limit(2, 1, "max"))),
            ("more groups than there are", 6, Gate(1, limit=Limit(3, 4, "max"))),
            ("no group", 6, Gate(1, limit=Limit(3, 0, "max"))),
            ("few experts", 6, Gate(3, limit=Limit(3, 1, "max"))),
            ("no second best", 3, Gate(1, limit=Limit(3, 2, "top2_sum"))),
            ("no share", 6, Gate(1, limit=Limit(3, 2, "topk_sum"))),
        ]
    ),
    *(
        (f"margins of {ids}", "different experts", lambda ids=ids: first_margins(ROW, torch.tensor([ids]), Gate(2)))
        for ids in ([0, 0], [0, 3], [-1, 2])
    ),
]


@pytest.mark.parametrize(("word", "question"), [row[1:] for row in NOT_ROUTED], ids=[row[0] for row in NOT_ROUTED])
def test_what_has_no_answer_is_refused(word: str, question: Callable[[], Any]) -> None:
    """A NaN of the oracle would agree with anybody's NaN."""
    with pytest.raises(ValueError, match=word):
        question()
