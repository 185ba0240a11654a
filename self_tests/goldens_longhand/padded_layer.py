"""The layer that several goldens hold rows for, by hand: its experts, and its gradients under the stored names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from self_tests.oracles import layer
from self_tests.oracles.experts import SwiGLU

NAMES = ("gate", "up", "down")

Given = Mapping[str, np.ndarray[Any, Any]]


def experts_of(given: Given) -> list[SwiGLU]:
    """The stored experts, one by one."""
    stacks = [given[f"experts/in/{name}"] for name in NAMES]
    return [SwiGLU(*(stack[e] for stack in stacks)) for e in range(len(stacks[0]))]


def tokens_of(given: Given, case: str) -> layer.Tokens:
    """The stored tokens of a case."""
    return layer.Tokens(*(given[f"{case}/in/{name}"] for name in ("x_TD", "ids_TK", "weights_TK")))


def stacked(d_experts: list[SwiGLU]) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients of the experts, one tensor a name."""
    return {f"d{name}": np.array([expert[i] for expert in d_experts]) for i, name in enumerate(NAMES)}
