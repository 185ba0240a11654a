"""Replay: recorded routes, weighed by present logits, each given back to where it was recorded.

A record belongs to a place: one layer in one microbatch. Which passes run in between, whether forwards run
again, and whether other layers have a router at all decides nothing about it.

Source: behaviour of Megatron-Core's router replay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.routing.routes import Score, scores

Place = tuple[int, int]
"""The number of the layer in the model, dense ones counted, and of the microbatch."""


class Asked(NamedTuple):
    """A router that is to replay: where it is, and how many tokens and slots it has now."""

    place: Place
    tokens: int
    top_k: int


def replayed_weights(
    logits_TE: Tensor, ids_TK: Tensor, *, score: Score, normalise: bool = False, scale: float = 1.0
) -> Tensor:
    """Weigh recorded ids by present logits, (T, E), int64 (T, K) -> (T, K), differentiable in the logits.

    Rule: a token's weights are those of the ids that it has, as if it had selected just these now.
    Softmax over the selected and normalisation run over them.

    Degenerate: an empty slot (-1) has weight 0 and has no gradient; so does each slot of a token whose recorded
    logits are all -inf, where any finite weight is allowed. T = 0 gives (0, K).

    Raises:
        ValueError: another T, an id outside -1..E-1, an expert twice in a token, a logit of NaN or +inf.

    Decides: ROUTE-16. Source: arithmetic, the weights of a selection are a function of logits and ids.

    >>> logits, ids = torch.tensor([[1.0, 5.0, 1.0, 5.0]] * 2), torch.tensor([[2, -1, 0], [-1, 3, -1]])
    >>> replayed_weights(logits, ids, score="softmax_topk", scale=4.0).tolist()
    [[2.0, 0.0, 2.0], [0.0, 4.0, 0.0]]
    """
    T, E = len(ids_TK), logits_TE.shape[1]
    named = [[e for e in ids_K if e != -1] for ids_K in ids_TK.tolist()]
    if not all(len(set(each)) == len(each) and set(each) <= set(range(E)) for each in named):
        raise ValueError(f"recorded ids {ids_TK.tolist()} are not different experts of {E}, or -1")
    if len(logits_TE) != T or bool((logits_TE.isnan() | (logits_TE == inf)).any()):
        raise ValueError(f"{T} tokens of ids, {len(logits_TE)} of logits: need as many, and neither NaN nor +inf")
    real_TK = ids_TK >= 0  # (T, K)
    seen_TK = torch.where(real_TK, logits_TE.double().gather(1, ids_TK.clamp(min=0)), -inf)  # (T, K)
    undecided_T1 = (seen_TK == -inf).all(dim=1, keepdim=True)  # (T, 1); nothing to weigh, or 0/0
    if score == "softmax_topk":
        w_TK = torch.where(undecided_T1, 0.0, seen_TK).softmax(dim=1)  # (T, K)
    else:
        l_TE = torch.where(undecided_T1 & (logits_TE == -inf), 0.0, logits_TE.double())  # (T, E); any finite logit
        w_TK = torch.where(real_TK, scores(l_TE, score).gather(1, ids_TK.clamp(min=0)), 0.0)  # (T, K)
    if normalise:
        sum_T1 = w_TK.sum(dim=1, keepdim=True)  # (T, 1)
        w_TK = w_TK / torch.where(sum_T1 > 0, sum_T1, 1.0)  # (T, K)
    return torch.where(real_TK & ~undecided_T1, scale * w_TK, 0.0)  # (T, K)


def routing_calls(schedule: str, router_layers: Sequence[int], *, recompute: bool = False) -> tuple[Place, ...]:
    """List the calls of routers that a schedule makes, in order.

    Args:
        schedule: passes such as "F0 F1 B0 B1", F a forward and B a backward of a microbatch.
        router_layers: the numbers of the layers that have a router, ascending.
        recompute: every layer's forward runs again in its backward, the last layer first.

    Degenerate: "" and no layers make no calls. A forward without a backward is allowed.

    Raises:
        ValueError: another word in the schedule, a pass twice, a backward before its forward, layers that do
            not ascend or are negative.

    Source: definition of a schedule.

    >>> routing_calls("F0 F1 B1 B0", [1, 3])
    ((1, 0), (3, 0), (1, 1), (3, 1))
    >>> routing_calls("F0 B0", [1, 3], recompute=True)
    ((1, 0), (3, 0), (3, 0), (1, 0))
    """
    layers = list(router_layers)
    if layers != sorted(set(layers)) or any(layer < 0 for layer in layers):
        raise ValueError(f"layers {layers} do not ascend from 0 or above")
    calls: list[Place] = []
    ran: set[str] = set()
    for word in schedule.split():
        if not re.fullmatch(r"[FB]\d+", word) or word in ran or (word[0] == "B" and "F" + word[1:] not in ran):
            raise ValueError(f"{word} in {schedule!r}: give F<m> or B<m>, each once, B after its F")
        ran.add(word)
        if word[0] == "F":
            calls += [(layer, int(word[1:])) for layer in layers]
        elif recompute:
            calls += [(layer, int(word[1:])) for layer in reversed(layers)]
    return tuple(calls)


def record(routes: Sequence[tuple[Place, Tensor]]) -> dict[Place, Tensor]:
    """Keep the routes, int64 (T, K) each, by the place where they were chosen.

    Degenerate: a place that routes again, under recompute, selects the same and is kept once.

    Raises:
        ValueError: a place that routes again and otherwise.

    Decides: ROUTE-17. Source: behaviour of Megatron-Core's router replay.

    >>> ids = torch.tensor([[3, 0]])
    >>> {place: kept.tolist() for place, kept in record([((1, 0), ids), ((1, 0), ids)]).items()}
    {(1, 0): [[3, 0]]}
    """
    records: dict[Place, Tensor] = {}
    for place, ids_TK in routes:
        if not torch.equal(records.setdefault(place, ids_TK), ids_TK):
            raise ValueError(f"layer, microbatch {place} routed again, and otherwise than before")
    return records


def replay(records: Mapping[Place, Tensor], asked: Sequence[Asked]) -> tuple[Tensor, ...]:
    """Give every router that asks the ids of its own place, int64 (T, K), in the order of asking.

    Degenerate: a place may ask any number of times. T = 0 replays (0, K).

    Raises:
        ValueError: a place without a record, or with one of another T or K: fresh routing is no result.

    Decides: ROUTE-17. Source: arithmetic, a list that is read in order shifts with every pass that is missing.

    >>> records = {(1, 0): torch.tensor([[3, 0]]), (4, 0): torch.tensor([[2, 1]])}
    >>> [ids.tolist() for ids in replay(records, [Asked((4, 0), 1, 2), Asked((1, 0), 1, 2)])]
    [[[2, 1]], [[3, 0]]]
    """
    found = []
    for place, tokens, top_k in asked:
        if place not in records or tuple(records[place].shape) != (tokens, top_k):
            has = tuple(records[place].shape) if place in records else "no record"
            raise ValueError(f"layer, microbatch {place} asks for {(tokens, top_k)} and has {has}")
        found.append(records[place])
    return tuple(found)
