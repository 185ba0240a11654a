"""Dispatch layouts, fixed places and static budgets, worked out twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.capacity import static_budget as first_budget
from moe_conformance.reference.token_exchange import dispatch_layout as first_layout
from moe_conformance.reference.token_exchange import fixed_places as first
from self_tests.chapters.token_exchange.second import dispatch_layout as second_layout
from self_tests.chapters.token_exchange.second import fixed_places as second
from self_tests.chapters.token_exchange.second.fixed_places import Places
from self_tests.oracles.asked_twice import assert_agree, plain
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Ints = NDArray[np.int64]


def first_dispatch(ids_TK: Ints, owner_E: list[int], node_of_W: list[int]) -> list[Any]:
    """The first oracle's layout, its fields in order."""
    made = first_layout.dispatch_layout(torch.as_tensor(ids_TK), owner_E, node_of_W)
    assert torch.bool == made.in_rank_TW.dtype
    return [plain(each) for each in (made.in_rank_TW, made.per_rank_W, made.per_node_D, made.per_expert_E)]


class TestDispatchLayout:
    @settings(pairs_agree, max_examples=150)
    @given(st.integers(0, 10**6))
    def test_layouts_agree(self, seed: int) -> None:
        """Both send every token to the same ranks and nodes; experts anywhere, idle or chosen twice, empty slots."""
        random = np.random.default_rng(seed)
        W, E, T, K = (int(random.integers(low, high)) for low, high in [(1, 6), (1, 7), (0, 5), (0, 4)])
        nodes = int(random.integers(1, W + 1))
        node_of_W = [*range(nodes), *random.integers(0, nodes, size=W - nodes).tolist()]
        random.shuffle(node_of_W)
        owner_E = random.integers(0, W, size=E).tolist()
        ids_TK = random.integers(-1, E, size=(T, K))
        expected = second_layout.dispatch_layout(ids_TK, owner_E, node_of_W)
        assert [plain(each) for each in expected] == first_dispatch(ids_TK, owner_E, node_of_W)


def in_first(places: Places) -> first.Places:
    """The same places in the first oracle's words."""
    return first.Places(*(torch.from_numpy(np.array(each, dtype=np.int64)) for each in places))


def drawn(seed: int) -> tuple[list[Ints], list[int]]:
    """Ids of one to three sources over six experts, often the same one; some experts are here."""
    random = np.random.default_rng(seed)
    ids = [random.integers(-1, 6, size=(int(T), 3)) for T in random.integers(0, 4, size=random.integers(1, 4))]
    return ids, [int(expert) for expert in random.permutation(6)[: random.integers(0, 5)]]


def both_legal(places: Places, ids: list[Ints], experts: list[int], *, runs: bool) -> list[bool]:
    """What both say of these places."""
    expected = second.legal_places(places, ids, experts, runs=runs)
    actual = first.legal_places(in_first(places), [torch.from_numpy(each) for each in ids], experts, runs=runs)
    assert expected == list(actual)
    return expected


class TestFixedPlaces:
    @settings(pairs_agree, max_examples=150)
    @given(st.integers(0, 10**6), st.integers(0, 3))
    def test_places_filled_in_order_are_legal(self, seed: int, spare: int) -> None:
        """Places that are filled in order, with no more room than is needed, or some, both call legal."""
        ids, experts = drawn(seed)
        most = max((sum(int((each == expert).sum()) for each in ids) for expert in experts), default=0)
        made = second.fixed_places(ids, experts, most + spare)
        for runs in (True, False):
            assert [True] * len(experts) == both_legal(made, ids, experts, runs=runs)

    @settings(pairs_agree, max_examples=300)
    @given(st.integers(0, 10**6), st.booleans())
    def test_verdicts_agree(self, seed: int, runs: bool) -> None:
        """Both judge places alike in which rows, counts and runs were moved or changed."""
        random = np.random.default_rng(seed)
        ids, experts = drawn(seed)
        made = second.fixed_places(ids, experts, 9 * 3)
        for n in range(len(experts)):
            change, count, s = random.choice(8), made.counts_N[n], int(random.integers(0, len(ids)))
            if change == 0:  # any order
                order = random.permutation(count)
                made.source_NC[n, :count], made.token_NC[n, :count] = made.source_NC[n, order], made.token_NC[n, order]
            elif change == 1 and count > 1:  # one row lost, another twice
                i, j = random.integers(0, count, size=2)
                made.source_NC[n, i], made.token_NC[n, i] = made.source_NC[n, j], made.token_NC[n, j]
            elif change == 2:
                made.counts_N[n] += int(random.choice([-1, 1]))
            elif change == 3:
                made.begin_NS[n, s] += random.choice([-1, 1])
            elif change == 4:
                made.run_NS[n, s] += random.choice([-1, 1])
            elif change == 5:  # sources in another order: legal, if the runs go along
                back = made.begin_NS[n].copy()
                rows = [(made.source_NC[n, c], made.token_NC[n, c]) for c in range(count)]
                rows.sort(key=lambda row: -row[0])
                for c, (source, token) in enumerate(rows):
                    made.source_NC[n, c], made.token_NC[n, c] = source, token
                for source in range(len(ids)):
                    back[source] = sum(1 for other, _ in rows if other > source)
                made.begin_NS[n] = back
            elif change == 6:  # unused places and empty runs decide nothing
                made.source_NC[n, count:], made.token_NC[n, count:] = s, 0
                made.begin_NS[n][made.run_NS[n] == 0] = -7
        both_legal(made, ids, experts, runs=runs)

    def test_an_idle_expert_and_one_in_two_slots(self) -> None:
        """Expert 5 has no rows and 3 two of one token; each has its own verdict."""
        ids = [np.array([[3, 3], [-1, 1]])]
        made = second.fixed_places(ids, [5, 3], 2)
        assert ([0, 2], [[-1, -1], [0, 0]]) == (made.counts_N, made.token_NC.tolist())
        assert [True, True] == both_legal(made, ids, [5, 3], runs=True)
        made.token_NC[1, 1] = 1
        assert [True, False] == both_legal(made, ids, [5, 3], runs=True)
        made.counts_N[0] = 1
        assert [False, False] == both_legal(made, ids, [5, 3], runs=False)


def budget(tokens: list[int], top_k: int, **options: Any) -> int:
    """What both say is the least budget."""
    return int(assert_agree(first_budget.least_budget, second.least_budget, tokens, top_k, **options))


class TestBudgets:
    @settings(pairs_agree, max_examples=200)
    @given(st.data())
    def test_budgets_agree(self, data: st.DataObject) -> None:
        """Both find the same least budget, for factors that float32 cannot hold, shards and padding multiples."""
        ep, etp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        tokens = data.draw(st.lists(st.integers(0, 40), min_size=ep * etp, max_size=ep * etp))
        factor = data.draw(st.sampled_from([0.0, 0.1, 1.0, 1.1, 1.25, 4 / 3, 1.5, float(np.float32(1.1)), 7.0]))
        options = {"factor": factor, "ep": ep, "etp": etp, "held": data.draw(st.integers(0, 5))}
        budget(tokens, data.draw(st.integers(1, 4)), multiple=data.draw(st.integers(1, 5)), **options)


IDS = [np.array([[2], [2]]), np.array([[2]])]  # expert 2 gets tokens 0 and 1 of source 0, and token 0 of source 1


def with_runs(legal: Callable[..., Any]) -> Callable[..., list[bool]]:
    """Whether places of expert 2 are legal without runs, and with them."""

    def verdicts(sources: Any, tokens: Any, count: int, begins: Any, lengths: Any) -> list[bool]:
        made = Places(np.array([sources]), np.array([tokens]), [count], np.array([begins]), np.array([lengths]))
        return [legal(made, runs)[0] for runs in (False, True)]

    return verdicts


def first_legal(made: Places, runs: bool) -> Any:
    """The first oracle's verdict."""
    return first.legal_places(in_first(made), [torch.from_numpy(each) for each in IDS], [2], runs=runs)


IN_ORDER, TOKENS, HALF = [0, 0, 1, 9], [0, 1, 0, 9], {"ep": 2, "held": 4}
ONE, FINE = {"ep": 1, "held": 1}, 2.0**-22

test_by_hand = by_hand(
    *rows(first_dispatch, lambda *question: [plain(each) for each in second_layout.dispatch_layout(*question)],
        *(
            (f"id {expert}, owners {owners}, nodes {nodes}", (np.array([[expert]]), owners, nodes), REFUSED)
            for expert, owners, nodes in [
                (3, [0, 1, 1], [0, 0]), (-2, [0, 1, 1], [0, 0]), (0, [0, 2, 1], [0, 0]), (0, [0, -1, 1], [0, 0]),
                (0, [0, 1, 1], [0, 2]), (0, [0, 1, 1], [1, 1]), (0, [0, 1, 1], [-1, 0]),
            ]
        ),
    ),
    *rows(with_runs(first_legal), with_runs(lambda made, runs: second.legal_places(made, IDS, [2], runs=runs)),
        ("in order", (IN_ORDER, TOKENS, 3, [0, 2], [2, 1]), [True, True]),
        ("tokens of a source in any order", (IN_ORDER, [1, 0, 0, 9], 3, [0, 2], [2, 1]), [True, True]),
        ("sources in any order", ([1, 0, 0, 9], TOKENS, 3, [1, 0], [2, 1]), [True, True]),
        ("a source in two runs", ([0, 1, 0, 9], [0, 0, 1, 9], 3, [0, 1], [2, 1]), [True, False]),
        ("runs swapped", (IN_ORDER, TOKENS, 3, [2, 0], [1, 2]), [True, False]),
        ("both runs at 0", (IN_ORDER, TOKENS, 3, [0, 0], [2, 1]), [True, False]),
        ("a run that begins late", (IN_ORDER, TOKENS, 3, [1, 2], [2, 1]), [True, False]),
        ("a run too short", (IN_ORDER, TOKENS, 3, [0, 2], [1, 1]), [True, False]),
        ("a run too long", (IN_ORDER, TOKENS, 3, [0, 2], [2, 2]), [True, False]),
        ("a copy beyond the count", ([0, 0, 1, 1], [0, 1, 0, 0], 3, [0, 3], [2, 1]), [True, False]),
        ("a run before the start", (IN_ORDER, TOKENS, 3, [0, -2], [2, 1]), [True, False]),
        ("a row too many", (IN_ORDER, TOKENS, 4, [0, 2], [2, 1]), [False, False]),
        ("a row too few", (IN_ORDER, TOKENS, 2, [0, 2], [2, 0]), [False, False]),
        ("a token twice", (IN_ORDER, [0, 0, 0, 9], 3, [0, 2], [2, 1]), [False, False]),
        ("a row of another source", ([0, 1, 1, 9], TOKENS, 3, [0, 1], [1, 2]), [False, False]),
        ("a place left out", ([0, 0, 9, 1], [0, 1, 9, 0], 3, [0, 3], [2, 1]), [False, False]),
        ("places that are not there", ([0, 0], [0, 1], 3, [0, 2], [2, 1]), [False, False]),
        ("a count of -1", (IN_ORDER, TOKENS, -1, [0, 2], [2, 1]), [False, False]),
    ),
    # Pairs per rank times the factor, rounded down once, and what filling up may take.
    *rows(first_budget.least_budget, second.least_budget,
        ("everything on one ep rank", ([5, 2], 3), {"factor": 2.0, **HALF}, 21),
        ("33 pairs, W / etp = 2", ([5, 2, 3, 1], 3), {"factor": 2.0, "etp": 2, **HALF}, 33),
        ("1.1 in float32", ([10], 1), {"factor": float(np.float32(1.1)), **ONE}, 11),
        # 2^22 / 3 is (2^22 - 1) / 3 and a third, and 2^-22 of it is a third.
        ("2^22 pairs over 3 ranks", ([2**22, 0, 0], 1), {"factor": 1.0, "ep": 3, "held": 1}, (2**22 - 1) // 3),
        ("no pair", ([0, 0], 3), {"factor": 2.0, "multiple": 8, **HALF}, 0),
        ("a factor of 0", ([5, 2], 3), {"factor": 0.0, "multiple": 2, **HALF}, 4),
        *(
            (f"{T} tokens times {factor!r}", ([T], 1), {"factor": factor, **ONE}, least)
            for T, factor, least in [
                (1, 1 + FINE, 1), (1, 2 - 2.02 * FINE, 1), (1, 3 - FINE, 3), (1, 0.5, 0), (1, 1.5, 1),
                (2**22, 1 + 0.25 * FINE, 2**22), (2**22, 1 + 0.75 * FINE, 2**22 + 1),
            ]
        ),
        *(
            (f"budget of {tokens}, K = {K}, {change}", (tokens, K), {"factor": 1.5, **HALF, **change}, REFUSED)  # type: ignore[dict-item]
            for tokens, K, change in [
                ([5], 3, {}), ([5, 2, 1], 3, {}), ([5, -1], 3, {}), ([5, 2], 0, {}), ([5, 2], 3, {"held": -1}),
                ([5, 2], 3, {"multiple": 0}), ([5, 2], 3, {"factor": -0.5}), ([5, 2], 3, {"factor": math.inf}),
                ([5, 2], 3, {"factor": math.nan}), ([0, 0], 3, {"factor": math.nan}), ([], 3, {"ep": 0}),
                ([5, 2], 3, {"ep": -2, "etp": -1}),
            ]
        ),
    ),
)  # fmt: skip
