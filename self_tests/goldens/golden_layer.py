"""The layer that several goldens hand rows to, as the second oracles take it and under the stored names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from self_tests.chapters.exchange.second import layer
from self_tests.chapters.experts.second import SwiGLU
from self_tests.goldens.golden_twins import given

NAMES = ("gate", "up", "down")


def experts_of(values: Mapping[str, Any]) -> list[SwiGLU]:
    """The stored experts, one by one."""
    stacks = given(values, "experts")
    return [SwiGLU(*(stacks[name][e] for name in NAMES)) for e in range(len(stacks["gate"]))]


def tokens_of(own: Mapping[str, Any]) -> layer.Tokens:
    """The stored tokens of a case."""
    return layer.Tokens(own["x_TD"], own["ids_TK"], own["weights_TK"])


def stacked(d_experts: Sequence[SwiGLU]) -> dict[str, Any]:
    """Gradients of the experts, one tensor a name."""
    return {f"d{name}": np.array([expert[i] for expert in d_experts]) for i, name in enumerate(NAMES)}
