"""The goldens of forcing are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from self_tests.chapters.capacity.second import limits
from self_tests.chapters.forcing.second import draws as forcing_draws
from self_tests.chapters.forcing.second import hot as forcing_hot
from self_tests.chapters.forcing.second import routes
from self_tests.chapters.routing.second.routes import Gate, largest_first
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

E, K = 8, 3
GATES = {
    "softmax": Gate(K, "softmax", normalise=True),
    "softmax-of-forced": Gate(K, "softmax_topk", scale=2.5),
    "sigmoid": Gate(K, "sigmoid", normalise=True, scale=1.5),
    "sqrtsoftplus": Gate(K, "sqrtsoftplus"),
    "no-tokens": Gate(K, "sigmoid"),
}
ASKED: Sequence[Sequence[tuple[str, float | None]]] = [
    [],
    [("random", None), ("none", None)],
    [("random", None), ("random", None)],
    [("biased", 0.0)],
    [("biased", None)],
    [("ratio", 2.0), ("ratio", 3.0)],
    [("ratio", 2.0), ("ratio", 2.0)],
    [("hottest", None)],
    [("one_node", None), ("random", None)],
]
DEALT = [(5, 3, 8, 0), (5, 3, 8, 1), (5, 3, 8, 2), (4, 2, 2, 3), (0, 2, 5, 1), (3, 1, 7, 4)]
DIVISIONS = [
    [[0, 1], [2, 3], [4, 5]],
    [[5, 2], [0, 4], [3, 1]],
    [[0, 1, 2], [3, 4, 5]],
    [[0, 1, 2, 3], [4, 5]],
    [[0, 1, 2, 3, 4, 5]],
]
RATIOS = (1.0, 1.5, 2.0, 4.0, 100.0)
ROUTES = ("hot-rank", "hot-rank-and-more", "hot-node", "hot-expert", "cold", "without-tokens", "all-experts")
UNEVEN = ("hot-rank-uneven", "hot-node-uneven", "hot-expert-uneven")


def of_routes(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is a route, what is balanced, and what may be asked for."""
    own = given(values, "free")
    answers = {"legal_T": routes.legal_ids(own["ids_TK"], E)}
    answers["legal-or-padding_T"] = routes.legal_ids(own["ids_TK"], E, padding_T=own["padding_T"].astype(bool))
    found = told("free", answers)
    ids_TK = given(values, "routes")["ids_TK"]
    found |= told("routes", {"groups_used_GT": [routes.groups_used(ids_TK, E, groups) for groups in (1, 2, 4, 8)]})
    dealt = [routes.round_robin(tokens, slots, experts, rank=rank) for tokens, slots, experts, rank in DEALT]
    even = [routes.balanced(limits.loads(ids_TK, size[2])) for ids_TK, size in zip(dealt, DEALT, strict=True)]
    found |= told("dealt", {"balanced_N": even} | {f"ids_TK-{n}": ids_TK for n, ids_TK in enumerate(dealt)})
    loads = given(values, "balance")["loads_NWE"].tolist()
    even_NW = [[routes.balanced(loads_E) for loads_E in ranks] for ranks in loads]
    found |= told("balance", {"balanced_NW": even_NW, "balanced_sum_N": [routes.balanced_sum(r) for r in loads]})
    words = {"legal": 0, "refused": 1, "free": 2}
    return found | told("asked", {"verdict_N": [words[routes.verdict(asked)] for asked in ASKED]})


def of_scores(values: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Forced weights and their gradient, logits handed straight through, and what losses may see."""
    gate, own = GATES[case], given(values, case)
    logits_TE, ids_TK, forced_TE = own["logits_TE"], own["ids_TK"], own["forced_TE"]
    views = routes.loss_views(logits_TE, top_k=K, forced_logits_TE=forced_TE)
    views += routes.loss_views(logits_TE, top_k=K, forced_ids_TK=ids_TK)
    counted = [
        np.array([largest_first(row, list(range(E)), K) for row in view.logits_TE.tolist()]).reshape(-1, K)
        for view in views[:3]
    ]
    assert all(set(ids_TK[t]) == chosen for t, chosen in enumerate(views[3].chosen))
    answers = {
        "undecided_T": routes.undecided_weights(logits_TE, ids_TK),
        "weights_TK": routes.forced_weights(logits_TE, ids_TK, gate),
        "dlogits_TE": routes.forced_weights_backward(logits_TE, ids_TK, gate, own["upstream_TK"]),
        "z_TE": routes.straight_through(logits_TE, forced_TE),
        "dlogits-of-z_TE": own["upstream_TE"],
        "views_VTE": [view.logits_TE for view in views],
        "views_VTK": [*counted, ids_TK],
        "dlogits-of-views_VTE": [own["upstream_TE"]] * 4,
    }
    return told(case, answers)


def marks(hot: Sequence[int], among: int = 3) -> list[bool]:
    """One truth for each block that there may be."""
    return [h in hot for h in range(among)]


def of_hot(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which blocks are hot in every route."""
    found = {}
    for case in (*ROUTES, *UNEVEN):
        own = given(values, case)
        ids = [own[f"ids_TK-{rank}"] for rank in range(2)]
        answers: dict[str, Any] = {"hot_experts_E": marks(forcing_hot.hot_experts(ids, 6), 6)}
        answers["hot_DB"] = [marks(forcing_hot.hot_blocks(ids, blocks)) for blocks in DIVISIONS]
        answers["even_DB"] = [marks(forcing_hot.hot_blocks(ids, blocks, even=True)) for blocks in DIVISIONS]
        equal = [DIVISIONS[n] for n in (0, 1, 2, 4)]
        answers["by-ratio_DAB"] = [[marks(forcing_hot.hot_by_ratio(ids, b, ratio)) for ratio in RATIOS] for b in equal]
        found |= told(case, answers)
    runs = given(values, "forwards")["ids_NFTK"]
    first = [marks(forcing_hot.first_hot_ranks([[ids_TK] for ids_TK in run], DIVISIONS[0])) for run in runs]
    own = given(values, "shares")
    shares = [[own[f"ids_TK-{n}"]] for n in range(6)]
    shares.append([*shares[0], *shares[1]])
    by_share = [[marks(forcing_hot.hot_by_ratio(ids, DIVISIONS[0], ratio)) for ratio in RATIOS] for ids in shares]
    return found | told("forwards", {"first_NB": first}) | told("shares", {"by-ratio_NAB": by_share})


def of_loads(values: Mapping[str, Any]) -> dict[str, Any]:
    """How uneven hot routes and given loads are."""
    loads = given(values, "draws")["loads_VNE"].tolist()
    rises = [
        forcing_hot.imbalance_rises([loads[v] for v in order], blocks)
        for order in ((0, 1, 2), (1, 0), (0, 0), (0, 2, 1), (0, 3))
        for blocks in DIVISIONS
    ]
    answers = {
        "overload_KB": [[forcing_hot.overload(slots, 12, block) for block in (1, 3, 4, 12)] for slots in (1, 2, 6, 12)],
        "mean_overload_VB": [[float(forcing_hot.mean_overload(draws, b)) for b in DIVISIONS] for draws in loads],
        "rises_N": rises,
    }
    return told("draws", answers)


def of_draws(values: Mapping[str, Any]) -> dict[str, Any]:
    """What random and biased forcing may look like."""
    loads = given(values, "random")["loads_NE"].tolist()
    sizes = [(100, 2, 4), (0, 1, 8), (4096, 8, 64), (7, 4, 4)]
    answers: dict[str, Any] = {"margins_N": [forcing_draws.load_margin(*each) for each in sizes]}
    answers["legal_NE"] = [forcing_draws.legal_random_loads(each, top_k) for each in loads for top_k in (1, 4)]
    found = told("random", answers)
    logits = list(given(values, "moments")["logits_NTE"])
    bounds = [(0.0, 4, 8, 2), (-3.0, 4, 64, 8), (3.0, 4, 2, 16), (0.5, 1000, 256, 40)]
    answers = {"moments": [forcing_draws.bias_moment(logits), forcing_draws.bias_moment(logits[:1])]}
    found |= told("moments", answers | {"bounds_N2": [forcing_draws.bias_moment_bounds(*each) for each in bounds]})
    chances = [(2, 2, 4), (15, 4, 4), (0, 1, 3), (3, 2, 8)]
    found |= told("chances", {f"{n}-more-of-{k}-in-{e}": forcing_draws.chance_alike(n, k, e) for n, k, e in chances})
    but_one = ("anew-but-in-one-layer", "kept-but-in-one-layer")
    for case in ("anew", "kept", "once", *but_one, "strayed", "all-experts"):
        ids_LFTK = given(values, f"biased-{case}")["ids_LFTK"]
        answers = {"alike_LF": [[forcing_draws.one_choice([ids_TK]) for ids_TK in row] for row in ids_LFTK]}
        answers["alike_L"] = [forcing_draws.one_choice(list(row)) for row in ids_LFTK]
        found |= told(f"biased-{case}", answers)
    return found


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored route, weight, gradient and judgement."""
        values = stored("forcing")
        answers = of_routes(values) | of_hot(values) | of_loads(values) | of_draws(values)
        for case in GATES:
            answers |= of_scores(values, case)
        assert_twins("forcing", answers)
