"""Goldens of draws: what random and biased forcing may look like, of given loads, logits and ids."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from goldens.chapter import given, named
from reference import forcing_draws

_E, _K, _T = 5, 2, 3
_SIZES = ((100, 2, 4), (0, 1, 8), (4096, 8, 64), (7, 4, 4))  # T, K, E
_BOUNDS = ((0.0, 4, 8, 2), (-3.0, 4, 64, 8), (3.0, 4, 2, 16), (0.5, 1000, 256, 40))  # deviation, T, E, draws
_CHANCES = ((2, 2, 4), (15, 4, 4), (0, 1, 3), (3, 2, 8))  # further draws, K, E
# Layers and forwards, how often the bias is drawn anew, and in how many forwards a token strays.
_BIASED = {
    "anew": (1, 16, "forward"),
    "kept": (16, 2, "layer"),
    "once": (16, 16, "never"),
    "strayed": (1, 17, "forward"),
}


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return loads of random and of other routes, forced logits, and ids that a bias alone decides."""
    even_NE = np.array([np.bincount(rng.integers(0, 4, 400), minlength=4) for _ in range(3)])
    margin_NE = [[72, 9, 9, 10], [100, 100, 100, 100], [51, 151, 99, 99], [0, 0, 0, 0]]
    found = named("random", "in", {"loads_NE": np.concatenate([even_NE, np.array(margin_NE)])})
    found |= named(
        "moments", "in", {"logits_NTE": 2 * rng.standard_normal((4, 6, _E)) + rng.standard_normal((4, 1, _E))}
    )
    for case, (layers, forwards, anew) in _BIASED.items():
        ids_LFTK = np.zeros((layers, forwards, _T, _K), dtype=np.int64)
        for layer in range(layers):
            for forward in range(forwards):
                if anew == "forward" or (layer == 0 and forward == 0) or (anew == "layer" and forward == 0):
                    chosen = rng.permutation(_E)[:_K]
                ids_LFTK[layer, forward] = [rng.permutation(chosen) for _ in range(_T)]
        if case == "strayed":
            ids_LFTK[0, 4, 1] = (ids_LFTK[0, 4, 1] + [0, 1]) % _E
            ids_LFTK[0, 4, 1, 1] += ids_LFTK[0, 4, 1, 1] == ids_LFTK[0, 4, 1, 0]
        found |= named(f"biased-{case}", "in", {"ids_LFTK": ids_LFTK})
    return found


def work_out(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return margins, moments, bounds and chances, and whether loads and ids may have come of such draws."""
    legal = [
        forcing_draws.legal_random_loads(n_E, top_k) for n_E in given(inputs, "random")["loads_NE"] for top_k in (1, 4)
    ]
    margins = [forcing_draws.load_margin(*sizes) for sizes in _SIZES]
    found = named("random", "out", {"margins_N": margins, "legal_NE": torch.stack(legal)})
    logits = list(given(inputs, "moments")["logits_NTE"])
    moments = [forcing_draws.bias_moment(logits), forcing_draws.bias_moment(logits[:1])]
    bounds = [forcing_draws.bias_moment_bounds(*each) for each in _BOUNDS]
    found |= named("moments", "out", {"moments": moments, "bounds_N2": bounds})
    for draws, K, E in _CHANCES:
        found |= named("chances", "out", {f"{draws}-more-of-{K}-in-{E}": forcing_draws.chance_alike(draws, K, E)})
    for case, (layers, forwards, _) in _BIASED.items():
        ids_LFTK = given(inputs, f"biased-{case}")["ids_LFTK"]
        told: dict[str, object] = {
            "alike_LF": [[forcing_draws.one_choice([ids_TK]) for ids_TK in row] for row in ids_LFTK],
            "alike_L": [forcing_draws.one_choice(list(row)) for row in ids_LFTK],
        }
        by_layer = [list(row) for row in ids_LFTK]
        if forwards >= forcing_draws.FORWARDS:
            told["legal-anew"] = forcing_draws.legal_bias_draws(by_layer, 1e6, _E)
        if layers >= forcing_draws.FORWARDS:
            told["legal-kept"] = forcing_draws.legal_bias_draws(by_layer, -1e6, _E)
        found |= named(f"biased-{case}", "out", told)
    return found
