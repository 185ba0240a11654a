"""Tokens that ranks of a tp group hold as copies, worked out twice: who is handed them, and what comes back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference import tp_duplicated_tokens as first_copies
from self_tests.chapters.exchange.second import deliveries as second_exchange
from self_tests.chapters.exchange.second.deliveries import Pair
from self_tests.chapters.tp_duplicated_tokens import second as second_copies
from self_tests.oracles.agreement import assert_close
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# World, experts, ep, etp, and the tp groups.
LAYOUTS = [
    (4, 4, 4, 1, [[1, 0], [2, 3]]),  # copies share an exchange group
    (4, 2, 2, 1, [[0, 2], [1, 3]]),  # each copy has a group of its own
    (4, 2, 2, 2, [[0, 1], [3, 2]]),
    (4, 4, 1, 1, [[0, 1, 2, 3]]),  # ep = 1
    (4, 2, 2, 1, [[0], [1], [2], [3]]),
    (4, 2, 2, 1, [[0, 1, 2], [3]]),  # two copies in one group, one in the other
]


def both_wrong(ids: list[Ints], delivered: list[Pair], *lists: list[list[int]]) -> list[tuple[int, int, int]]:
    """Which slots both call wrongly delivered."""
    found = assert_agree(first_copies.wrong_pairs, second_copies.wrong_pairs, ids, delivered, *lists)
    return [tuple(at) for at in found]


class TestTokenCopies:
    @settings(pairs_agree, max_examples=250)
    @given(st.sampled_from(LAYOUTS), st.integers(0, 10**6))
    def test_verdicts_agree(self, layout: tuple[int, int, int, int, list[list[int]]], seed: int) -> None:
        """Both let one copy of a group send, whichever it is, and find what is lost, doubled or misdirected."""
        world, experts, ep, etp, tp_groups = layout
        random = np.random.default_rng(seed)
        placement = second_exchange.contiguous(world, experts, ep, etp)
        held = [list(each) for each in placement.held]
        ids: list[Ints] = [np.zeros((0, 2), dtype=np.int64)] * world
        for group in tp_groups:
            own = random.integers(-1, experts, size=(int(random.integers(0, 3)), 2))
            for rank in group:
                ids[rank] = own
        everything = second_exchange.deliveries(ids, placement)
        lists = [list(each) for each in placement.exchange_groups], held, tp_groups
        copies = [next(group for group in tp_groups if rank in group) for rank in range(world)]
        sender, delivered = {}, []  # type: ignore[var-annotated]
        for pair in everything:
            exchange = next(group for group in lists[0] if pair.source in group)
            senders = [rank for rank in copies[pair.source] if rank in exchange]
            key = (min(copies[pair.source]), pair.token, pair.slot, exchange[0])
            if sender.setdefault(key, int(random.choice(senders))) == pair.source:
                delivered.append(pair)
        assert [] == both_wrong(ids, delivered, *lists)
        for _ in range(int(random.integers(0, 4))):
            if not delivered:
                break
            i = int(random.integers(len(delivered)))
            pair = delivered[i]
            delivered[i] = [
                pair._replace(destination=int(random.integers(world))),
                pair._replace(source=int(random.integers(world))),
                pair._replace(token=pair.token + int(random.choice([-1, 1]))),
                pair._replace(expert=int(random.integers(experts))),
                pair._replace(slot=1 - pair.slot),
            ][random.integers(5)]
            if random.random() < 0.4:
                delivered.append(pair)
            elif random.random() < 0.3:
                delivered.pop(i)
        both_wrong(ids, delivered, *lists)


class TestOutputsOfCopies:
    def test_of_eight_bits_and_of_no_dimension(self) -> None:
        """PyTorch's small types compare by bytes as well."""
        one = torch.tensor([1.0, math.nan]).bfloat16()
        assert first_copies.same_bytes([one, one.clone()])
        assert not first_copies.same_bytes([one, torch.tensor([1.0078125, math.nan]).bfloat16()])
        assert first_copies.same_bytes([torch.tensor(2.0), torch.tensor(2.0)])
        assert not first_copies.same_bytes([torch.tensor(2.0), torch.tensor(3.0)])

    @pairs_agree
    @given(st.integers(1, 4), st.integers(0, 10**6), st.sampled_from(["complete", "parts"]))
    def test_gathered_gradients_agree(self, copies: int, seed: int, declared: Any) -> None:
        """Both hand on what each copy has, or the one sum, in float64."""
        made = [np.random.default_rng(seed + i).normal(size=(2, 3)).astype(np.float32) for i in range(copies)]
        expected = second_copies.gathered(made, declared)  # type: ignore[arg-type]
        actual = first_copies.gathered([torch.from_numpy(each) for each in made], declared)
        assert (copies if declared == "complete" else 1) == len(expected)
        for one, other in zip(expected, actual, strict=True):
            assert_close(one, other, addend=5.0)


def pairs(*rows_of: tuple[int, int, int]) -> list[Pair]:
    """Rows of token 0, slot 0, as (source, destination, expert)."""
    return [Pair(source, 0, 0, destination, expert) for source, destination, expert in rows_of]


# Ranks 0 and 1 hold one token that goes to expert 1 and to nobody.
IDS, TOKEN, WRONG, TP = np.array([[1, 0]]), [np.array([[1, -1]])] * 2, [(0, 0, 0)], [[1, 0]]
TOGETHER, APART = ([[0, 1]], [[0], [1]]), ([[0], [1]], [[0, 1], [0, 1]])  # exchange groups, and who holds what
SHARDS = [[0, 1]], [[1], [1]]
SAME, ZEROS, NANS, RAMP = np.array([[1, -1]]), np.zeros((2, 3)), np.array([math.nan, 1.0]), np.arange(6.0)

test_by_hand = by_hand(
    *rows(first_copies.wrong_pairs, second_copies.wrong_pairs,
        *(
            (name, (TOKEN, pairs(*rows_of), *lists, TP), [] if legal else WRONG)
            for name, lists, rows_of, legal in [
                ("copy 0 sends", TOGETHER, [(0, 1, 1)], True), ("copy 1 sends", TOGETHER, [(1, 1, 1)], True),
                ("both copies send", TOGETHER, [(0, 1, 1), (1, 1, 1)], False),
                ("a row twice", TOGETHER, [(0, 1, 1)] * 2, False), ("no row", TOGETHER, [], False),
                ("a row to rank 0", TOGETHER, [(0, 0, 1)], False), ("a row to expert 0", TOGETHER, [(0, 1, 0)], False),
                ("a row to either rank", TOGETHER, [(0, 1, 1), (0, 0, 1)], False),
                ("in one group of two", APART, [(0, 0, 1)], True), ("in the other group", APART, [(1, 1, 1)], True),
                ("in both groups", APART, [(0, 0, 1), (1, 1, 1)], True),
                ("twice in one of both", APART, [(0, 0, 1)] * 2 + [(1, 1, 1)], False),
                ("across groups", APART, [(0, 1, 1)], False), ("two shards", SHARDS, [(0, 0, 1), (0, 1, 1)], True),
                ("two shards, of which each copy serves one", SHARDS, [(0, 0, 1), (1, 1, 1)], True),
                ("one of two shards", SHARDS, [(0, 0, 1)], False),
                ("only one group has the expert", ([[0], [1]], [[0, 1], [0]]), [(0, 0, 1)], True),
                ("no group has the expert", ([[0], [1]], [[0], [0]]), [], False),
            ]
        ),
        *(  # told by the lowest rank of the copies
        (f"a row of token and slot {at}, of which there is none",
         (TOKEN, [*pairs((1, 1, 1)), Pair(1, *at, 1, 1)], *TOGETHER, TP), [(0, *at)], )
         for at in [(0, 1), (0, 2), (0, -1), (1, 0), (-1, 0)]),
        *(
            (name, ([IDS, other], pairs((source, 1, 1)), groups, [[0], [1]], tp_groups), REFUSED)
            for name, other, source, groups, tp_groups in [
                ("copies that differ", IDS[:, ::-1].copy(), 0, [[0, 1]], [[0, 1]]),
                ("a row from rank 2", IDS, 2, [[0, 1]], [[0, 1]]), ("a row from rank -1", IDS, -1, [[0, 1]], [[0, 1]]),
                ("a rank in no tp group", IDS, 0, [[0, 1]], [[0]]),
                ("a rank in two tp groups", IDS, 0, [[0, 1]], [[0, 1], [1]]),
                ("a rank in no exchange group", IDS, 0, [[0]], [[0, 1]]),
                ("a rank in two exchange groups", IDS, 0, [[0, 1], [0]], [[0, 1]]),
            ]
        ),
    ),
    # In ids, order of slots and shape, within each group alone; the last rank may be the one that differs.
    *rows(first_copies.copies_agree, second_copies.copies_agree,
        *(
            (f"{name} on rank {r} of groups {groups}", ([SAME] * r + [np.array(other)], groups),
             agree or groups == [[0], [1]])
            for name, other, agree in [
                ("the same", [[1, -1]], True), ("other slots", [[-1, 1]], False), ("fewer slots", [[1]], False),
                ("more tokens", [[1, -1], [1, -1]], False), ("another expert", [[1, 0]], False),
            ]
            for r, groups in [(1, [[0, 1]]), (2, [[0, 1, 2]]), (1, [[1, 0]]), (1, [[0], [1]]), (3, [[0, 1], [2, 3]])]
        ),
    ),
    # Type, shape and bytes, in the order of elements, not of memory.
    *rows(first_copies.same_bytes, second_copies.same_bytes,
        ("one copy", ([ZEROS],), True),
        ("equal copies", ([ZEROS, ZEROS.copy()],), True),
        ("the last bit of the last copy", ([ZEROS, ZEROS, ZEROS + 2.0**-1074],), False),
        ("the sign of zero", ([ZEROS, -ZEROS],), False),
        ("another shape", ([ZEROS, ZEROS.reshape(3, 2)],), False),
        ("a narrower type", ([ZEROS, ZEROS.astype(np.float32)],), False),
        ("the same bytes, read as another type", ([ZEROS, ZEROS.astype(np.int64)],), False),
        ("NaN", ([NANS, NANS.copy()],), True),
        ("another NaN", ([NANS, -NANS],), False),
        ("nothing", ([ZEROS[:0], ZEROS[:0].copy()],), True),
        ("another order in memory", ([RAMP.reshape(2, 3).T, RAMP.reshape(2, 3).T.copy()],), True),
        ("another order of elements", ([RAMP.reshape(2, 3).T, RAMP.reshape(3, 2)],), False),
        ("no copy", ([],), REFUSED),
    ),
    *rows(first_copies.gathered, second_copies.gathered,
        *(
            (f"{len(copies)} copies, {declared}", (copies, declared), REFUSED)
            for copies, declared in [
                ([], "parts"), ([], "complete"), ([ZEROS], "whole"), ([ZEROS, ZEROS[:1]], "parts"),
                ([ZEROS, ZEROS[:1]], "complete"),
            ]
        ),
    ),
)  # fmt: skip
