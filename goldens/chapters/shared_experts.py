"""Golden of shared experts: what each adds to a token, and all together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, D, Oracle, draw_experts, draw_tokens, functions, given, named
from moe_conformance.reference.shared_experts import shared as shared_experts

_TOKENS = 5
_WIDTHS = (4, 2, 3)  # of the shared experts
_BIASED = (0, 2)


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return tokens, shared experts and a gate."""
    draw_experts(rng)  # not stored; keeps later draws the same
    found = named("shared", "in", {"gate_D": rng.standard_normal(D)})
    for n, F in enumerate(_WIDTHS):
        sizes = {"gate_FD": (F, D), "up_FD": (F, D), "down_DF": (D, F), "bias_D": (D,)}
        drawn = {name: rng.standard_normal(size) for name, size in sizes.items() if n in _BIASED or name != "bias_D"}
        found |= named(f"shared-{n}", "in", drawn)
    tokens = draw_tokens(rng, "rank-0", _TOKENS)
    return found | {"rank-0/in/x_TD": tokens["rank-0/in/x_TD"]}


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return what the experts add, one by one and together, with the gate and without."""
    shared = [oracle.SharedExpert(**given(inputs, f"shared-{n}")) for n in range(len(_WIDTHS))]
    x_TD, gate_D = given(inputs, "rank-0")["x_TD"], given(inputs, "shared")["gate_D"]
    answers = {f"h_TD-{n}": oracle.shared_expert(x_TD, expert) for n, expert in enumerate(shared)}
    answers["factors_T"] = oracle.gate_factors(x_TD, gate_D)
    answers["factors-without-gate_T"] = oracle.gate_factors(x_TD, None)
    answers["part_TD"] = oracle.shared_part(x_TD, shared, gate_D)
    answers["part-without-gate_TD"] = oracle.shared_part(x_TD, shared)
    return named("shared", "out", answers)


CHAPTER = Chapter(2901, ("SHARE-01", "SHARE-02", "SHARE-03"), functions(shared_experts), draw, work_out)
