"""Experts made from a dense MLP, and experts moved or copied between places, by hand (CKPT-12, -13)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.checkpoints.second.parts import Bits, Key, Parameters
from self_tests.chapters.experts.second import SwiGLU, swiglu_row

Floats = NDArray[np.float64]


def upcycled(gate_FD: Bits, up_FD: Bits, down_DF: Bits, experts: int, pieces: int) -> dict[Key, Bits]:
    """Experts that are copies of the dense MLP, or of its pieces in turn."""
    F, D = gate_FD.shape
    if experts < 1 or pieces < 1 or experts % pieces != 0 or F % pieces != 0:
        raise ValueError(f"{experts} experts of {pieces} pieces of {F} hidden units")
    made = {}
    for expert in range(experts):
        units = [f for f in range(F) if f // (F // pieces) == expert % pieces]
        made["gate", expert] = np.array([[gate_FD[f, d] for d in range(D)] for f in units])
        made["up", expert] = np.array([[up_FD[f, d] for d in range(D)] for f in units])
        made["down", expert] = np.array([[down_DF[d, f] for f in units] for d in range(D)])
    return made


def upcycled_output(x_TD: Floats, weights_TK: Floats, dense: SwiGLU) -> Floats:
    """Every slot's copy answers what the dense MLP answers: the weights of a token add up before it."""
    y_TD = np.zeros(x_TD.shape)
    for t in range(len(x_TD)):
        for k in range(weights_TK.shape[1]):
            y_TD[t] += weights_TK[t, k] * swiglu_row(dense, x_TD[t])
    return y_TD


def at_places(parameters: Parameters, expert_of_place: Sequence[int]) -> dict[Key, Bits]:
    """What stands at each physical place after the move; every expert stands somewhere."""
    known = {expert for _, expert in parameters}
    if known != set(expert_of_place):
        raise ValueError(f"experts {known} on places {expert_of_place}")
    return {
        (name, place): whole
        for place, expert in enumerate(expert_of_place)
        for (name, owner), whole in parameters.items()
        if owner == expert
    }


def loads(by_place: Sequence[int], expert_of_place: Sequence[int], experts: int) -> list[int]:
    """Load of every expert: that of all places where it stands."""
    if len(by_place) != len(expert_of_place) or any(not 0 <= e < experts for e in expert_of_place):
        raise ValueError(f"{by_place} at {expert_of_place} for {experts} experts")
    return [sum(by_place[p] for p, e in enumerate(expert_of_place) if e == expert) for expert in range(experts)]
