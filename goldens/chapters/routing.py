"""Goldens of routing: selection, weights and the gradient back to the logits, for every score function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from goldens.chapter import Chapter
from reference import routing

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


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return logits, upstream gradients of the weights and, for one case, a balancing bias."""
    found = {}
    for case in _CASES:
        found[f"{case}/in/logits_TE"] = torch.from_numpy(2 * rng.standard_normal((_T, _E)))
        found[f"{case}/in/upstream_TK"] = torch.from_numpy(rng.standard_normal((_T, _K)))
    found["sigmoid-biased/in/bias_E"] = torch.from_numpy(0.3 * rng.standard_normal(_E))
    return found


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return ids, weights and the gradient of the logits."""
    found = {}
    for case, settings in _CASES.items():
        logits_TE = inputs[f"{case}/in/logits_TE"].clone().requires_grad_()
        bias_E = inputs.get(f"{case}/in/bias_E")
        routed = routing.route(logits_TE, top_k=_K, bias_E=bias_E, **settings)
        upstream_TK = inputs[f"{case}/in/upstream_TK"]
        found[f"{case}/out/ids_TK"] = routed.ids_TK
        found[f"{case}/out/weights_TK"] = routed.weights_TK.detach()
        (found[f"{case}/out/dlogits_TE"],) = torch.autograd.grad(routed.weights_TK, logits_TE, upstream_TK)
    return found


REQUIREMENTS = ("ROUTE-01", "ROUTE-02", "ROUTE-03", "ROUTE-04", "ROUTE-05", "ROUTE-06", "ROUTE-07")

CHAPTER = Chapter(2101, REQUIREMENTS, draw, work_out)
