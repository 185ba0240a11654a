"""Orders and padding of rows, worked out twice: the first sorts and indexes, the longhand carries each row."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.permute import orders as first
from moe_conformance.reference.permute import padded_segments
from self_tests.chapters.permute import second
from self_tests.oracles.agreement import ints
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


def shuffled(size: int, random: Random) -> list[int]:
    """Some order of 0 .. size - 1."""
    return random.sample(range(size), size)


class TestOtherOrders:
    @pairs_agree
    @given(st.integers(0, 4), st.integers(0, 3), st.randoms(use_true_random=False))
    def test_tokens_and_slots_move_alike(self, T: int, K: int, random: Random) -> None:
        """Both carry rows of tokens, and slots by each token's own order, to the same places, bit for bit."""
        order, slots = shuffled(T, random), [shuffled(K, random) for _ in range(T)]
        values = torch.arange(T * K).reshape(T, K)
        assert second.tokens_in_order(values.tolist(), order) == first.reorder_tokens(values, ints(order)).tolist()
        made = first.reorder_slots(values, ints(order), ints(slots).reshape(T, K))
        assert second.slots_in_order(values.tolist(), order, slots) == made.tolist()
        assert (T, K) == tuple(made.shape)
        assert torch.bfloat16 == first.reorder_slots(values.bfloat16(), ints(order), ints(slots).reshape(T, K)).dtype

    @pairs_agree
    @given(st.integers(1, 5), st.integers(0, 3), st.randoms(use_true_random=False))
    def test_experts_are_renamed_alike(self, E: int, T: int, random: Random) -> None:
        """Both give each id its new number, leave empty slots empty, and move the parameters along."""
        names = shuffled(E, random)
        ids = [[random.randint(-1, E - 1) for _ in range(2)] for _ in range(T)]
        assert second.renamed(ids, names) == first.relabel(ints(ids).reshape(T, 2), ints(names)).tolist()
        held = {(name, e): float(10 * e + place) for place, name in enumerate(("a", "b")) for e in range(0, E, 2)}
        made = first.relabel_parameters({key: torch.tensor(value) for key, value in held.items()}, ints(names))
        assert second.renamed_parameters(held, names) == {key: value.item() for key, value in made.items()}


def rows_of(made: first.Rows) -> list[second.Row]:
    """The first oracle's rows one by one."""
    columns = (made.expert, made.source, made.token, made.slot)
    assert all(torch.int64 == column.dtype for column in columns)
    return [second.Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def columns_of(rows: Sequence[second.Row]) -> first.Rows:
    """Rows of the longhand as the first oracle keeps them."""
    columns = ints(rows).reshape(len(rows), 4).T
    return first.Rows(source=columns[1], token=columns[2], slot=columns[3], expert=columns[0])


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[Ints], list[int]]:
    """Ids of one to three ranks, repeated experts, empty slots and absent tokens included; some experts are held."""
    slots = draw(st.integers(0, 3))
    ids = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.lists(st.lists(st.integers(-1, 4), min_size=slots, max_size=slots), max_size=4))
        ids.append(np.array(rows, dtype=np.int64).reshape(len(rows), slots))
    return ids, draw(st.permutations(range(5)))[: draw(st.integers(0, 5))]


class TestSegments:
    @pairs_agree
    @given(routings(), st.sampled_from([1, 2, 3, 5]), st.booleans())
    def test_rows_agree(self, case: tuple[list[Ints], list[int]], multiple: int, pad_empty: bool) -> None:
        """Both list the same rows: segments as the experts are listed, pairs by source, token, slot, then padding."""
        ids, held = case
        tensors = [torch.from_numpy(array) for array in ids]
        made = first.expert_major(tensors, held, multiple=multiple, pad_empty=pad_empty)
        expected = second.segments(ids, held, multiple, pad_empty=pad_empty)
        assert expected == rows_of(made)
        counts = [sum(row.expert == e for row in expected) for e in held]
        pairs = [sum(row.expert == e and row.source >= 0 for row in expected) for e in held]
        assert all(padded_segments.legal_counts(counts, pairs, multiple))
        assert [row.source < 0 for row in expected] == padded_segments.padding_rows(counts, pairs).tolist()
        assert all(first.in_order(made).values())

    @pairs_agree
    @given(routings(), st.integers(1, 2), st.randoms(use_true_random=False), st.booleans())
    def test_verdicts_on_orders_agree(
        self, case: tuple[list[Ints], list[int]], multiple: int, random: Random, twice: bool
    ) -> None:
        """Rows swapped, or one repeated: both say which experts' rows no longer ascend."""
        rows = second.segments(*case, multiple)
        for _ in range(random.randint(0, 2) if len(rows) > 1 else 0):
            a, b = random.sample(range(len(rows)), 2)
            rows[a], rows[b] = rows[b], rows[a]
        if twice and rows:
            rows.insert(random.randrange(len(rows)), random.choice(rows))
        assert second.ascending(rows) == first.in_order(columns_of(rows))

    @pairs_agree
    @given(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 6)), max_size=4), st.integers(1, 4))
    def test_verdicts_on_counts_agree(self, pairs: list[tuple[int, int]], multiple: int) -> None:
        """Both accept the smallest multiple, and for an idle expert none or one of more than a row."""
        claimed, rows = [claim for claim, _ in pairs], [n for _, n in pairs]
        made = padded_segments.legal_counts(claimed, rows, multiple)
        assert second.counts_are_legal(claimed, rows, multiple) == list(made)

    @pairs_agree
    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4))
    def test_starts_and_padding_agree(self, pairs: list[tuple[int, int]]) -> None:
        """Both begin segments at the sum of the counts before, and put padding behind the rows."""
        rows, counts = [n for n, _ in pairs], [n + more for n, more in pairs]
        assert second.starts(counts) == list(padded_segments.segment_starts(counts))
        assert second.is_padding(counts, rows) == padded_segments.padding_rows(counts, rows).tolist()

    def test_columns_of_different_length_are_no_rows(self) -> None:
        """The first oracle keeps rows in columns, which must be equally long."""
        with pytest.raises(ValueError, match=r"."):
            first.in_order(first.Rows(ints([0]), ints([0, 1]), ints([0]), ints([0])))


ORDERS, TURNED, IDS = [[0], [0, 1, 2], [0, 0], [1, 2], [-1, 0]], [2, 0, 1], [np.array([[0, 1]]), np.array([[-1, 1]])]

test_by_hand = by_hand(
    *rows(lambda values, order: first.reorder_tokens(ints(values), ints(order)), second.tokens_in_order,
        *((f"tokens in order {order}", ([1, 2], order), REFUSED) for order in ORDERS),
    ),
    *rows(lambda held, names: first.relabel_parameters(held, ints(names)), second.renamed_parameters,
        *((f"parameters named {order}, 5", ({}, [*order, 5]), REFUSED) for order in ORDERS),
        *((f"parameters of expert {e} of 3", ({("a", e): torch.ones(1)}, TURNED), REFUSED) for e in (-1, 3)),
    ),
    *rows(
        lambda values, order, slots: first.reorder_slots(ints(values), ints(order), ints(slots)),
        second.slots_in_order,
        *(
            (f"slots {slots} of tokens {order}", ([[1, 2], [3, 4]], order, slots), REFUSED)
            for order, slots in [
                ([0, 0], [[0, 1], [0, 1]]), ([0, 1], [[0, 1], [1, 1]]), ([0, 1], [[0, 1]]), ([1, 0], [[0], [0]]),
            ]
        ),
    ),
    *rows(lambda ids, names: first.relabel(ints(ids), ints(names)), second.renamed,
        *((f"id {expert} of 3", ([[expert]], TURNED), REFUSED) for expert in (-2, 3)),
    ),
    *rows(lambda ids, held, multiple: first.expert_major(ids, held, multiple=multiple), second.segments,
        ("an expert twice", (IDS, [0, 0], 1), REFUSED),
        ("expert -1", (IDS, [-1], 1), REFUSED),
        ("id -2", ([np.array([[0, -2]])], [0], 1), REFUSED),
        *((f"multiples of {multiple}", (IDS, [0], multiple), REFUSED) for multiple in (0, -2)),
    ),
    *rows(padded_segments.legal_counts, second.counts_are_legal,
        *(
            (f"counts {claimed} of {pairs} rows, multiples of {multiple}", (claimed, pairs, multiple), REFUSED)
            for claimed, pairs, multiple in [([4], [4, 0], 4), ([4], [4], 0), ([4], [-1], 4)]
        ),
    ),
    *rows(padded_segments.padding_rows, second.is_padding,
        *((f"{n} rows in {made}", (made, n), REFUSED) for made, n in [([4], [5]), ([4], [-1]), ([4, 4], [4])]),
    ),
    *rows(padded_segments.segment_starts, second.starts, ("a count of -1", ([2, -1],), REFUSED)),
)  # fmt: skip
