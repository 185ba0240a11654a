"""The part of the golden of forcing on draws: which loads, logits and ids random and biased forcing may give."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Oracle, given, named

_E, _K, _T = 5, 2, 3
_SIZES = ((100, 2, 4), (0, 1, 8), (4096, 8, 64), (7, 4, 4))  # T, K, E
_BOUNDS = ((0.0, 4, 8, 2), (-3.0, 4, 64, 8), (3.0, 4, 2, 16), (0.5, 1000, 256, 40))  # deviation, T, E, draws
_CHANCES = ((2, 2, 4), (15, 4, 4), (0, 1, 3), (3, 2, 8))  # further draws, K, E
# At the margin and beyond it: 7 sqrt(192 1/4 3/4) + 16 = 58 from a mean of 48, and 112.99 from 256.
_MARGINAL = ((106, 29, 29, 28), (107, 29, 28, 28), (368, 219, 219, 218), (369, 219, 218, 218))
# Layers, forwards and K; for which forwards the bias is drawn anew.
_BIASED: Mapping[str, tuple[int, int, int, Callable[[int, int], bool]]] = {
    "anew": (1, 16, _K, lambda layer, forward: True),
    "kept": (16, 2, _K, lambda layer, forward: forward == 0),
    "once": (16, 16, _K, lambda layer, forward: layer == forward == 0),
    "anew-but-in-one-layer": (2, 16, _K, lambda layer, forward: layer == 0 or forward == 0),
    "kept-but-in-one-layer": (16, 2, _K, lambda layer, forward: forward == 0 or layer == 3),
    "strayed": (1, 17, _K, lambda layer, forward: True),
    "all-experts": (1, 16, _E, lambda layer, forward: True),
}


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return loads of random and of other routes, forced logits, and ids that a bias alone decides."""
    even_NE = np.array([np.bincount(rng.integers(0, 4, 400), minlength=4) for _ in range(3)])
    others_NE = [[72, 9, 9, 10], [100, 100, 100, 100], [51, 151, 99, 99], [0, 0, 0, 0], *_MARGINAL]
    found = named("random", "in", {"loads_NE": np.concatenate([even_NE, np.array(others_NE)])})
    found |= named(
        "moments", "in", {"logits_NTE": 2 * rng.standard_normal((4, 6, _E)) + rng.standard_normal((4, 1, _E))}
    )
    for case, (layers, forwards, K, anew) in _BIASED.items():
        ids_LFTK = np.zeros((layers, forwards, _T, K), dtype=np.int64)
        chosen_K = rng.permutation(_E)[:K]
        for layer, forward in np.ndindex(layers, forwards):
            if anew(layer, forward):
                chosen_K = rng.permutation(_E)[:K]
            ids_LFTK[layer, forward] = [rng.permutation(chosen_K) for _ in range(_T)]
        if case == "strayed":
            ids_LFTK[0, 4, 1] = (ids_LFTK[0, 4, 1] + 1) % _E
        found |= named(f"biased-{case}", "in", {"ids_LFTK": ids_LFTK})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return margins, moments, bounds and chances, and whether loads and ids may have come of such draws."""
    legal = [oracle.legal_random_loads(n_E, top_k) for n_E in given(inputs, "random")["loads_NE"] for top_k in (1, 4)]
    margins = [oracle.load_margin(*sizes) for sizes in _SIZES]
    found = named("random", "out", {"margins_N": margins, "legal_NE": legal})
    logits = list(given(inputs, "moments")["logits_NTE"])
    moments = [oracle.bias_moment(logits), oracle.bias_moment(logits[:1])]
    bounds = [oracle.bias_moment_bounds(*each) for each in _BOUNDS]
    found |= named("moments", "out", {"moments": moments, "bounds_N2": bounds})
    for draws, K, E in _CHANCES:
        found |= named("chances", "out", {f"{draws}-more-of-{K}-in-{E}": oracle.chance_alike(draws, K, E)})
    for case in _BIASED:
        ids_LFTK = given(inputs, f"biased-{case}")["ids_LFTK"]
        answers: dict[str, object] = {
            "alike_LF": [[oracle.one_choice([ids_TK]) for ids_TK in row] for row in ids_LFTK],
            "alike_L": [oracle.one_choice(list(row)) for row in ids_LFTK],
        }
        found |= named(f"biased-{case}", "out", answers)
    return found
