"""Tokens that ranks of a tp group hold as copies, worked out twice: who is handed them, and what comes back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference import tp_duplicated_tokens as first_copies
from self_tests.chapters.exchange.second import deliveries as second_exchange
from self_tests.chapters.exchange.second.deliveries import Pair
from self_tests.chapters.tp_duplicated_tokens import second as second_copies
from self_tests.oracles.agreement import assert_close
from self_tests.oracles.asked_twice import assert_agree, assert_refused

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
        sender, delivered = {}, []
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

    # Ranks 0 and 1 hold one token that goes to expert 1 and to nobody; experts 0 and 1 are on both ranks' groups.
    IDS = (np.array([[1, -1]]),) * 2

    @pytest.mark.parametrize(
        ("groups", "held", "rows", "legal"),
        [
            ([[0, 1]], [[0], [1]], [(0, 1, 1)], True),
            ([[0, 1]], [[0], [1]], [(1, 1, 1)], True),  # whichever copy sends
            ([[0, 1]], [[0], [1]], [(0, 1, 1), (1, 1, 1)], False),  # both do
            ([[0, 1]], [[0], [1]], [(0, 1, 1)] * 2, False),
            ([[0, 1]], [[0], [1]], [], False),
            ([[0, 1]], [[0], [1]], [(0, 0, 1)], False),
            ([[0, 1]], [[0], [1]], [(0, 1, 0)], False),
            ([[0, 1]], [[0], [1]], [(0, 1, 1), (0, 0, 1)], False),
            ([[0], [1]], [[0, 1], [0, 1]], [(0, 0, 1)], True),  # in one group of two
            ([[0], [1]], [[0, 1], [0, 1]], [(1, 1, 1)], True),
            ([[0], [1]], [[0, 1], [0, 1]], [(0, 0, 1), (1, 1, 1)], True),  # in both
            ([[0], [1]], [[0, 1], [0, 1]], [(0, 0, 1)] * 2 + [(1, 1, 1)], False),
            ([[0], [1]], [[0, 1], [0, 1]], [(0, 1, 1)], False),  # across
            ([[0, 1]], [[1], [1]], [(0, 0, 1), (0, 1, 1)], True),  # two shards
            ([[0, 1]], [[1], [1]], [(0, 0, 1), (1, 1, 1)], True),  # of which each copy serves one
            ([[0, 1]], [[1], [1]], [(0, 0, 1)], False),
            ([[0], [1]], [[0, 1], [0]], [(0, 0, 1)], True),  # only one group has the expert
            ([[0], [1]], [[0], [0]], [], False),
        ],
    )
    def test_by_hand(
        self, groups: list[list[int]], held: list[list[int]], rows: list[tuple[int, int, int]], legal: bool
    ) -> None:
        """One slot of one token, on two ranks; rows as (source, destination, expert)."""
        delivered = [Pair(source, 0, 0, destination, expert) for source, destination, expert in rows]
        found = both_wrong(list(self.IDS), delivered, groups, held, [[1, 0]])
        assert ([] if legal else [(0, 0, 0)]) == found

    def test_rows_of_nothing(self) -> None:
        """An empty slot, a slot and a token that are not there; told by the lowest rank of the copies."""
        right = Pair(1, 0, 0, 1, 1)
        for at in [(0, 1), (0, 2), (0, -1), (1, 0), (-1, 0)]:
            wrong = Pair(1, *at, 1, 1)
            found = both_wrong(list(self.IDS), [right, wrong], [[0, 1]], [[0], [1]], [[1, 0]])
            assert [(0, *at)] == found

    @pytest.mark.parametrize(
        ("ids", "source", "groups", "tp_groups"),
        [
            ([[[1, 0]], [[0, 1]]], 0, [[0, 1]], [[0, 1]]),
            ([[[1, 0]], [[1, 0]]], 2, [[0, 1]], [[0, 1]]),
            ([[[1, 0]], [[1, 0]]], -1, [[0, 1]], [[0, 1]]),
            ([[[1, 0]], [[1, 0]]], 0, [[0, 1]], [[0]]),
            ([[[1, 0]], [[1, 0]]], 0, [[0, 1]], [[0, 1], [1]]),
            ([[[1, 0]], [[1, 0]]], 0, [[0]], [[0, 1]]),
            ([[[1, 0]], [[1, 0]]], 0, [[0, 1], [0]], [[0, 1]]),
        ],
    )
    def test_refused(
        self, ids: list[list[list[int]]], source: int, groups: list[list[int]], tp_groups: list[list[int]]
    ) -> None:
        """Copies that differ, rows from nowhere, ranks in no group or in two."""
        question = [np.array(each) for each in ids], [Pair(source, 0, 0, 1, 1)], groups, [[0], [1]], tp_groups
        assert_refused(first_copies.wrong_pairs, second_copies.wrong_pairs, *question)

    @pytest.mark.parametrize(
        ("others", "expected"),
        [
            ([[1, -1]], True),
            ([[-1, 1]], False),
            ([[1]], False),
            ([[1, -1], [1, -1]], False),
            ([[1, 0]], False),
        ],
    )
    def test_copies_agree(self, others: list[list[int]], expected: bool) -> None:
        """In ids, order of slots and shape, within each group alone; the last rank may be the one that differs."""
        same, other = np.array([[1, -1]]), np.array(others)
        for ids, groups in [([same, other], [[0, 1]]), ([same, same, other], [[0, 1, 2]]), ([same, other], [[1, 0]])]:
            assert expected is assert_agree(first_copies.copies_agree, second_copies.copies_agree, ids, groups)
        assert assert_agree(first_copies.copies_agree, second_copies.copies_agree, [same, other], [[0], [1]])
        four = [same, same, same, other]
        found = assert_agree(first_copies.copies_agree, second_copies.copies_agree, four, [[0, 1], [2, 3]])
        assert expected is found


ZEROS = np.zeros((2, 3))
NANS = np.array([math.nan, 1.0])


class TestOutputsOfCopies:
    @pytest.mark.parametrize(
        ("copies", "expected"),
        [
            ([ZEROS], True),
            ([ZEROS, ZEROS.copy()], True),
            ([ZEROS, ZEROS, ZEROS + 2.0**-1074], False),
            ([ZEROS, -ZEROS], False),
            ([ZEROS, ZEROS.reshape(3, 2)], False),
            ([ZEROS, ZEROS.astype(np.float32)], False),
            ([ZEROS, ZEROS.astype(np.int64)], False),  # the same bytes, read as another type
            ([NANS, NANS.copy()], True),
            ([NANS, -NANS], False),
            ([ZEROS[:0], ZEROS[:0].copy()], True),
            ([np.arange(6.0).reshape(2, 3).T, np.ascontiguousarray(np.arange(6.0).reshape(2, 3).T)], True),
            ([np.arange(6.0).reshape(2, 3).T, np.arange(6.0).reshape(3, 2)], False),
        ],
    )
    def test_same_bytes(self, copies: list[Any], expected: bool) -> None:
        """Type, shape and bytes, in the order of elements, not of memory."""
        assert expected is assert_agree(first_copies.same_bytes, second_copies.same_bytes, copies)

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
        expected = second_copies.gathered(made, declared)
        actual = first_copies.gathered([torch.from_numpy(each) for each in made], declared)
        assert (copies if declared == "complete" else 1) == len(expected)
        for one, other in zip(expected, actual, strict=True):
            assert_close(one, other, addend=5.0)

    @pytest.mark.parametrize(
        ("copies", "declared"),
        [([], "parts"), ([], "complete"), ([ZEROS], "whole"), ([ZEROS, ZEROS[:1]], "parts"),
         ([ZEROS, ZEROS[:1]], "complete")],
    )  # fmt: skip
    def test_refused(self, copies: list[Floats], declared: Any) -> None:
        """No copy, another word, copies of different shapes."""
        assert_refused(first_copies.gathered, second_copies.gathered, copies, declared)
        if not copies:
            assert_refused(first_copies.same_bytes, second_copies.same_bytes, copies)
