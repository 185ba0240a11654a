"""Golden of capacity: how many rows fit, which slots may be kept, and what the weights become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, draw_ids, functions, given, gradients, leaf, named
from moe_conformance.reference.capacity import after_drops, drops, limits, receive_budget
from moe_conformance.reference.exchange import deliveries

_E, _K = 5, 3
_TOKENS = (10, 0, 6)  # by rank
_CAPACITIES = (0, 1, 3, 10)
# Sizes where float32 may round a product, and where it cannot: T, K, E, factor.
_ROUNDED = (
    (10, 3, 5, 1.0), (8, 2, 8, 1.0), (20, 4, 8, 1.1), (0, 4, 6, 1.1), (2**24, 1, 8, 1.0), (2**24 - 8, 1, 8, 1.0),
    (2**22, 2, 8, 1.25), (2**20, 2, 8, 1.25), (10, 1, 1, 1.1), (20, 1, 1, 1.0), (2**22, 1, 3, 1.0),
    (2**22 - 3, 1, 3, 1.0), (3355444, 1, 3, 1.0), (2**22 + 4, 1, 5, 1.0),
)  # fmt: skip
_FACTOR = 2 / 3  # of ranks of 10 tokens 4 or 5 rows, as 2 / 3 is rounded
_POLICIES: tuple[drops.Policy, ...] = get_args(drops.Policy)
# Tokens of the layer, the capacity of its experts, and how kept weights are normalised.
_LAYERS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "as-they-are": (6, 2, {}),
    "renormalised": (6, 2, {"renormalise": True, "scale": 2.5}),
    "nothing-kept": (4, 0, {"renormalise": True}),
    "no-tokens": (0, 2, {}),
}
# Of receive budgets, on four ranks.
_BUDGET_K, _BUDGET_E = 2, 6
_BUDGET_TOKENS = (5, 0, 3, 4)  # by rank
_GROUPS, _HELD = ((0, 1, 2, 3),), ((0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5))  # ep 2, etp 2: a slot is two rows
_WORST: Sequence[tuple[int, Mapping[str, Any]]] = (  # experts of a rank
    (0, {}), (1, {}), (4, {}), (4, {"alignment": 8}), (3, {"alignment": 4, "equal_sizes": True}),
    (4, {"equal_sizes": True, "per_token": True}), (0, {"per_token": True}), (3, {"per_token": True}),
)  # fmt: skip
_ALIGNED: Sequence[Mapping[str, int]] = ({}, {"alignment": 4})
_BUDGETS = (((99,) * 4, _ALIGNED[0]), ((8, 8, 99, 99), _ALIGNED[0]), ((12,) * 4, _ALIGNED[1]), ((0,) * 4, _ALIGNED[0]))
_PAIRS = 2 * _BUDGET_K * sum(_BUDGET_TOKENS)  # at most


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return sizes, ids of ranks with weights that tie and errors, layers, and what receive budgets need."""
    sizes = {"tokens_N": rng.integers(0, 300, 40), "experts_N": rng.choice([5, 6, 8, 60, 64], 40)}
    sizes |= {"top_k_N": rng.integers(1, 6, 40), "minimum_N": rng.choice([0, 4], 40)}
    found = named("sizes", "in", sizes | {"factor_N": rng.choice([0.0, 0.5, 1.0, 1.1, 1.25, 2.0], 40)})
    columns = zip(("tokens_N", "top_k_N", "experts_N", "factor_N"), zip(*_ROUNDED, strict=True), strict=True)
    found |= named("rounded", "in", dict(columns))
    found |= named("rows", "in", {"tokens_N": [0, 3, 5, 5], "capacity_N": [2, 5, 5, 3]})
    for rank, T in enumerate(_TOKENS):
        weights_TK = (4 * rng.random((T, _K))).round() / 4
        drawn = {"ids_TK": draw_ids(rng, T, _K, _E), "weights_TK": weights_TK, "errors_TK": 0.3 * rng.random((T, _K))}
        found |= named(f"rank-{rank}", "in", drawn)
    for case, (T, _, _) in _LAYERS.items():
        rng.standard_normal((T, 4))  # not stored, as below; keeps later draws the same
        drawn = {
            "ids_TK": draw_ids(rng, T, _K, _E),
            "weights_TK": rng.random((T, _K)),
            "upstream_TK": rng.standard_normal((T, _K)),
        }
        rng.standard_normal(T * 4 + 3 * _E * 3 * 4)
        found |= named(case, "in", drawn)
    return found | _draw_budgets(rng)


def _draw_budgets(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the ids of every rank, and of every pair and attempt how often it arrives."""
    found: dict[str, Tensor] = {}
    for rank, T in enumerate(_BUDGET_TOKENS):
        found |= named("budgets", "in", {f"ids_TK-{rank}": draw_ids(rng, T, _BUDGET_K, _BUDGET_E)})
    slots = (rng.random(_PAIRS // 2) < 0.7).repeat(2)  # both shards of a slot, or none
    pairs = rng.random(_PAIRS) < 0.9
    twice = 1 + (np.arange(_PAIRS) == 3)
    found |= named("budgets", "in", {"arrivals_AP": np.stack([np.ones(_PAIRS), slots, pairs, twice]).astype(np.int64)})
    return found | named("budgets", "in", {"rows_BN": rng.integers(0, 6, (5, 3)), "budget_B": [0, 5, 7, 9, 12]})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return capacities (least and largest legal), loads, kept slots and verdicts, and weights after a drop."""
    found: dict[str, Tensor] = {}
    for case in ("sizes", "rounded"):
        legal = _capacities({name: values_N.tolist() for name, values_N in given(inputs, case).items()}, oracle)
        found |= named(case, "out", {"least_N": [each[0] for each in legal], "largest_N": [each[-1] for each in legal]})
    drawn = given(inputs, "rows")
    pairs = zip(drawn["tokens_N"].tolist(), drawn["capacity_N"].tolist(), strict=True)
    rows = [oracle.padded_rows(*pair) for pair in pairs]
    found |= named("rows", "out", {"least_N": [each[0] for each in rows], "largest_N": [each[-1] for each in rows]})
    found |= _drops(inputs, oracle)
    for case, (_, C, how) in _LAYERS.items():
        found |= named(case, "out", _layer(given(inputs, case), C, how, oracle))
    return found | _budgets(inputs, oracle)


def _capacities(drawn: Mapping[str, list[Any]], oracle: Oracle) -> list[Sequence[int]]:
    sizes = list(zip(drawn["tokens_N"], drawn["top_k_N"], drawn["experts_N"], drawn["factor_N"], strict=True))
    least = [{"minimum": minimum} for minimum in drawn["minimum_N"]] if "minimum_N" in drawn else [{}] * len(sizes)
    return [oracle.capacities(T, K, E, factor=c, **how) for (T, K, E, c), how in zip(sizes, least, strict=True)]


def _drops(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    ranks = [given(inputs, f"rank-{rank}") for rank in range(len(_TOKENS))]
    ids, weights = [drawn["ids_TK"] for drawn in ranks], [drawn["weights_TK"] for drawn in ranks]
    found = named("group", "out", {
        "lossless": [oracle.lossless_capacity(ids, _E), oracle.lossless_capacity(ids, _E, minimum=9, multiple=4)],
        "lossless-without-tokens": oracle.lossless_capacity(ids[1:2], _E, minimum=3),
    })  # fmt: skip
    for rank, drawn in enumerate(ranks):
        answers: dict[str, object] = {"loads_E": oracle.loads(drawn["ids_TK"], _E)}
        answers["fits_CE"] = [oracle.fits(drawn["ids_TK"], _E, C) for C in _CAPACITIES]
        for policy in _POLICIES[1:]:  # "any" has no order to keep by
            kept = [_keep(drawn, C, policy, oracle) for C in _CAPACITIES]
            answers[f"kept-by-{policy}_CTK"] = kept
            exact = {"weights_TK": drawn["weights_TK"]}
            answers[f"legal-of-{policy}_CPE"] = _verdicts(drawn["ids_TK"], kept, _POLICIES, exact, oracle)
            answers[f"legal-within-errors-of-{policy}_CPE"] = _verdicts(
                drawn["ids_TK"], kept, _POLICIES, exact | {"errors_TK": drawn["errors_TK"]}, oracle
            )
            unweighed = tuple(each for each in _POLICIES if each != "weight")
            answers[f"legal-unweighed-of-{policy}_CPE"] = _verdicts(drawn["ids_TK"], kept, unweighed, {}, oracle)
        found |= named(f"rank-{rank}", "out", answers)
    verdicts = []
    for more in (0, 1, 2):  # than the least legal capacity
        C_R = [oracle.capacities(len(ids_TK), _K, _E, factor=_FACTOR)[0] + more for ids_TK in ids]
        kept = [_keep(drawn, C, "choice", oracle) for drawn, C in zip(ranks, C_R, strict=True)]
        for how in ({}, {"weights_by_rank": weights}, {"tokens_by_rank": [T + 3 for T in _TOKENS]}):
            legal = oracle.legal_drops_by_rank(kept, ids, _E, factor=_FACTOR, policy="choice", **how)
            verdicts.append(legal)
    return found | named("group", "out", {"legal_NR": verdicts})


def _keep(drawn: Mapping[str, Tensor], C: int, policy: drops.Policy, oracle: Oracle) -> Tensor:
    kept_TK: Tensor = oracle.keep(drawn["ids_TK"], _E, capacity=C, policy=policy, weights_TK=drawn["weights_TK"])
    return kept_TK


def _verdicts(
    ids_TK: Tensor,
    kept: list[Tensor],
    policies: tuple[drops.Policy, ...],
    known: Mapping[str, Tensor],
    oracle: Oracle,
) -> list[list[Sequence[bool]]]:
    """Judge by every policy what was kept by one, of every capacity, (C, policies, E)."""
    return [
        [oracle.legal_drop(kept_TK, ids_TK, _E, capacity=C, policy=policy, **known) for policy in policies]
        for C, kept_TK in zip(_CAPACITIES, kept, strict=True)
    ]


def _layer(drawn: Mapping[str, Tensor], C: int, how: Mapping[str, Any], oracle: Oracle) -> dict[str, object]:
    leaf_TK = leaf(drawn["weights_TK"])
    kept_TK = _keep(drawn, C, "weight", oracle)
    dropped = oracle.after_drop(drawn["ids_TK"], leaf_TK, kept_TK, **how)
    back_TK = gradients([dropped.weights_TK], {"weights": leaf_TK}, [drawn["upstream_TK"]])["dweights"]
    return {"kept_TK": kept_TK, "ids_TK": dropped.ids_TK, "weights_TK": dropped.weights_TK, "back_TK": back_TK}


def _budgets(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return worst cases, which budgets are exceeded, and of every budget and attempt each rank's verdict."""
    drawn = given(inputs, "budgets")
    worst = [
        oracle.worst_case_rows(tokens, _BUDGET_K, held, **how)
        for tokens in (_BUDGET_TOKENS, (0, 0))
        for held, how in _WORST
    ]
    wants = list(zip(drawn["rows_BN"].tolist(), drawn["budget_B"].tolist(), strict=True))
    over = [[oracle.over_budget(rows, budget, **how) for rows, budget in wants] for how in _ALIGNED]
    ids = [drawn[f"ids_TK-{rank}"] for rank in range(len(_BUDGET_TOKENS))]
    wanted = oracle.deliveries(ids, _GROUPS, _HELD)
    attempts = [
        [pair for pair, times in zip(wanted, arrivals, strict=False) for _ in range(times)]
        for arrivals in drawn["arrivals_AP"].tolist()
    ]
    legal = [
        [oracle.legal_deliveries(delivered, wanted, budgets, **how) for delivered in attempts]
        for budgets, how in _BUDGETS
    ]
    answers: dict[str, object] = {"worst_N": worst, "over_AB": over, "legal_BAR": legal}
    for attempt, delivered in enumerate(attempts):
        for rank, kept_TK in enumerate(oracle.delivered_slots(delivered, ids)):
            answers[f"delivered_TK-{attempt}{rank}"] = kept_TK
    return named("budgets", "out", answers)


_ORACLE = functions(limits, drops, after_drops, receive_budget, deliveries)


CHAPTER = Chapter(2601, tuple(f"DROP-{number:02}" for number in range(1, 16)), _ORACLE, draw, work_out)
