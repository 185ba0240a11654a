"""The goldens of capacity are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from self_tests.chapters.capacity.second import drops, limits, receive_budget
from self_tests.chapters.exchange.second import deliveries
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

E, K, TOKENS = 5, 3, (10, 0, 6)
CAPACITIES = (0, 1, 3, 10)
POLICIES = ("any", "weight", "position", "choice")
LAYERS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "as-they-are": (2, {}),
    "renormalised": (2, {"renormalise": True, "scale": 2.5}),
    "nothing-kept": (0, {"renormalise": True}),
    "no-tokens": (2, {}),
}


def of_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Capacities, and rows after padding."""
    found = {}
    for case in ("sizes", "rounded"):
        own = {name: values_N.tolist() for name, values_N in given(values, case).items()}
        minima = own.get("minimum_N", [0] * len(own["tokens_N"]))
        legal = [
            limits.capacities(tokens, top_k, experts, factor=factor, minimum=minimum)
            for tokens, top_k, experts, factor, minimum in zip(
                *(own[f"{name}_N"] for name in ("tokens", "top_k", "experts", "factor")), minima, strict=True
            )
        ]
        found |= told(case, {"least_N": [min(each) for each in legal], "largest_N": [max(each) for each in legal]})
    own = given(values, "rows")
    rows = [limits.padded_rows(T, C) for T, C in zip(own["tokens_N"].tolist(), own["capacity_N"].tolist(), strict=True)]
    return found | told("rows", {"least_N": [min(each) for each in rows], "largest_N": [max(each) for each in rows]})


def verdicts(own: Mapping[str, Any], kept: Any, policies: Any, **known: Any) -> list[list[list[bool]]]:
    """What every policy says of kept slots, of every capacity."""
    return [
        [drops.legal_drop(kept_TK, own["ids_TK"], E, capacity=C, policy=policy, **known) for policy in policies]
        for C, kept_TK in zip(CAPACITIES, kept, strict=True)
    ]


def of_rank(values: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Loads, kept slots and verdicts of one rank."""
    own = given(values, f"rank-{rank}")
    ids_TK, weights_TK = own["ids_TK"], own["weights_TK"]
    answers: dict[str, Any] = {"loads_E": limits.loads(ids_TK, E)}
    answers["fits_CE"] = [limits.fits(ids_TK, E, C) for C in CAPACITIES]
    for policy in POLICIES[1:]:
        kept = [drops.keep(ids_TK, E, capacity=C, policy=policy, weights_TK=weights_TK) for C in CAPACITIES]
        answers[f"kept-by-{policy}_CTK"] = kept
        answers[f"legal-of-{policy}_CPE"] = verdicts(own, kept, POLICIES, weights_TK=weights_TK)
        answers[f"legal-within-errors-of-{policy}_CPE"] = verdicts(
            own, kept, POLICIES, weights_TK=weights_TK, errors_TK=own["errors_TK"]
        )
        answers[f"legal-unweighed-of-{policy}_CPE"] = verdicts(own, kept, ("any", "position", "choice"))
    return told(f"rank-{rank}", answers)


def of_group(values: Mapping[str, Any]) -> dict[str, Any]:
    """One capacity for all ranks, and the ranks' own ones."""
    ranks = [given(values, f"rank-{rank}") for rank in range(len(TOKENS))]
    ids, weights = [own["ids_TK"] for own in ranks], [own["weights_TK"] for own in ranks]
    legal = []
    for more in (0, 1, 2):
        C_R = [limits.capacities(T, K, E, factor=2 / 3)[0] + more for T in TOKENS]
        kept = [drops.keep(ids_TK, E, capacity=C, policy="choice") for ids_TK, C in zip(ids, C_R, strict=True)]
        known: dict[str, Any]
        for known in ({}, {"weights_by_rank": weights}, {"tokens_by_rank": [T + 3 for T in TOKENS]}):
            legal.append(drops.legal_drops_by_rank(kept, ids, E, factor=2 / 3, policy="choice", **known))
    answers = {"lossless": [limits.lossless_capacity(ids, E)], "legal_NR": legal}
    answers["lossless"].append(limits.lossless_capacity(ids, E, minimum=9, multiple=4))
    answers["lossless-without-tokens"] = limits.lossless_capacity(ids[1:2], E, minimum=3)
    return told("group", answers)


def of_layer(values: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Weights after a drop, and their gradient."""
    (C, how), own = LAYERS[case], given(values, case)
    ids_TK, weights_TK = own["ids_TK"], own["weights_TK"]
    kept_TK = drops.keep(ids_TK, E, capacity=C, policy="weight", weights_TK=weights_TK)
    new_ids_TK, new_weights_TK = drops.after_drop(ids_TK, weights_TK, kept_TK, **how)
    answers = {
        "kept_TK": kept_TK,
        "ids_TK": new_ids_TK,
        "weights_TK": new_weights_TK,
        "back_TK": drops.after_drop_backward(weights_TK, kept_TK, own["upstream_TK"], **how),
    }
    return told(case, answers)


def of_budgets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Worst cases, budgets that are exceeded, and verdicts on deliveries."""
    own, tokens = given(values, "budgets"), (5, 0, 3, 4)
    plain = [(0, 1), (1, 1), (4, 1), (4, 8)]
    worst = []
    for each in (tokens, (0, 0)):
        worst += [receive_budget.worst_case_rows(each, 2, held, alignment=p) for held, p in plain]
        worst.append(receive_budget.worst_case_rows(each, 2, 3, alignment=4, equal_sizes=True))
        worst.append(receive_budget.worst_case_rows(each, 2, 4, equal_sizes=True, per_token=True))
        worst += [receive_budget.worst_case_rows(each, 2, held, per_token=True) for held in (0, 3)]
    wants = list(zip(own["rows_BN"].tolist(), own["budget_B"].tolist(), strict=True))
    over = [[receive_budget.over_budget(rows, B, alignment=p) for rows, B in wants] for p in (1, 4)]
    ids = [own[f"ids_TK-{rank}"] for rank in range(4)]
    placement = deliveries.Placement([[0, 1, 2, 3]], [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]])
    wanted = deliveries.deliveries(ids, placement)
    attempts = [[pair for i, pair in enumerate(wanted) for _ in range(arrivals[i])] for arrivals in own["arrivals_AP"]]
    legal = []
    for budgets, p in (([99] * 4, 1), ([8, 8, 99, 99], 1), ([12] * 4, 4), ([0] * 4, 1)):
        legal.append([receive_budget.legal_deliveries(got, wanted, budgets, alignment=p) for got in attempts])
    answers = {"worst_N": worst, "over_AB": over, "legal_BAR": legal}
    for a, got in enumerate(attempts):
        for rank, kept_TK in enumerate(receive_budget.delivered_slots(got, ids)):
            answers[f"delivered_TK-{a}{rank}"] = kept_TK
    return told("budgets", answers)


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored capacity, verdict, output and gradient."""
        values = stored("capacity")
        answers = of_sizes(values) | of_group(values) | of_budgets(values)
        for rank in range(len(TOKENS)):
            answers |= of_rank(values, rank)
        for case in LAYERS:
            answers |= of_layer(values, case)
        assert_twins("capacity", answers)
