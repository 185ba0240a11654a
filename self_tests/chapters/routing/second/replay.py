"""Recorded routes by hand: a token's recorded experts weighed by its present logits, and which record is whose.

An expert that is not recorded takes part only where all E experts do: in the sum of a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.routing.second.routes import Gate, Kind, gradient_of_token, weights_of_chosen

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Place = tuple[int, int]  # layer, microbatch


class Asked(NamedTuple):
    """One call of a router under replay: where, for how many tokens and slots."""

    place: Place
    tokens: int
    top_k: int


def filled_slots(logits_TE: Floats, ids_TK: Ints) -> list[list[int]]:
    """Of every token its slots that hold an expert."""
    (T, E), (T2, K) = logits_TE.shape, ids_TK.shape
    if T != T2:
        raise ValueError(f"logits of {T} tokens, ids of {T2}")
    found: list[list[int]] = []
    for t in range(T):
        seen: set[int] = set()
        slots = []
        for e in range(E):
            if math.isnan(logits_TE[t, e]) or logits_TE[t, e] == math.inf:
                raise ValueError(f"token {t}: logit {logits_TE[t, e]}")
        for k in range(K):
            expert = int(ids_TK[t, k])
            if expert == -1:
                continue
            if not 0 <= expert < E or expert in seen:
                raise ValueError(f"token {t}, slot {k}: expert {expert} of {E}, after {seen}")
            seen.add(expert)
            slots.append(k)
        found.append(slots)
    return found


def replayed_weights(
    logits_TE: Floats, ids_TK: Ints, *, score: Kind, normalise: bool = False, scale: float = 1.0
) -> Floats:
    """Weights (T, K) of the recorded experts; nothing for an empty slot, nothing where all recorded are masked."""
    weights_TK = np.zeros(ids_TK.shape, dtype=np.float64)
    for t, slots in enumerate(filled_slots(logits_TE, ids_TK)):
        logits = [float(logit) for logit in logits_TE[t]]
        recorded = [int(ids_TK[t, k]) for k in slots]
        if all(logits[expert] == -math.inf for expert in recorded):
            continue
        gate = Gate(len(slots), score, normalise=normalise, scale=scale)
        for k, weight in zip(slots, weights_of_chosen(logits, recorded, gate), strict=True):
            weights_TK[t, k] = weight
    return weights_TK


def replayed_weights_backward(
    logits_TE: Floats, ids_TK: Ints, upstream_TK: Floats, *, score: Kind, normalise: bool = False, scale: float = 1.0
) -> Floats:
    """Gradient (T, E) of the upstream-weighed sum of these weights; what an empty slot is told reaches nothing."""
    d_logits_TE = np.zeros(logits_TE.shape, dtype=np.float64)
    for t, slots in enumerate(filled_slots(logits_TE, ids_TK)):
        logits = [float(logit) for logit in logits_TE[t]]
        recorded = [int(ids_TK[t, k]) for k in slots]
        if all(logits[expert] == -math.inf for expert in recorded):
            continue
        gate = Gate(len(slots), score, normalise=normalise, scale=scale)
        d_logits_TE[t] = gradient_of_token(logits, recorded, gate, [float(upstream_TK[t, k]) for k in slots])
    return d_logits_TE


def routing_calls(schedule: str, router_layers: Sequence[int], *, recompute: bool = False) -> tuple[Place, ...]:
    """Where routers are called, in order, under a schedule like "F0 F1 B1 B0"."""
    for i, layer in enumerate(router_layers):
        if layer < 0 or any(earlier >= layer for earlier in router_layers[:i]):
            raise ValueError(f"layers {router_layers} do not ascend from 0")
    calls: list[Place] = []
    done: list[str] = []
    for word in schedule.split():
        kind, number = word[0], word[1:]
        if kind not in ("F", "B") or not number.isdecimal() or word in done:
            raise ValueError(f"{word!r} in {schedule!r} is no pass, or is there twice")
        if kind == "B" and "F" + number not in done:
            raise ValueError(f"{word} before its forward in {schedule!r}")
        done.append(word)
        layers = list(router_layers)
        if kind == "B":
            layers = layers[::-1] if recompute else []
        for layer in layers:
            calls.append((layer, int(number)))
    return tuple(calls)


def record(routes: Sequence[tuple[Place, Ints]]) -> dict[Place, Ints]:
    """One record for every place; whoever comes again must have routed alike."""
    records: dict[Place, Ints] = {}
    for i, (place, ids_TK) in enumerate(routes):
        for earlier, others_TK in routes[:i]:
            if earlier == place and (others_TK.shape != ids_TK.shape or others_TK.tolist() != ids_TK.tolist()):
                raise ValueError(f"{place} was routed in two ways: {others_TK}, {ids_TK}")
        records[place] = ids_TK
    return records


def replay(records: Mapping[Place, Ints], asked: Sequence[Asked]) -> tuple[Ints, ...]:
    """To every call the record of its own place."""
    answers = []
    for place, tokens, top_k in asked:
        own = [ids_TK for other, ids_TK in records.items() if other == place]
        if not own or own[0].shape != (tokens, top_k):
            raise ValueError(f"no record of {tokens} tokens and {top_k} slots for {place}")
        answers.append(own[0])
    return tuple(answers)
