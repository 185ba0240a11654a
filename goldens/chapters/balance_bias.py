"""Golden of the balancing bias: loads over ranks, updates by sign and their history, and bounds by quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, named
from moe_conformance.reference.balance_bias import quantiles, updates
from moe_conformance.reference.balance_bias.updates import ForwardKind

_E, _RATE = 6, 0.001
_ROUTERS = ((0, 3, 4), (1, 5), (2,))
_LOADS: Mapping[str, Sequence[int]] = {  # of an update
    "uneven": (9, 3, 0, 4, 7, 1),
    "one-at-the-mean": (4, 4, 4, 0, 8, 4),
    "even": (5, 5, 5, 5, 5, 5),
    "idle": (0, 0, 0, 0, 0, 0),
    "huge": (2**53, 2**53 + 1, 2**53, 2**53, 2**53, 2**53),  # float64 does not tell them apart
}
# The kinds of forwards; None stands for an update.
_TRAINING: Sequence[ForwardKind | None] = (
    "training", "recomputed", "training", None, None, "evaluation", "training", "forced", None, "no_grad", "training"
)  # fmt: skip
# K, tokens of the parts of the step, how much stays of the old bias
_STEPS: Mapping[str, tuple[int, Sequence[int], float]] = {
    "quantiles": (2, (7, 0, 5), 0.0),
    "quantiles-remembered": (2, (7, 0, 5), 0.75),
    "quantiles-of-few": (1, (2,), 0.0),  # fewer tokens than experts: no upper bound
    "quantiles-of-most": (5, (1, 1), 0.25),  # no lower one
    "quantiles-of-ties": (3, (8, 4), 0.0),
    "quantiles-of-all-experts": (_E, (4,), 0.5),
    "quantiles-of-no-tokens": (2, (0, 0), 0.5),
}


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return loads of ranks, the last of which has no tokens, of forwards, biases, and scores with padding."""
    ranks_WE = rng.integers(0, 9, (6, _E))
    ranks_WE[5] = 0
    found = named("ranks", "in", {"loads_WE": ranks_WE})
    for case, loads_E in _LOADS.items():
        found |= named(case, "in", {"bias_E": 0.1 * rng.standard_normal(_E), "loads_E": loads_E})
    bias_E, loads_NE = 0.1 * rng.standard_normal(_E), rng.integers(0, 9, (len(_TRAINING), _E))
    loads_NE[:, 0] = 40  # alone above the mean, so that the changes do not add up to 0
    found |= named("training", "in", {"bias_E": bias_E, "loads_NE": loads_NE})
    for case, (_, tokens, _) in _STEPS.items():
        found |= named(case, "in", {"bias_E": rng.integers(-4, 5, _E) / 16, "new_bias_E": rng.standard_normal(_E)})
        for part, T in enumerate(tokens):
            scores_TE = rng.random((T, _E))
            if case == "quantiles-of-ties":
                scores_TE = (4 * scores_TE).round() / 4
            found |= named(case, "in", {f"scores_TE-{part}": scores_TE})
            if T > 2:
                found |= named(case, "in", {f"padding_T-{part}": rng.random(T) < 0.2})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return summed loads, new biases with and without a common shift, counters, cutoffs, bounds and distances."""
    loads_WE = given(inputs, "ranks")["loads_WE"]
    found = named("ranks", "out", {"loads_WE": oracle.router_loads(list(loads_WE), _ROUTERS)})
    for case in _LOADS:
        drawn = given(inputs, case)
        bias_E = oracle.update(drawn["bias_E"], drawn["loads_E"], rate=_RATE)
        centred_E = oracle.update(drawn["bias_E"], drawn["loads_E"], rate=_RATE, centred=True)
        free_E = oracle.without_constant(bias_E)
        found |= named(case, "out", {"bias_E": bias_E, "centred_E": centred_E, "without_constant_E": free_E})
    drawn = given(inputs, "training")
    events = [
        oracle.Forward(kind, n_E) if kind else oracle.Update()
        for kind, n_E in zip(_TRAINING, drawn["loads_NE"], strict=True)
    ]
    for case, how in (("training", {}), ("training-centred", {"centred": True})):
        bias_E, counters_E = oracle.trained(drawn["bias_E"], events, rate=_RATE, **how)
        found |= named(case, "out", {"bias_E": bias_E, "counters_E": counters_E})
    gaps = [oracle.growth(*each) for each in ((_RATE, 1000), (0.5, 1), (_RATE, 0), (0.0, 7))]
    found |= named("growth", "out", {"gaps": [gap for gap, _ in gaps], "errors": [error for _, error in gaps]})
    for case in _STEPS:
        found |= named(case, "out", _step(case, given(inputs, case), oracle))
    return found


def _step(case: str, drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, object]:
    K, tokens, memory = _STEPS[case]
    scores = [drawn[f"scores_TE-{part}"] for part in range(len(tokens))]
    masks = [drawn.get(f"padding_T-{part}") for part in range(len(tokens))]
    padding = [mask if mask is None else mask.bool() for mask in masks] if any(T > 2 for T in tokens) else None
    how = {"memory": memory} if memory else {}
    low_E, high_E = oracle.quantile_bounds(scores, drawn["bias_E"], top_k=K, padding=padding, **how)
    found: dict[str, object] = {"low_E": low_E, "high_E": high_E}
    found["outside"] = oracle.outside(drawn["new_bias_E"], low_E, high_E)
    if K < _E:
        found["cutoffs_T"] = torch.cat([oracle.cutoffs(each, drawn["bias_E"], top_k=K) for each in scores])
    return found


_REQUIREMENTS = tuple(f"BIAS-{number:02}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 11, 12))

CHAPTER = Chapter(2501, _REQUIREMENTS, functions(quantiles, updates), draw, work_out)
