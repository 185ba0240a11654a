"""Goldens of shared experts: output and every gradient, of ranks and of all together, and of shards and fused forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from goldens.chapter import Chapter, given, named
from goldens.gradients import prefixed
from goldens.small_layer import NAMES, D, E, draw_experts, draw_tokens
from reference import shared_expert_gradients, shared_expert_parts, shared_experts
from reference.experts import swiglu_experts
from reference.layer import Batch
from reference.shared_expert_gradients import SharedGradients
from reference.shared_experts import SharedExpert

_TOKENS = (5, 0, 3)  # by rank
_WIDTHS = (4, 2, 3)  # of the shared experts
_BIASED = (0, 2)
_SHARDS = ((3, 0), (), (1, 2))
# How many experts are shared, if there is a gate, and what else the gradients of all ranks are asked with.
_LAYERS: Mapping[str, tuple[int, bool, Mapping[str, Any]]] = {
    "plain": (3, False, {"divisor": 3}),
    "gated": (3, True, {}),
    "gated-weights-at-input": (1, True, {"weights_at": "input", "divisor": 2}),
    "nothing-shared": (0, True, {"divisor": 3}),
}


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return tokens of every rank, one of which has no routed expert, routed and shared experts, and a gate."""
    found = draw_experts(rng) | named("shared", "in", {"gate_D": rng.standard_normal(D)})
    for n, F in enumerate(_WIDTHS):
        sizes = {"gate_FD": (F, D), "up_FD": (F, D), "down_DF": (D, F), "bias_D": (D,)}
        drawn = {name: rng.standard_normal(size) for name, size in sizes.items() if n in _BIASED or name != "bias_D"}
        found |= named(f"shared-{n}", "in", drawn)
    for rank, T in enumerate(_TOKENS):
        found |= draw_tokens(rng, f"rank-{rank}", T)
    found["rank-0/in/ids_TK"][2] = -1
    return found


def work_out(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parts of the output, the gradients of each rank and of all over a divisor, and experts cut and fused."""
    batches = [Batch(**given(inputs, f"rank-{rank}")) for rank in range(len(_TOKENS))]
    routed = {(name, e): given(inputs, "experts")[name][e] for name in NAMES for e in range(E)}
    shared = [SharedExpert(**given(inputs, f"shared-{n}")) for n in range(len(_WIDTHS))]
    gate_D = given(inputs, "shared")["gate_D"]
    found = _parts(batches[0].x_TD, shared, gate_D)
    for case, (S, gated, how) in _LAYERS.items():
        v_D = gate_D if gated else None
        of_all = shared_expert_gradients.global_gradients(
            batches, swiglu_experts, routed, shared[:S], gate_D=v_D, **how
        )
        found |= named(case, "out", _flat(of_all))
    nothing = shared_expert_gradients.gradients(batches[1], swiglu_experts, routed, [])  # no token and nothing shared
    found |= named("nothing", "out", _flat(nothing))
    for rank, batch in enumerate(batches):
        own = shared_expert_gradients.gradients(batch, swiglu_experts, routed, shared, gate_D=gate_D)
        ids_TK, weights_TK = batch.ids_TK, batch.weights_TK
        y_TD = shared_experts.forward(batch.x_TD, ids_TK, weights_TK, swiglu_experts(routed), shared, gate_D=gate_D)
        found |= named(f"rank-{rank}", "out", {**_flat(own), "forward_TD": y_TD})
    fused = shared_expert_parts.fuse(shared)
    whole = shared_expert_gradients.gradients(batches[0], swiglu_experts, routed, [fused], gate_D=gate_D).shared[0]
    parts = shared_expert_parts.fused_parts(whole, _WIDTHS)
    told = _named_expert(fused) | prefixed("d", _named_expert(whole))
    for n, part in enumerate(parts):
        told |= prefixed(f"d{n}", _named_expert(part))
    return found | named("fused", "out", told)


def _parts(x_TD: Tensor, shared: Sequence[SharedExpert], gate_D: Tensor) -> dict[str, Tensor]:
    """Return what the experts add, one by one and together, and the first one's shards."""
    whole = {f"h_TD-{n}": shared_experts.shared_expert(x_TD, expert) for n, expert in enumerate(shared)}
    whole["factors_T"] = shared_experts.gate_factors(x_TD, gate_D)
    whole["factors-without-gate_T"] = shared_experts.gate_factors(x_TD, None)
    whole["part_TD"] = shared_experts.shared_part(x_TD, shared, gate_D)
    whole["part-without-gate_TD"] = shared_experts.shared_part(x_TD, shared)
    shards = shared_expert_parts.tp_shards(shared[0], _SHARDS)
    cut = {"sum_TD": shared_expert_parts.sum_of_shards(x_TD, shards, shared[0].bias_D)}
    for n, shard in enumerate(shards):
        cut |= prefixed(str(n), _named_expert(shard))
    return named("shared", "out", whole) | named("shards", "out", cut)


def _flat(made: SharedGradients) -> dict[str, Tensor]:
    found = {"y_TD": made.y_TD, "dx_TD": made.dx_TD, "dweights_TK": made.dweights_TK}
    found |= {f"d{name}": torch.stack([made.parameters[name, e] for e in range(E)]) for name in NAMES}
    for n, expert in enumerate(made.shared):
        found |= prefixed(f"dshared-{n}", _named_expert(expert))
    return found if made.gate_D is None else {**found, "dgate_D": made.gate_D}


def _named_expert(expert: SharedExpert) -> dict[str, Tensor]:
    return {name: value for name, value in expert._asdict().items() if value is not None}


_REQUIREMENTS = (*(f"SHARE-{number:02}" for number in range(1, 9)), "GRAD-01", "GRAD-02", "GRAD-04")

CHAPTER = Chapter(2901, _REQUIREMENTS, draw, work_out)
