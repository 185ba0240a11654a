"""Golden of forcing: routes, weights of forced ids, and what losses may see.

Hot blocks are in `forcing_hot.py`, random and biased draws in `forcing_draws.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, leaf, named
from moe_conformance.goldens.chapters import forcing_draws, forcing_hot
from moe_conformance.reference.capacity import limits
from moe_conformance.reference.forcing import draws, hot, imbalance, routes, scores

_T, _E, _K = 6, 8, 3
_SUMS = (  # loads by rank: as even as they must be, not, likewise with unequal numbers of tokens
    ((2, 2, 1), (1, 2, 2)), ((2, 2, 1), (2, 2, 1)), ((2, 2, 1), (1, 1, 0)), ((3, 2, 1), (1, 1, 0)),
)  # fmt: skip
_SCORES: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"score": "softmax", "normalise": True},
    "softmax-of-forced": {"score": "softmax_topk", "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "normalise": True, "scale": 1.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "no-tokens": {"score": "sigmoid"},
}


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return ids that are routes and some that are none, loads of ranks, and logits of which some are masked."""
    free_TK = rng.integers(-1, _E + 1, (20, 2))
    free_TK[12:16] = -1
    found = named("free", "in", {"ids_TK": free_TK, "padding_T": rng.random(20) < 0.5})
    found |= named("routes", "in", {"ids_TK": _routes(rng)})
    found |= named("balance", "in", {"loads_NWE": np.concatenate([rng.integers(2, 5, (6, 2, 3)), np.array(_SUMS)])})
    for case in _SCORES:
        T = 0 if case == "no-tokens" else _T
        ids_TK, logits_TE = _routes(rng)[:T], 2 * rng.standard_normal((T, _E))
        logits_TE[:, 5] = -inf
        if T:
            logits_TE[2, ids_TK[2]] = -inf  # nothing decides the weights of this token
        drawn = {"logits_TE": logits_TE, "ids_TK": ids_TK, "upstream_TK": rng.standard_normal((T, _K))}
        forced = {"forced_TE": rng.standard_normal((T, _E)).round(1), "upstream_TE": rng.standard_normal((T, _E))}
        found |= named(case, "in", {**drawn, **forced})
    return found | forcing_hot.draw(rng) | forcing_draws.draw(rng)


def _routes(rng: np.random.Generator) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    return np.stack([rng.permutation(_E)[:_K] for _ in range(_T)])


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return routes and judgements on routes, forced weights with gradients, and the views of a loss."""
    drawn = given(inputs, "free")
    legal = {"legal_T": oracle.legal_ids(drawn["ids_TK"], _E)}
    legal["legal-or-padding_T"] = oracle.legal_ids(drawn["ids_TK"], _E, padding_T=drawn["padding_T"].bool())
    found = named("free", "out", legal)
    used = [oracle.groups_used(given(inputs, "routes")["ids_TK"], _E, groups) for groups in (1, 2, 4, 8)]
    found |= named("routes", "out", {"groups_used_GT": used})
    loads_NWE = given(inputs, "balance")["loads_NWE"]
    even_NW = [[oracle.balanced(loads_E) for loads_E in loads_WE] for loads_WE in loads_NWE]
    sums = [oracle.balanced_sum(list(loads_WE)) for loads_WE in loads_NWE]
    found |= named("balance", "out", {"balanced_NW": even_NW, "balanced_sum_N": sums})
    for case, settings in _SCORES.items():
        found |= named(case, "out", _weighed(given(inputs, case), settings, oracle))
    return found | forcing_hot.work_out(inputs, oracle) | forcing_draws.work_out(inputs, oracle)


def _weighed(drawn: Mapping[str, Tensor], settings: Mapping[str, Any], oracle: Oracle) -> dict[str, object]:
    leaf_TE, ids_TK = leaf(drawn["logits_TE"]), drawn["ids_TK"]
    weights_TK = oracle.forced_weights(leaf_TE, ids_TK, **settings)
    found: dict[str, object] = {"undecided_T": oracle.undecided_weights(leaf_TE, ids_TK), "weights_TK": weights_TK}
    (found["dlogits_TE"],) = torch.autograd.grad(weights_TK, leaf_TE, drawn["upstream_TK"])
    z_TE = oracle.straight_through(leaf_TE, drawn["forced_TE"])
    found["z_TE"] = z_TE
    (found["dlogits-of-z_TE"],) = torch.autograd.grad(z_TE, leaf_TE, drawn["upstream_TE"])
    of_logits = oracle.loss_views(leaf_TE, top_k=_K, forced_logits_TE=drawn["forced_TE"])
    of_ids = oracle.loss_views(leaf_TE, top_k=_K, forced_ids_TK=ids_TK)
    views = [*of_logits, *of_ids]
    found["views_VTE"] = [view.logits_TE for view in views]
    found["views_VTK"] = [view.ids_TK for view in views]
    back = [torch.autograd.grad(view.logits_TE, leaf_TE, drawn["upstream_TE"])[0] for view in views]
    found["dlogits-of-views_VTE"] = back
    return found


_REQUIREMENTS = tuple(f"FORCE-{number:02}" for number in (*range(2, 12), *range(13, 17), 18, 21, 22))

_ORACLE = functions(routes, scores, hot, imbalance, draws, limits)

CHAPTER = Chapter(2701, _REQUIREMENTS, _ORACLE, draw, work_out)
