"""Losses: published formulas worked out on paper, the ends of each rule, and what has no loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.losses import balance as first
from moe_conformance.reference.losses import over_ranks as first_over_ranks
from moe_conformance.reference.losses import z_loss as first_z
from moe_conformance.reference.routing.routes import Score
from self_tests.chapters.losses.second import balance as second
from self_tests.chapters.losses.second import scaling as second_scaling
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.losses.test_pair import KINDS, padding_of
from self_tests.oracles.agreement import floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
INF, LOG2 = math.inf, math.log(2)


def derived(loss: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its gradient with respect to the first token's logits."""
    return loss, torch.autograd.grad(loss, logits_TE, retain_graph=True)[0][0]


def first_auxiliary(case: Tokens, kind: Score) -> tuple[Tensor, Tensor]:
    """Loss with coefficient 1, and gradient of token 0."""
    leaf, ids = floats(case.logits_TE, leaf=True), torch.from_numpy(case.ids_TK)
    return derived(first.auxiliary_loss(leaf, ids, score=kind, coefficient=1.0, padding_T=padding_of(case)), leaf)


def first_sequence(case: Tokens, labels_T: Tensor, kind: Score, divisor: int | None = None) -> tuple[Tensor, Tensor]:
    """The same, by sequence."""
    leaf, ids = floats(case.logits_TE, leaf=True), torch.from_numpy(case.ids_TK)
    options: dict[str, Any] = {"score": kind, "coefficient": 1.0, "padding_T": padding_of(case), "divisor": divisor}
    return derived(first.sequence_loss(leaf, ids, labels_T, **options), leaf)


def second_auxiliary(case: Tokens, kind: Score) -> tuple[float, Floats]:
    """The longhand's."""
    loss = second.auxiliary(case, kind, 1.0)
    return loss.value, loss.gradient_TE[0]


def second_sequence(case: Tokens, labels_T: Ints, kind: Score, divisor: int | None = None) -> tuple[float, Floats]:
    """The longhand's."""
    loss = second.by_sequence(case, labels_T, kind, 1.0, divisor)
    return loss.value, loss.gradient_TE[0]


def first_step(step: list[list[Tokens]], kind: Score, *, remembers: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Losses of every microbatch, and gradients of the first token of each."""
    leaves = [[floats(part.logits_TE, leaf=True) for part in row] for row in step]
    ids = [[torch.from_numpy(part.ids_TK) for part in row] for row in step]
    padding = [[padding_of(part) for part in row] for row in step]
    losses_M = first_over_ranks.global_losses(
        leaves, ids, score=kind, coefficient=1.0, padding=padding, remembers=remembers
    )
    return [derived(loss, row[0]) for loss, row in zip(losses_M, leaves, strict=True)]


def second_step(step: list[list[Tokens]], kind: Score, *, remembers: bool = True) -> list[tuple[float, Floats]]:
    """The longhand's."""
    return [(value, parts[0][0]) for value, parts in second.over_a_step(step, kind, 1.0, remembers=remembers)]


def first_z_loss(logits_TE: Tensor, padding_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Z-loss with coefficient 1, and gradient of token 0."""
    leaf = logits_TE.requires_grad_()
    return derived(first_z.z_loss(leaf, coefficient=1.0, padding_T=padding_T), leaf)


def second_z_loss(logits_TE: Floats, padding_T: NDArray[np.bool_] | None = None) -> tuple[float, Floats]:
    """The longhand's."""
    loss = second.z(logits_TE, 1.0, padding_T)
    return loss.value, loss.gradient_TE[0]


def weighed(powers: Sequence[Sequence[float]], ids: Sequence[Sequence[int]]) -> Tokens:
    """Tokens whose exponentials are these."""
    return Tokens(np.log(np.array(powers, dtype=np.float64)), np.array(ids))


def dealt(*parts: list[int]) -> list[Tokens]:
    """Of each group of a microbatch, tokens with shares (3/4, 1/4) that choose 0, or (1/4, 3/4) that choose 1."""
    return [weighed([[[3, 1], [1, 3]][e] for e in part], [[e] for e in part]) for part in parts]


def collapsed(K: int) -> Tokens:
    """All of five tokens on the same K of six experts, with p = 1 / K there."""
    return Tokens(np.array([[0.0] * K + [-INF] * (6 - K)] * 5), np.array([list(range(K))] * 5))


# p: (1/2, 1/4, 1/4) (3/5, 1/5, 1/5) (1/8, 5/8, 1/4) (1/3, 1/6, 1/2); chosen 0, 0, 1, 2: f = (1/2, 1/4, 1/4).
# P in 480ths (187, 149, 144). N f.P = 3 (2*187 + 149 + 144) / 1920. Token 0: 3/4 p_e (f_e - 3/8).
SWITCH = weighed([[2, 1, 1], [3, 1, 1], [1, 5, 2], [2, 1, 3]], [[0], [0], [1], [2]])
# S = 3, E = 4: p in 8ths (4,2,1,1) (1,1,4,2) (3,3,1,1); first choices 0, 2, 0. c/S = (2/3, 0, 1/3, 0), m in 24ths
# (8, 6, 6, 4): l_aux = 1/4 (16 + 6) / 72. Token 0: f.p = 3/8; 4/3 p_e (f_e - 3/8).
GSHARD = weighed([[4, 2, 1, 1], [1, 1, 4, 2], [3, 3, 1, 1]], [[0], [2], [0]])
# Sequence A: scores (.8 .4 .2 .6) and (.9 .3 .5 .3), sums 2. Sequence B: (.1 .5 .25 .15) and (.2 .6 .1 .1), sums 1.
# f = n in either. A: n (2,0,1,1), P (.425 .175 .175 .225): 1.25. B: n (1,2,1,0), P (.15 .55 .175 .125): 1.425.
# Token 0: E f.p = 1.2; dL/dl_e = 1/2 (sequences) 1/2 (tokens) (.08 .12 .08 .12) (E f_e - 1.2).
SCORES = np.array([[0.8, 0.4, 0.2, 0.6], [0.9, 0.3, 0.5, 0.3], [0.1, 0.5, 0.25, 0.15], [0.2, 0.6, 0.1, 0.1]])
DEEPSEEK = Tokens(np.log(SCORES / (1 - SCORES)), np.array([[0, 3], [0, 2], [1, 2], [1, 0]]))
MIXED = Tokens(DEEPSEEK.logits_TE[[0, 2, 1, 3]], DEEPSEEK.ids_TK[[0, 2, 1, 3]])
# As one sequence: n (3,2,2,1), P (.2875 .3625 .175 .175): 1.05625. Token 0: 1/4 (.08 .12 .08 .12) (f_e - 1.05).
ONE_SEQUENCE = (1.05625, [0.009, -0.0015, -0.001, -0.0165])
# sqrt(log(1 + exp(l))) of 1/2 and 2: p (1/5, 4/5), f (0, 1). s' = (1 - exp(-s^2)) / (2 s).
SOFTPLUS = Tokens(np.log(np.expm1(np.array([[0.25, 4.0]]))), np.array([[1]]))
EIGHTHS = weighed([[1, 2, 5]], [[2, 1]])  # f (0, 1/2, 1/2), f.p = 7/16
EVEN = Tokens(np.random.default_rng(1).normal(size=(3, 6)), np.array([[0, 5], [1, 2], [4, 3]]))
ALL_CHOSEN = Tokens(EVEN.logits_TE, np.array([list(range(6))] * 3))
EQUAL = Tokens(np.full((3, 6), 0.3), np.array([[0, 5], [0, 5], [0, 3]]))
# p (3/4, 1/4) chooses 0 and its mirror 1, two tokens each. Scores need not lean as choices do: 2 of 3 tokens at
# p (.51, .49) and one at (0, 1).
LEANING = weighed([[3, 1], [3, 1], [1, 3], [1, 3]], [[0], [0], [1], [1]])
NOT_LEANING = weighed([[51, 49], [51, 49], [1e-300, 100]], [[0], [0], [1]])
UNEVEN = np.log(np.array([[0.5, 0.5], [1.0, 1.0], [1.0, 3.0]]))  # Z = 0, log 2, 2 log 2

LOGITS_2, IDS_2, LABELS_2 = np.zeros((2, 3)), np.array([[0, 2], [1, 0]]), np.array([0, 0])
TWO = Tokens(LOGITS_2, IDS_2)
NO_LOSS = [
    ("NaN", TWO._replace(logits_TE=np.array([[0.0, math.nan, 0.0], [0.0] * 3]))),
    ("infinity", TWO._replace(logits_TE=np.array([[0.0] * 3, [INF, 0.0, 0.0]]))),
    ("id E", TWO._replace(ids_TK=np.array([[0, 3], [1, 0]]))),
    ("id -2", TWO._replace(ids_TK=np.array([[0, -2], [1, 0]]))),
    ("no slots", TWO._replace(ids_TK=IDS_2[:, :0])),
    ("ids of fewer tokens", TWO._replace(ids_TK=IDS_2[:1])),
    ("ids of 32 bits", TWO._replace(ids_TK=IDS_2.astype(np.int32))),
    ("a mask of fewer tokens", TWO._replace(padding_T=np.array([False]))),
    ("a mask of two dims", TWO._replace(padding_T=np.array([[False], [True]]))),
    ("a mask of numbers", TWO._replace(padding_T=np.array([0, 1]))),
]
MASKED = TWO._replace(logits_TE=np.array([[0.0] * 3, [-INF] * 3]))
NO_TOKEN_LOSS = [(f"{name}, {kind}", case, kind) for name, case in NO_LOSS for kind in KINDS]
NO_TOKEN_LOSS += [(f"no expert left, {kind}", MASKED, kind) for kind in ("softmax", "softmax_topk")]

test_by_hand = by_hand(
    *rows(first_auxiliary, second_auxiliary,
        ("Switch Transformer, equations 4 to 6", (SWITCH, "softmax"), (667 / 640, [3 / 64, -3 / 128, -3 / 128])),
        ("GShard, section 2.2: E^2 l_aux of the first choices", (GSHARD, "softmax"),
         (16 * 22 / 288,
          [4 / 3 * p * d for p, d in [(1 / 2, 7 / 24), (1 / 4, -3 / 8), (1 / 8, -1 / 24), (1 / 8, -3 / 8)]])),
        ("DeepSeek-V3's tokens as one sequence", (DEEPSEEK, "sigmoid"), ONE_SEQUENCE),
        ("root of softplus", (SOFTPLUS, "sqrtsoftplus"),
         (1.6, [0.8 * -math.expm1(-0.25) * -0.8, 0.2 * -math.expm1(-4.0) * 0.2])),
        *(
            (f"{kind} is charged over all experts", (EIGHTHS, kind), (21 / 16, [-21 / 128, 6 / 128, 15 / 128]))
            for kind in ("softmax", "softmax_topk")  # LOSS-02
        ),
        ("balanced counts have no gradient", (EVEN, "softmax"), (1.0, [0.0] * 6)),
        *((f"{name}, {kind}", (case, kind), REFUSED) for name, case, kind in NO_TOKEN_LOSS),
    ),
    *rows(lambda case, kind: first_auxiliary(case, kind)[0], lambda case, kind: second_auxiliary(case, kind)[0],
        *(
            (f"{name} cost the coefficient, {kind}", (case, kind), 1.0)
            for name, case in [("balanced counts", EVEN), ("equal shares", EQUAL), ("all experts chosen", ALL_CHOSEN)]
            for kind in KINDS
        ),
        *((f"all on {K} of 6 experts, {kind}", (collapsed(K), kind), 6 / K) for K in (1, 2, 3) for kind in KINDS),
        ("sequences that are balanced in sum", (LEANING, "softmax"), 1.0),
        ("scores that do not lean as choices do", (NOT_LEANING, "softmax"), 2 * (2 / 3 * 0.34 + 1 / 3 * 0.66)),
    ),
    *rows(first_sequence, second_sequence,
        ("DeepSeek-V3, equations 17 to 20", (DEEPSEEK, np.array([7, 7, 4, 4]), "sigmoid"),
         (1.3375, [0.016, -0.036, -0.004, -0.006])),
        ("DeepSeek-V3 with sequences interleaved", (MIXED, np.array([7, 4, 7, 4]), "sigmoid"),
         (1.3375, [0.016, -0.036, -0.004, -0.006])),
        ("one sequence is the microbatch", (DEEPSEEK, np.array([3] * 4), "sigmoid"), ONE_SEQUENCE),
        ("each sequence on one of two experts", (LEANING, np.array([0, 0, 1, 1]), "softmax"),
         (1.5, [0.09375, -0.09375])),
        *((f"sequence: {name}, {kind}", (case, LABELS_2, kind), REFUSED) for name, case, kind in NO_TOKEN_LOSS),
        ("fewer sequences than have tokens", (TWO, np.array([0, 1]), "softmax", 1), REFUSED),
        ("labels of fewer tokens", (TWO, np.array([4]), "softmax"), REFUSED),
        ("labels of 32 bits", (TWO, np.array([0, 1], dtype=np.int32), "softmax"), REFUSED),
        ("labels of two dims", (TWO, np.array([[0], [1]]), "softmax"), REFUSED),
    ),
    # m = 1: f (3/4, 1/4), P = 5/8: L = 2 (15/32 + 3/32). m = 2: f (4/7, 3/7), P = 5/12: L = 2 (20 + 21) / 84;
    # forgetful: f (1/3, 2/3), L = 2 (5 + 14) / 36. Gradient of m for a token: 2 / T p_e (f_e - f.p).
    *rows(first_step, second_step,
        ("fractions are carried over", ([dealt([0], [0, 0, 1]), dealt([1], [1, 0])], "softmax"),
         [(9 / 8, [3 / 64, -3 / 64]), (41 / 42, [2 / 112, -2 / 112])]),
        ("fractions of the microbatch alone", ([dealt([0], [0, 0, 1]), dealt([1], [1, 0])], "softmax"),
         {"remembers": False}, [(9 / 8, [3 / 64, -3 / 64]), (19 / 18, [-1 / 24, 1 / 24])]),
        *((f"step: {name}, {kind}", ([[case]], kind), REFUSED) for name, case, kind in NO_TOKEN_LOSS),
        ("no group", ([[]], "softmax"), REFUSED),
        ("groups in the first microbatch alone", ([[TWO], []], "softmax"), REFUSED),
        ("another number of groups", ([[TWO], [TWO, TWO]], "softmax"), REFUSED),
        ("another number of slots", ([[TWO, TWO._replace(ids_TK=IDS_2[:, :1])]], "softmax"), REFUSED),
        ("another number of experts", ([[TWO], [TWO._replace(logits_TE=np.zeros((2, 4)))]], "softmax"), REFUSED),
    ),
    *rows(first_z_loss, second_z_loss,
        # Z = 3 log 2 and 2 log 2. Token 0: 2/2 * 3 log 2 * (1/8, 2/8, 5/8).
        ("ST-MoE: (1/B) sum of (log sum exp)^2", (np.log(np.array([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]])),),
         (6.5 * LOG2**2, [3 * LOG2 / 8, 6 * LOG2 / 8, 15 * LOG2 / 8])),
        ("a constant shifts Z", (np.full((2, 4), 1.5),), ((2 * LOG2 + 1.5) ** 2, [(2 * LOG2 + 1.5) / 4] * 4)),
        ("-inf adds nothing", (np.array([[0.0] * 4 + [-INF]] * 2),), ((2 * LOG2) ** 2, [2 * LOG2 / 4] * 4 + [0.0])),
        *((f"z-loss of {value}", (np.array([[0.0] * 3, [value] * 3]),), REFUSED) for value in (math.nan, INF, -INF)),
        *(
            (f"z-loss beside padding of {value}", (np.array([[0.0] * 3, [value] * 3]), np.array([False, True])),
             (math.log(3) ** 2, [2 * math.log(3) / 3] * 3))
            for value in (math.nan, INF, -INF)
        ),
    ),
    *rows(
        lambda parts, padding=None: first_z.z_loss_of_parts(parts, coefficient=1.0, padding_by_rank=padding),
        lambda parts, padding=None: second.z_of_parts(
            list(zip(parts, padding or [None] * len(parts), strict=True)), 1.0
        )[0],
        ("((0 + 1) / 2 + 4) / 2", ([UNEVEN[:2], UNEVEN[2:]],), 9 / 4 * LOG2**2),
        ("a rank without tokens counts as one", ([UNEVEN[:2], UNEVEN[2:], UNEVEN[:0]],), 3 / 2 * LOG2**2),
        ("z-loss of no rank", ([],), REFUSED),
        ("every rank has a mask, or none has", ([UNEVEN[:2], UNEVEN[2:]], [None]), REFUSED),
    ),
    *rows(
        lambda logits_TE, top_k: first.choices(logits_TE, score="softmax", top_k=top_k),
        lambda logits_TE, top_k: second.own_choices("softmax", logits_TE, top_k),
        ("of a tie the lower expert", (GSHARD.logits_TE, 2), [[0, 1], [2, 3], [0, 1]]),
        ("no experts to choose", (LOGITS_2, 0), REFUSED),
        ("more than there are", (LOGITS_2, 4), REFUSED),
    ),
    *rows(first.normalised_scores, lambda logits_TE, kind: second.shares(kind, logits_TE),
        *(
            (f"a sum that underflows, {kind} of {logit}", (np.array([[logit] * 3, [0.0, 0.0, -INF]]), kind),
             [[0.0] * 3, [0.5, 0.5, 0.0]])
            for kind in ("sigmoid", "sqrtsoftplus") for logit in (-INF, -1600.0)
        ),
        # Two sigmoids of exp(-230.5) add up to 1.6e-100, two of exp(-231.5) to 5.7e-101.
        ("a sum of 1.6e-100", (np.array([[-230.5, -230.5]]), "sigmoid"), [[0.5, 0.5]]),
        ("a sum of 5.7e-101", (np.array([[-231.5, -231.5]]), "sigmoid"), [[0.0, 0.0]]),
    ),
    *rows(first_over_ranks.whole, second_scaling.put_together,
        *(
            (name, ([np.array(part) for part in parts], [np.array(at) for at in places]), REFUSED)
            for name, parts, places in [
                ("parts of no rank", [], []), ("places of no rank", [[1.0, 2.0]], []),
                ("fewer places than rows", [[1.0, 2.0]], [[0]]), ("a place that is missing", [[1.0, 2.0]], [[0, 2]]),
                ("a negative place", [[1.0, 2.0]], [[0, -1]]),
                ("copies that differ", [[1.0, 2.0], [3.0]], [[0, 1], [1]]),
                ("copies that differ on one rank", [[1.0, 2.0]], [[0, 0]]),
            ]
        ),
    ),
)  # fmt: skip
