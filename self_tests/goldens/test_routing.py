"""The goldens of routing are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from self_tests.chapters.routing.second.routes import Gate, Limit, choice_values, gradient, margin_of_token, route
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

K = 3
GATES = {
    "softmax": Gate(K, "softmax"),
    "softmax-normalised": Gate(K, "softmax", normalise=True),
    "softmax-of-chosen": Gate(K, "softmax_topk"),
    "sigmoid-biased": Gate(K, "sigmoid", normalise=True, scale=2.5),
    "sigmoid-groups-top2": Gate(K, "sigmoid", limit=Limit(4, 2, "top2_sum")),
    "softmax-groups-max": Gate(K, "softmax", limit=Limit(4, 2, "max")),
    "sqrtsoftplus": Gate(K, "sqrtsoftplus", normalise=True, scale=1.5),
    "sigmoid-groups-topk-sum": Gate(K, "sigmoid", limit=Limit(4, 1, "topk_sum")),
    "ties": Gate(K, "softmax", limit=Limit(6, 4, "max")),
    "masked-experts": Gate(K, "softmax_topk"),
    "underflowed": Gate(K, "sigmoid", normalise=True),
    "no-tokens": Gate(K, "softmax"),
    "underflowed-root": Gate(K, "sqrtsoftplus", normalise=True),
    "softmax-groups-topk-sum": Gate(K, "softmax", limit=Limit(4, 3, "topk_sum")),
}


def of_case(values: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Ids, weights, gradient and margins."""
    own, gate = given(values, case), GATES[case]
    if "bias_E" in own:
        gate = replace(gate, bias=tuple(own["bias_E"].tolist()))
    logits_TE = own["logits_TE"]
    E = logits_TE.shape[1]
    ids_TK, weights_TK = route(logits_TE, gate)
    choices = [choice_values(row, gate) for row in logits_TE.tolist()]

    def margins(ids: Any) -> list[float]:
        return [margin_of_token(*each, gate.limit) for each in zip(choices, ids.tolist(), strict=True)]

    answers = {
        "ids_TK": ids_TK,
        "weights_TK": weights_TK,
        "dlogits_TE": gradient(logits_TE, ids_TK, gate, own["upstream_TK"]),
        "margins_T": margins(ids_TK),
        "margins-of-others_T": margins((ids_TK + 1) % E),
    }
    return told(case, answers)


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored choice, weight, gradient and margin."""
        values = stored("routing")
        answers: dict[str, Any] = {}
        for case in GATES:
            answers |= of_case(values, case)
        assert_twins("routing", answers)
