"""Golden of checkpoints: the bits that every rank holds, saves and loads; upcycled and moved experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, gradients, leaf, named
from moe_conformance.goldens.chapters.checkpoints_forms import SPECIAL, draw_bits, numbers, spelled
from moe_conformance.reference.checkpoints import layouts, parts, upcycling
from moe_conformance.reference.experts import Parameters

E, F, D, K = 4, 4, 3, 2
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one-rank": {"world": 1, "ep": 1, "etp": 1},
    "ep2-etp2-edp2": {"world": 8, "ep": 2, "etp": 2},
    "uneven": {"world": 6, "ep": 3, "etp": 1, "by_ep": ((3,), (), (2, 0, 1))},
    "etp4": {"world": 4, "ep": 1, "etp": 4},
}
# By name, of how many experts; etp does not cut the bias, and the last expert has none.
SHAPES = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F), "bias": (E - 1, D)}
DENSE = {"gate": (F, D), "up": (F, D), "down": (D, F)}
PIECES = (1, 2, 4)
TOKENS = {"tokens": 3, "no-token": 0}
PLACES = (1, 0, 2, 1, 3, 0)  # the expert of every place


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return bits of experts and of one MLP, its tokens, and the loads of places."""
    found = named("experts", "in", {name: draw_bits(rng, *shape) for name, shape in SHAPES.items()})
    found |= named("mlp", "in", {name: draw_bits(rng, *shape) for name, shape in DENSE.items()})
    found |= named("places", "in", {"loads_P": rng.integers(0, 3, len(PLACES))})
    for case, T in TOKENS.items():
        shapes = {"x_TD": (T, D), "weights_TK": (T, K), "dy_TD": (T, D), **DENSE}
        found |= named(case, "in", {name: rng.standard_normal(shape) for name, shape in shapes.items()})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return the bits that each rank holds and loads, copies of an MLP, its output and gradients, and loads."""
    stacks = {name: numbers(bits) for name, bits in given(inputs, "experts").items()}
    whole = {(name, e): value for name, stack in stacks.items() for e, value in enumerate(stack)}
    found = named("bits", "out", _same_bits(oracle))
    layouts = {case: oracle.Layout(**sizes, experts=E) for case, sizes in LAYOUTS.items()}
    before = layouts["etp4"]  # that saved what is loaded here
    for case, layout in layouts.items():
        held = oracle.shard(whole, layout)
        loaded = oracle.reshard(oracle.shard(whole, before), before, layout)
        coordinates = [oracle.coordinates(rank, layout) for rank in range(layout.world)]
        dealt = [[at_ep, e] for at_ep, experts in enumerate(layout.held()) for e in experts]
        answers = {"coordinates_W3": coordinates, "dealt_E2": dealt, **_stacked("held", held)}
        answers |= {**_stacked("loaded", loaded), **_stacked("assembled", [oracle.assemble(held, layout)])}
        found |= named(case, "out", answers)
        before = layout
    dense = {name: numbers(bits) for name, bits in given(inputs, "mlp").items()}
    for pieces in PIECES:
        made = oracle.upcycle(dense["gate"], dense["up"], dense["down"], E, pieces=pieces)
        found |= named("mlp", "out", _stacked(f"pieces-{pieces}", [made]))
    at_places = oracle.at_places({key: value for key, value in whole.items() if key[0] != "bias"}, PLACES)
    loads = oracle.loads_by_expert(inputs["places/in/loads_P"].tolist(), PLACES, E + 1)  # the last has no place
    found |= named("places", "out", {**_stacked("experts", [at_places]), "loads_E": loads})
    for case in TOKENS:
        found |= named(case, "out", _upcycled(given(inputs, case), oracle))
    return found


def _stacked(word: str, held_by_rank: Sequence[Parameters]) -> dict[str, Tensor]:
    """Return the bits by name: of all experts of rank 0, in the order of their ids, then of rank 1, and so on."""
    found: dict[str, list[Tensor]] = {}
    for held in held_by_rank:
        for name, e in sorted(held):
            found.setdefault(name, []).append(held[name, e])
    return {f"{word}.{name}": spelled(torch.stack(values)) for name, values in found.items()}


def _same_bits(oracle: Oracle) -> dict[str, object]:
    """Return which special numbers are the same, and the one value of two ranks that agree."""
    special_N = numbers(torch.tensor(SPECIAL))
    others = (special_N.clone(), special_N[:, None], special_N.view(torch.int64), special_N.roll(1))
    return {
        "same_NN": [[oracle.same_bits(one, other) for other in special_N] for one in special_N],
        "same-others": [oracle.same_bits(special_N, other) for other in others],
        "agreed_N": spelled(oracle.agreed([special_N, special_N.clone()])),
    }


def _upcycled(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    leaves = {name: leaf(drawn[name]) for name in ("x_TD", "weights_TK", *DENSE)}
    y_TD = oracle.upcycled_output(*leaves.values())
    return {"y_TD": y_TD, **gradients([y_TD], leaves, [drawn["dy_TD"]])}


REQUIREMENTS = ("CKPT-01", "CKPT-04", "CKPT-06", "CKPT-07", "CKPT-12", "CKPT-13")

CHAPTER = Chapter(2410, REQUIREMENTS, functions(layouts, parts, upcycling), draw, work_out)
