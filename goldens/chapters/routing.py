"""Golden of routing: selection, its margins, weights and the gradient back to the logits, for every score function."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, leaf, named
from moe_conformance.reference.routing import routes

_T, _E, _K = 7, 12, 3
_CASES: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"score": "softmax"},
    "softmax-normalised": {"score": "softmax", "normalise": True},
    "softmax-of-chosen": {"score": "softmax_topk"},
    "sigmoid-biased": {"score": "sigmoid", "normalise": True, "scale": 2.5},
    "sigmoid-groups-top2": {"score": "sigmoid", "groups": (4, 2), "group_score": "top2_sum"},
    "softmax-groups-max": {"score": "softmax", "groups": (4, 2), "group_score": "max"},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "normalise": True, "scale": 1.5},
}
_MORE: Mapping[str, Mapping[str, Any]] = {
    "sigmoid-groups-topk-sum": {"score": "sigmoid", "groups": (4, 1), "group_score": "topk_sum"},
    "ties": {"score": "softmax", "groups": (6, 4), "group_score": "max"},
    "masked-experts": {"score": "softmax_topk"},
    "underflowed": {"score": "sigmoid", "normalise": True},
    "no-tokens": {"score": "softmax"},
    "underflowed-root": {"score": "sqrtsoftplus", "normalise": True},
    "softmax-groups-topk-sum": {"score": "softmax", "groups": (4, 3), "group_score": "topk_sum"},
}


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return logits, upstream gradients of the weights and, for one case, a balancing bias."""
    found: dict[str, Tensor] = {}
    for case in _CASES:
        found |= _tokens(rng, case)
    found["sigmoid-biased/in/bias_E"] = torch.from_numpy(0.3 * rng.standard_normal(_E))
    for case in _MORE:
        found |= _tokens(rng, case)
    found["ties/in/logits_TE"] = found["ties/in/logits_TE"].round()
    found["masked-experts/in/logits_TE"][:, 2:9] = -inf
    for case in ("underflowed", "underflowed-root"):
        found[f"{case}/in/logits_TE"][3:5] = -900
    found |= {
        f"no-tokens/in/{name}": found[f"no-tokens/in/{name}"][:0].clone() for name in ("logits_TE", "upstream_TK")
    }
    return found


def _tokens(rng: np.random.Generator, case: str) -> dict[str, Tensor]:
    logits_TE, upstream_TK = 2 * rng.standard_normal((_T, _E)), rng.standard_normal((_T, _K))
    return named(case, "in", {"logits_TE": logits_TE, "upstream_TK": upstream_TK})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return ids, how clearly they and the experts after them win, weights, and the gradient of the logits."""
    found: dict[str, Tensor] = {}
    for case, settings in {**_CASES, **_MORE}.items():
        drawn = given(inputs, case)
        logits_TE, bias_E = leaf(drawn["logits_TE"]), drawn.get("bias_E")
        routed = oracle.route(logits_TE, top_k=_K, bias_E=bias_E, **settings)
        (dlogits_TE,) = torch.autograd.grad(routed.weights_TK, logits_TE, drawn["upstream_TK"])
        answers = {"ids_TK": routed.ids_TK, "weights_TK": routed.weights_TK, "dlogits_TE": dlogits_TE}
        how = {name: value for name, value in settings.items() if name not in ("normalise", "scale")}
        for name, ids_TK in (("margins_T", None), ("margins-of-others_T", (routed.ids_TK + 1) % _E)):
            answers[name] = oracle.margins(drawn["logits_TE"], ids_TK, top_k=_K, bias_E=bias_E, **how)
        found |= named(case, "out", answers)
    return found


REQUIREMENTS = ("ROUTE-01", "ROUTE-02", "ROUTE-03", "ROUTE-04", "ROUTE-05", "ROUTE-06", "ROUTE-07")

CHAPTER = Chapter(2101, REQUIREMENTS, functions(routes), draw, work_out)
