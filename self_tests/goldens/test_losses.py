"""The goldens of the losses are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from self_tests.chapters.losses.second import balance, scaling
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.routing.second.routes import Gate, Limit, route
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

C, K = 0.25, 2
CASES = {
    "softmax": ("softmax", None),
    "softmax-of-chosen": ("softmax_topk", Limit(4, 2, "max")),
    "sigmoid": ("sigmoid", Limit(4, 2, "top2_sum")),
    "sqrtsoftplus": ("sqrtsoftplus", Limit(2, 1, "topk_sum")),
    "ties": ("sigmoid", None),
    "underflowed": ("sigmoid", None),
    "masked-expert": ("softmax", None),
    "padding-only": ("sqrtsoftplus", None),
    "no-tokens": ("softmax", None),
}


def tokens(own: Mapping[str, Any]) -> Tokens:
    """A part as the longhand takes it."""
    padding_T = own["padding_T"].astype(bool) if "padding_T" in own else None
    return Tokens(own["logits_TE"], own["ids_TK"], padding_T)


def of_microbatch(values: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Shares, choices, losses and gradients of one microbatch."""
    (kind, limit), own = CASES[case], given(values, case)
    part, sequences_T = tokens(own), own["sequences_T"]
    of_all = int(max(sequences_T)) + 3 if len(sequences_T) else 2
    charged = {
        "auxiliary": balance.auxiliary(part, kind, C),
        "sequence": balance.by_sequence(part, sequences_T, kind, C),
        "sequence-of-all": balance.by_sequence(part, sequences_T, kind, C, of_all),
        "z": balance.z(part.logits_TE, C, part.padding_T),
    }
    answers = {
        "p_TE": balance.shares(kind, part.logits_TE),
        "choices_TK": balance.own_choices(kind, part.logits_TE, K, limit, part.padding_T),
        "counts_E": balance.count_choices(part.ids_TK, part.logits_TE.shape[1], part.padding_T),
    }
    answers |= {name: loss.value for name, loss in charged.items()}
    return told(case, answers | {f"d{name}_TE": loss.gradient_TE for name, loss in charged.items()})


def of_step(values: Mapping[str, Any]) -> dict[str, Any]:
    """The global losses, and the z-loss of each microbatch's groups as if these were ranks."""
    step = [[tokens(given(values, f"step-{m}{d}")) for d in range(2)] for m in range(4)]
    bare = [[part._replace(padding_T=None) for part in row] for row in step]
    found = told("global-of-nothing", {"losses_M": np.array(balance.over_a_step([], "sigmoid", C), dtype=np.float64)})
    for case, parts, remembers in (
        ("global", step, True),
        ("global-forgetful", step, False),
        ("global-unpadded", bare, True),
    ):
        told_M = balance.over_a_step(parts, "sigmoid", C, remembers=remembers)
        answers = {f"dlogits_TE-{m}{d}": told_M[m][1][d] for m in range(4) for d in range(2)}
        found |= told(case, answers | {"losses_M": [value for value, _ in told_M]})
    for word, parts in (("", step), ("unpadded-", bare)):
        for m, row in enumerate(parts):
            value, gradients = balance.z_of_parts([(part.logits_TE, part.padding_T) for part in row], C)
            answers = {f"dlogits_TE-{d}": gradients[d] for d in range(2)}
            found |= told(f"z-of-parts-{word}{m}", answers | {"z": value})
    return found


def of_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch put together, and finished gradients in every convention."""
    x_TD = given(values, "whole")["x_TD"]
    places = [np.array(own, dtype=np.int64) for own in ([0, 2, 3], [1, 3, 5], [], [4])]
    own = given(values, "scaling")
    table, valid = [list(row) for row in own["gradients_MdE"]], own["valid_Md"].tolist()
    answers = {
        "mean_E": scaling.mean(table),
        "sum_E": scaling.scaled_sum(table, 0.5),
        "by_token_E": scaling.by_tokens(table, valid),
        "by_no_token_E": scaling.by_tokens(table, [[0, 0]] * 3),
    }
    together = scaling.put_together([x_TD[own] for own in places], places)
    return told("whole", {"x_TD": together}) | told("scaling", answers)


def of_router(values: Mapping[str, Any]) -> dict[str, Any]:
    """Losses attached to weights, back to the router and its input."""
    own = given(values, "router")
    logits_TE = own["x_TD"] @ own["router_ED"].T
    gate = Gate(K, "sigmoid", normalise=True, scale=2.5)
    ids_TK, _ = route(logits_TE, gate)
    charges = [balance.auxiliary(Tokens(logits_TE, ids_TK), "sigmoid", C), balance.z(logits_TE, C)]
    alone_TE = scaling.attached(logits_TE, ids_TK, gate, own["upstream_TK"], charges, 0.0)
    dlogits_TE = scaling.attached(logits_TE, ids_TK, gate, own["upstream_TK"], charges, 0.5)
    plain_TE = scaling.attached(logits_TE, ids_TK, gate, own["upstream_TK"], charges, 1.0)
    dx_TD, drouter_ED = scaling.through_router(own["x_TD"], own["router_ED"], dlogits_TE)
    answers = {"ids_TK": ids_TK, "dlogits_TE": dlogits_TE, "dlogits_TE-of-weights": alone_TE}
    return told("router", answers | {"dlogits_TE-unscaled": plain_TE, "dx_TD": dx_TD, "drouter_ED": drouter_ED})


def of_report(values: Mapping[str, Any]) -> dict[str, Any]:
    """What losses of layers add up to and are reported as."""
    one, other = given(values, "report")["losses_YMd"]
    kinds = ["evaluation", "training", "recomputed", "training", "no_grad", "training"]
    answers = {
        "model": scaling.of_model([one[0, 0], None, other[0, 0]]),
        "reported": scaling.report([one, None, other]),
        "reported-without-coefficient": scaling.report([one, None, other], C),
        "reported-of-nothing": scaling.report([one[:0]]),
        "training-forwards": scaling.counted_forwards(kinds),
    }
    return told("report", answers)


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored loss and gradient."""
        values = stored("losses")
        answers = {name: answer for case in CASES for name, answer in of_microbatch(values, case).items()}
        for part in (of_step, of_scaling, of_router, of_report):
            answers |= part(values)
        assert_twins("losses", answers)
