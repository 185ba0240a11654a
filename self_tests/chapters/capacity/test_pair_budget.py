"""Receive budgets, worked out twice: reference.capacity.receive_budget, and the longhand row by row."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.capacity import receive_budget as first
from self_tests.chapters.capacity.second import limits as second_capacity
from self_tests.chapters.capacity.second import receive_budget as second
from self_tests.chapters.exchange.second import deliveries as second_exchange
from self_tests.chapters.exchange.second.deliveries import Pair
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class TestWorstCase:
    @settings(pairs_agree, max_examples=200)
    @given(st.data())
    def test_buffers_agree(self, data: st.DataObject) -> None:
        """Both find the same worst case, for slots or tokens, own or equal sizes, and whole alignments."""
        tokens = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
        per_token = data.draw(st.booleans())
        options = {
            "alignment": 1 if per_token else data.draw(st.integers(1, 5)),
            "equal_sizes": data.draw(st.booleans()),
            "per_token": per_token,
        }
        top_k, held = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
        assert_agree(first.worst_case_rows, second.worst_case_rows, tokens, top_k, held, **options)

    @pytest.mark.parametrize(
        ("tokens", "top_k", "held", "experts"), [(3, 2, 2, 4), (2, 3, 2, 4), (3, 1, 2, 3), (2, 2, 3, 4)]
    )
    def test_attained_and_never_exceeded(self, tokens: int, top_k: int, held: int, experts: int) -> None:
        """Of all routings of a few tokens the worst fills the buffer exactly, and with alignment none overflows it."""
        chosen = list(combinations(range(experts), top_k))
        routings = [np.array(routing) for routing in product(chosen, repeat=tokens)]
        rows = [second_capacity.loads(ids_TK, experts)[:held] for ids_TK in routings]
        assert max(map(sum, rows)) == first.worst_case_rows([tokens], top_k, held)
        for p in (2, 3):
            buffer = first.worst_case_rows([tokens], top_k, held, alignment=p)
            assert not any(first.over_budget(rows_N, buffer, alignment=p) for rows_N in rows)


class TestBudgets:
    @settings(pairs_agree, max_examples=200)
    @given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 5), st.integers(-2, 2))
    def test_flags_agree(self, rows_N: list[int], alignment: int, beside: int) -> None:
        """Both raise the flag for the same rows, at the budget exactly and beside it."""
        wanted = sum(math.ceil(rows / alignment) * alignment for rows in rows_N)
        budget = max(0, wanted + beside)
        over = assert_agree(first.over_budget, second.over_budget, rows_N, budget, alignment=alignment)
        assert (wanted > budget) is over

    @settings(pairs_agree, max_examples=200)
    @given(st.data())
    def test_deliveries_agree(self, data: st.DataObject) -> None:
        """Both judge every rank alike, with shards of experts, tight budgets, and rows lost, doubled or invented."""
        ep, etp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]))
        random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
        placement = second_exchange.contiguous(ep * etp, 2 * ep, ep, etp)
        sizes = [int(random.integers(0, 4)) for _ in range(ep * etp)]
        ids = [np.array([random.permutation(2 * ep)[:2] for _ in range(T)], dtype=int).reshape(T, 2) for T in sizes]
        wanted = second_exchange.deliveries(ids, placement)
        alignment = data.draw(st.sampled_from([1, 1, 3]))
        rows = [
            [len(second_exchange.rows_for(rank, expert, ids, placement)) for expert in held]
            for rank, held in enumerate(placement.held)
        ]
        aligned = [sum(math.ceil(n / alignment) * alignment for n in row) for row in rows]
        budgets = [max(0, rows + data.draw(st.sampled_from([-3, -1, -1, 0, 0, 2]))) for rows in aligned]
        lost = (
            {wanted[i][:3] for i in random.integers(len(wanted), size=data.draw(st.integers(0, 4)))}
            if wanted
            else set()
        )
        delivered = [pair for pair in wanted if pair[:3] not in lost]
        change = data.draw(st.sampled_from(["nothing", "nothing", "one less", "twice", "wrong rank", "wrong expert"]))
        if delivered and change != "nothing":
            pair = delivered[random.integers(len(delivered))]
            if change in ("one less", "wrong expert"):
                delivered.remove(pair)
            elsewhere = (pair.destination + 1) % (ep * etp)
            made = {
                "twice": [pair],
                "wrong rank": [pair._replace(destination=elsewhere)],
                "wrong expert": [pair._replace(expert=(pair.expert + 1) % (2 * ep))],
            }
            delivered += made.get(change, [])
        legal = assert_agree(
            first.legal_deliveries,
            second.legal_deliveries,
            delivered,
            wanted,
            budgets,
            alignment=alignment,
        )
        assert ep * etp == len(legal)
        needless = assert_agree(
            first.fitting_slots, second.fitting_slots, delivered, wanted, budgets, alignment=alignment
        )
        assert not {tuple(slot) for slot in needless} & {pair[:3] for pair in delivered if pair in wanted}

    @pairs_agree
    @given(st.integers(0, 10**6))
    def test_delivered_slots_agree(self, seed: int) -> None:
        """Both mark the same slots of every source rank, shards once."""
        random = np.random.default_rng(seed)
        placement = second_exchange.contiguous(4, 6, 2, 2)
        ids = [np.array([random.permutation(6)[:3] for _ in range(T)], dtype=int).reshape(T, 3) for T in (3, 0, 1, 2)]
        pairs = [pair for pair in second_exchange.deliveries(ids, placement) if random.random() < 0.5]
        found = assert_agree(first.delivered_slots, second.delivered_slots, pairs, ids)
        reached = {
            (r, t, k) for r, (_, rows) in enumerate(found) for t, row in enumerate(rows) for k in range(3) if row[k]
        }
        assert {pair[:3] for pair in pairs} == reached


IDS = np.array([[1, -1], [0, 1]])
PAIR = Pair(0, 1, 0, 0, 0)


# Rank 0 is wanted by three rows, two for expert 0 and one for expert 1; rank 1 by one row for expert 2.
WANTED = [Pair(0, 0, 0, 0, 0), Pair(0, 1, 0, 0, 0), Pair(1, 0, 0, 0, 1), Pair(1, 0, 1, 1, 2)]
# Two tokens for one expert that is cut over ranks 0 and 1.
SHARDS = [Pair(0, token, 0, rank, 0) for token in range(2) for rank in range(2)]


def got(rows_of: list[int], budgets: list[int], alignment: int = 1, wanted: list[Pair] = WANTED) -> tuple[Any, ...]:
    """Some of the wanted rows, and what each rank has room for."""
    return ([wanted[i] for i in rows_of], wanted, budgets), {"alignment": alignment} if alignment > 1 else {}


def left(*rows_of: int, wanted: list[Pair] = WANTED) -> list[tuple[int, int, int]]:
    """Source, token and slot of these."""
    return [wanted[i][:3] for i in rows_of]


test_by_hand = by_hand(
    # T_r min(K, N) for every source rank, and at most p - 1 more for every expert that has a row.
    *rows(first.worst_case_rows, second.worst_case_rows,
        ("fewer experts than slots", ([2, 5], 3, 2), 14),
        ("as many rows as tokens", ([2, 5], 3, 2), {"per_token": True}, 7),
        ("as many rows as the largest rank's tokens", ([2, 5], 3, 2), {"per_token": True, "equal_sizes": True}, 10),
        ("two rows: two of four experts are filled up", ([1, 0], 2, 4), {"alignment": 8}, 16),
        ("no tokens", ([0, 0], 3, 4), {"alignment": 8, "equal_sizes": True}, 0),
    ),
    *rows(first.legal_deliveries, second.legal_deliveries,
        ("all rows", *got([0, 1, 2, 3], [3, 1]), [True, True]),
        ("dropped with room for all", *got([0, 1, 3], [3, 1]), [False, True]),
        ("one too many is dropped", *got([0, 1, 3], [2, 1]), [True, True]),
        ("more than need be, once over", *got([0, 3], [2, 1]), [True, True]),
        ("one beyond the budget", *got([0, 1, 2, 3], [2, 1]), [False, True]),
        ("experts 0 and 1 want four places of two", *got([0, 1, 3], [3, 1], 2), [True, True]),
        ("filled up they do not fit, but the rows do", *got([0, 1, 2, 3], [3, 1], 2), [True, True]),
        ("four places of two fit", *got([0, 1, 3], [4, 2], 2), [False, True]),
        ("rank 1 drops with room", *got([0, 1, 2], [3, 1]), [True, False]),
        ("a row twice", *got([0, 0, 1, 2, 3], [9, 1]), [False, True]),
        ("no room at all", *got([], [0, 0]), [True, True]),
        ("both shards of both tokens", *got([0, 1, 2, 3], [2, 2], wanted=SHARDS), [True, True]),
        ("rank 0 is full: its slot goes on neither shard", *got([0, 1], [1, 2], wanted=SHARDS), [True, True]),
        ("half a slot", *got([0, 1, 3], [1, 2], wanted=SHARDS), [False, False]),
        ("nobody is full", *got([0, 1], [2, 2], wanted=SHARDS), [False, False]),
        ("a stray row is its receiver's fault", ([PAIR, PAIR._replace(destination=1)], [PAIR], [5, 5]), [True, False]),
        ("one row fits a budget of one: nothing is filled up unasked", ([], [PAIR], [1, 0]), [False, True]),
    ),
    *rows(first.fitting_slots, second.fitting_slots,
        ("each would fit alone", *got([], [2, 1]), left(0, 1, 2, 3)),
        ("each would fit beside the first", *got([0], [2, 1]), left(1, 2, 3)),
        ("no room is left", *got([0, 2, 3], [2, 1]), []),
        ("room on rank 0 alone", *got([0, 1], [3, 0]), left(2)),
        ("expert 0 has two places, and expert 1 would begin two more", *got([0, 1], [3, 0], 2), []),
        ("the second place of expert 0 is still free", *got([0], [2, 2], 2), left(1, 3)),
        ("room for none", *got([], [0, 0]), []),
        ("room for both shards", *got([0, 1], [2, 2], wanted=SHARDS), left(2, wanted=SHARDS)),
        ("rank 1 alone has room", *got([0, 1], [1, 2], wanted=SHARDS), []),
        ("half a slot is not dropped", *got([0, 1, 2], [2, 2], wanted=SHARDS), []),
    ),
    *rows(first.worst_case_rows, second.worst_case_rows,
        *(
            (f"buffer for {question} {options}", question, options, REFUSED)
            for question, options in [
                (([], 2, 2), {}), (([3, -1], 2, 2), {}), (([3], 0, 2), {}), (([3], 2, -1), {}),
                (([3], 2, 2), {"alignment": 0}), (([3], 2, 2), {"alignment": 2, "per_token": True}),
            ]
        ),
    ),
    *rows(first.over_budget, second.over_budget,
        ("one row fits a budget of one", ([1], 1), False),
        ("a budget of -1", ([1], -1), REFUSED),
        ("rows -1", ([1, -1], 5), REFUSED),
        ("alignment 0", ([1], 5), {"alignment": 0}, REFUSED),
    ),
    *rows(first.legal_deliveries, second.legal_deliveries,
        ("wanted of nobody", ([], [PAIR], []), REFUSED),
        ("given to nobody", ([PAIR], [], []), REFUSED),
    ),
    *rows(first.fitting_slots, second.fitting_slots, ("room for nobody", ([], [PAIR], []), REFUSED)),
    *rows(first.delivered_slots, second.delivered_slots,
        *(
            (f"a slot of {change}", ([PAIR._replace(**change)], [IDS]), REFUSED)
            for change in [
                {"source": 1}, {"source": -1}, {"token": 2}, {"token": -1}, {"slot": 2}, {"slot": -1}, {"expert": 1},
            ]
        ),
        ("an empty slot delivered", ([Pair(0, 0, 1, 0, -1)], [IDS]), REFUSED),
    ),
)  # fmt: skip
