"""The goldens of the balancing bias are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from self_tests.chapters.balance_bias import second as balance_bias
from self_tests.chapters.balance_bias.second import Forward, Update
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

RATE = 0.001
UPDATES = ("uneven", "one-at-the-mean", "even", "idle", "huge")
TRAINING = [
    *("training", "recomputed", "training", "update", "update", "evaluation", "training", "forced", "update"),
    *("no_grad", "training"),
]
STEPS = {
    "quantiles": (2, 3, 0.0),
    "quantiles-remembered": (2, 3, 0.75),
    "quantiles-of-few": (1, 1, 0.0),
    "quantiles-of-most": (5, 2, 0.25),
    "quantiles-of-ties": (3, 2, 0.0),
    "quantiles-of-all-experts": (6, 1, 0.5),
    "quantiles-of-no-tokens": (2, 2, 0.5),
}


def by_sign(values: Mapping[str, Any]) -> dict[str, Any]:
    """Loads over ranks, single updates, and a training."""
    loads = given(values, "ranks")["loads_WE"].tolist()
    found = told("ranks", {"loads_WE": balance_bias.summed_loads(loads, [[0, 3, 4], [1, 5], [2]])})
    for case in UPDATES:
        own = given(values, case)
        bias, loads = own["bias_E"].tolist(), own["loads_E"].tolist()
        moved = balance_bias.moved(bias, loads, RATE)
        answers = {"bias_E": moved, "without_constant_E": balance_bias.less_their_mean(moved)}
        found |= told(case, answers | {"centred_E": balance_bias.moved(bias, loads, RATE, centred=True)})
    own = given(values, "training")
    events = [
        Update() if kind == "update" else Forward(kind, loads)
        for kind, loads in zip(TRAINING, own["loads_NE"].tolist(), strict=True)
    ]
    for case, centred in (("training", False), ("training-centred", True)):
        bias, counters = balance_bias.after(own["bias_E"].tolist(), events, RATE, centred=centred)
        found |= told(case, {"bias_E": bias, "counters_E": counters})
    gaps = [balance_bias.grown(*each) for each in ((RATE, 1000), (0.5, 1), (RATE, 0), (0.0, 7))]
    return found | told("growth", {"gaps": [gap for gap, _ in gaps], "errors": [error for _, error in gaps]})


def by_quantile(values: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Bounds of the new bias, how far a drawn one lies outside, and every token's cutoff."""
    (K, parts, memory), own = STEPS[case], given(values, case)
    scores = [own[f"scores_TE-{part}"] for part in range(parts)]
    masks = [own.get(f"padding_T-{part}") for part in range(parts)]
    padding = [mask if mask is None else mask.astype(bool) for mask in masks]
    bias = own["bias_E"].tolist()
    low, high = balance_bias.legal_range(scores, bias, K, padding, memory)
    answers = {"low_E": low, "high_E": high, "outside": balance_bias.missed(own["new_bias_E"].tolist(), low, high)}
    if K < len(bias):
        rows = [row for scores_TE in scores for row in scores_TE.tolist()]
        answers["cutoffs_T"] = [balance_bias.cutoff(row, bias, K) for row in rows]
    return told(case, answers)


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored load, bias and bound."""
        values = stored("balance_bias")
        answers = by_sign(values)
        for case in STEPS:
            answers |= by_quantile(values, case)
        assert_twins("balance_bias", answers)
